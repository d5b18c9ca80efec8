"""Launchers with copies of the state: that of another node, which keeps this rank's, and any other.

All raise `OSError` and `ValueError`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from colotrain.connections import Link, connect
from colotrain.engine.state.memory_file import MemoryFile
from colotrain.spec.elastic import COPY_SERVICE, COPY_STALL_S

SHORTEST_PAUSE_S = 30.0
"""Seconds after an error until the other node is tried again; doubled with each error."""


def _connect(address: str, hello: dict[str, Any], *, secret: str) -> Link:
    """Return a connection to the launcher at HOST:PORT, which checks that it is meant."""
    host, _, port = address.rpartition(":")
    link = connect((host, int(port)), secret=secret, service=COPY_SERVICE, within_s=COPY_STALL_S)
    link.send(hello | {"to": address}, within_s=COPY_STALL_S)
    return link


class Buddy:
    """The launcher to which this rank's copies are sent, on a connection that is made when needed.

    An error ends the connection.
    """

    def __init__(self, address: str, rank: int, *, secret: str) -> None:
        self.address, self.rank, self.secret = address, rank, secret
        self.link: Link | None = None
        self.error: Exception | None = None
        """Why it could not be reached the last time; None where it was."""
        self.retry_from, self.pause_s = 0.0, SHORTEST_PAUSE_S
        """Monotonic seconds from which it is tried to be reached, and the pause after an error."""
        self._told = False

    def reach(self, call: Callable[[], object]) -> None:
        """Make one of the calls below; after an error, which may have taken long, only later."""
        if time.monotonic() < self.retry_from:
            return
        try:
            call()
            self.error, self.pause_s = None, SHORTEST_PAUSE_S
        except (OSError, ValueError) as error:
            self.error = error
            self.retry_from = time.monotonic() + self.pause_s
            self.pause_s *= 2

    def news(self) -> str | None:
        """Return that copies go on on this node alone, or that another one has them again, once."""
        if (self.error is not None) == self._told:
            return None
        self._told = self.error is not None
        if self.error is None:
            return f"rank {self.rank}: another node keeps copies of its state again"
        return f"warning: rank {self.rank}: no other node keeps copies of its state: {self.error}"

    def close(self) -> None:
        if self.link is not None:
            self.link.close()
        self.link = None

    def connect(self) -> Link:
        self.link = self.link or _connect(self.address, {"rank": self.rank}, secret=self.secret)
        return self.link

    def send(self, file: MemoryFile, number: int, *, beside: int) -> None:
        """Send a copy; returns when it is kept, beside copy number `beside`."""
        try:
            self._send(self.connect(), file, number, beside)
        except (OSError, ValueError):
            self.close()
            raise

    def _send(self, link: Link, file: MemoryFile, number: int, beside: int) -> None:
        num_bytes = file.end()
        header = {"number": number, "bytes": num_bytes, "beside": beside}
        link.send(header, within_s=COPY_STALL_S)
        if refused := link.read(within_s=COPY_STALL_S).get("refused"):
            raise OSError(str(refused))
        link.send_file(file.handle, num_bytes, stall_s=COPY_STALL_S)
        if link.read(within_s=COPY_STALL_S).get("kept") != number:
            raise OSError("the copy was not kept")


class RemoteLauncher:
    """A connection on which files in a launcher's memory are read, until `close`."""

    def __init__(self, address: str, *, secret: str) -> None:
        self.link = _connect(address, {}, secret=secret)

    def close(self) -> None:
        self.link.close()

    def read_into(self, handle: int, start: int, data: memoryview) -> None:
        """Fill `data` with bytes of the launcher's file `handle`."""
        asked = {"file": handle, "start": start, "bytes": len(data)}
        self.link.send(asked, within_s=COPY_STALL_S)
        self.link.read_into(data, stall_s=COPY_STALL_S)

    def free_before(self, number: int) -> None:
        """Free the copies of ranks of whom the launcher keeps none of this number or a later one.

        Those are of ranks that another launcher keeps now, or that are no more.
        """
        self.link.send({"free_before": number}, within_s=COPY_STALL_S)
        self.link.read(within_s=COPY_STALL_S)


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file in a launcher's memory (`index.Source`)."""

    launcher: RemoteLauncher
    handle: int
    num_bytes: int

    def read_into(self, start: int, data: memoryview) -> None:
        self.launcher.read_into(self.handle, start, data)
