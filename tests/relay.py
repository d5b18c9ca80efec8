"""Somebody on the way between two processes, and what he costs them."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Callable
from pathlib import Path

Change = Callable[[bytes, int, bool], bytes]


class Relay:
    """Takes one connection, and passes on what both sides say, as `change` makes it.

    It is called with the bytes, how many the same side has sent before, and whether that is the
    client.
    """

    def __init__(self, where: tuple[str, int], change: Change = lambda data, at, _: data) -> None:
        self.to, self.change = where, change
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.where: tuple[str, int] = self.listener.getsockname()
        self.address = f"127.0.0.1:{self.where[1]}"
        self.seen: dict[bool, bytes] = {True: b"", False: b""}
        self._server: socket.socket | None = None
        threading.Thread(target=self._accept, daemon=True).start()

    def add(self, data: bytes) -> None:
        """Send the server something of one's own, as if the client had said it."""
        assert self._server is not None
        with contextlib.suppress(OSError):
            self._server.sendall(data)

    def _accept(self) -> None:
        client, _ = self.listener.accept()
        self._server = server = socket.create_connection(self.to)
        for one, other, is_client in ((client, server, True), (server, client, False)):
            threading.Thread(
                target=self._pass_on, args=(one, other, is_client), daemon=True
            ).start()

    def _pass_on(self, one: socket.socket, other: socket.socket, is_client: bool) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                at = len(self.seen[is_client])
                self.seen[is_client] += data
                other.sendall(self.change(data, at, is_client))
        with contextlib.suppress(OSError):
            other.shutdown(socket.SHUT_WR)


def peak_kib(pid: int) -> int:
    """Return the most memory that a process has taken (`ru_maxrss` holds its parent's, too)."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found
    return int(found[1])
