"""The launcher of another node, which keeps this rank's copies beside its own node's."""

from __future__ import annotations

import json

from colotrain.connections import Connection, read, send, send_file
from colotrain.engine.checkpoint.memory_file import MemoryFile
from colotrain.spec.elastic import COPY_STALL_S


class Buddy:
    """A connection on which this rank's copies are sent. Raises `OSError` and `ValueError`."""

    def __init__(self, keeper: str, rank: int) -> None:
        """`keeper` is host, port and secret, as JSON."""
        host, port, secret = json.loads(keeper)
        hello = {"rank": rank, "fetch": False}
        self.connection = Connection(host, port, secret=secret, hello=hello, timeout_s=COPY_STALL_S)

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
