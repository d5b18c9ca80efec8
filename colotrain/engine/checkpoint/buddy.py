"""Launchers with copies of the state: that of another node, which keeps this rank's, and any other.

All raise `OSError` and `ValueError`.
"""

from __future__ import annotations

from dataclasses import dataclass

from colotrain.connections import Connection, read, send, send_file
from colotrain.engine.checkpoint.memory_file import MemoryFile
from colotrain.spec.elastic import COPY_STALL_S


class Buddy:
    """A connection on which this rank's copies are sent."""

    def __init__(self, address: str, rank: int, *, secret: str) -> None:
        hello = {"rank": rank}
        self.connection = Connection(address, secret=secret, hello=hello, timeout_s=COPY_STALL_S)

    def send(self, file: MemoryFile, number: int, *, beside: int) -> None:
        """Send a copy; returns when it is kept, beside copy number `beside`."""
        stream = self.connection.stream
        num_bytes = file.end()
        send(stream, {"number": number, "bytes": num_bytes, "beside": beside})
        if refused := read(stream).get("refused"):
            raise OSError(str(refused))
        send_file(stream, file.handle, num_bytes)
        if read(stream).get("kept") != number:
            raise OSError("the copy was not kept")


class RemoteLauncher:
    """A connection on which files in a launcher's memory are read."""

    def __init__(self, address: str, *, secret: str) -> None:
        self.connection = Connection(address, secret=secret, hello={}, timeout_s=COPY_STALL_S)

    def read_into(self, handle: int, start: int, data: memoryview) -> None:
        """Fill `data` with bytes of the launcher's file `handle`."""
        stream = self.connection.stream
        send(stream, {"file": handle, "start": start, "bytes": len(data)})
        while data:
            got = stream.readinto(data)
            if not got:
                raise OSError("the connection has ended")
            data = data[got:]

    def free_before(self, number: int) -> None:
        """Free the copies of ranks of whom the launcher keeps none of this number or a later one.

        Those are of ranks that another launcher keeps now, or that are no more.
        """
        send(self.connection.stream, {"free_before": number})
        read(self.connection.stream)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file in a launcher's memory (`dcp_json.Source`)."""

    launcher: RemoteLauncher
    handle: int
    num_bytes: int

    def read_into(self, start: int, data: memoryview) -> None:
        self.launcher.read_into(self.handle, start, data)
