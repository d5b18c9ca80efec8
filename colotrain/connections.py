"""Lines of JSON over TCP between processes of one run, which prove that they know its secret.

Nothing received is unpickled.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import threading
from collections.abc import Callable
from io import BufferedRWPair
from typing import Any

LINE_BYTES = 4 << 20
WINDOW_BYTES = 1 << 20
"""Bytes of a file that are sent or received at once."""


def proof(secret: str, nonce: str) -> str:
    """Return an HMAC that proves knowledge of the secret without revealing it."""
    return hmac.new(secret.encode(), nonce.encode(), "sha256").hexdigest()


def send(stream: BufferedRWPair, document: dict[str, Any]) -> None:
    stream.write(json.dumps(document).encode() + b"\n")
    stream.flush()


def read(stream: BufferedRWPair) -> dict[str, Any]:
    line = stream.readline(LINE_BYTES)
    if not line.endswith(b"\n"):
        raise OSError("the connection has ended")
    document = json.loads(line)
    if not isinstance(document, dict):
        raise ValueError("not a JSON object")
    return document


def accept_all(
    listener: socket.socket, serve: Callable[[socket.socket], None], *, name: str
) -> None:
    """Serve each connection in a thread of its own until the listener is closed; does not wait."""

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # the listener was closed
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, name=name, daemon=True).start()


class StrangerError(ValueError):
    """The other side does not know the secret."""


class Connection:
    """A connection to a process that asks for the secret first. Raises `OSError`, `ValueError`."""

    def __init__(
        self, address: str, *, secret: str, hello: dict[str, Any], timeout_s: float
    ) -> None:
        """`address` is HOST:PORT, `hello` tells what is wanted; `timeout_s` bounds each wait for
        the other side."""
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=timeout_s)
        self.stream = self.socket.makefile("rwb")
        nonce = str(read(self.stream).get("nonce"))
        send(self.stream, hello | {"proof": proof(secret, nonce)})

    def close(self) -> None:
        self.socket.close()


def welcome(stream: BufferedRWPair, secret: str) -> dict[str, Any]:
    """Return the hello of a `Connection`; `StrangerError` if it does not know the secret."""
    nonce = secrets.token_hex(16)
    send(stream, {"nonce": nonce})
    hello = read(stream)
    if not hmac.compare_digest(str(hello.get("proof")), proof(secret, nonce)):
        raise StrangerError("it does not know the secret")
    return hello


def send_file(stream: BufferedRWPair, handle: int, num_bytes: int, *, start: int = 0) -> None:
    """Send bytes of a file from `start` on; `OSError` if it is shorter."""
    at, end = start, start + num_bytes
    while at < end:
        data = os.pread(handle, min(WINDOW_BYTES, end - at), at)
        if not data:
            raise OSError(f"the file ends at byte {at}")
        stream.write(data)
        at += len(data)
    stream.flush()


def receive_file(stream: BufferedRWPair, handle: int, num_bytes: int) -> None:
    """Write received bytes to a file, from its beginning."""
    if num_bytes:
        os.posix_fallocate(handle, 0, num_bytes)
    at = 0
    while at < num_bytes:
        data = memoryview(stream.read(min(WINDOW_BYTES, num_bytes - at)))
        if not data:
            raise OSError("the connection has ended")
        while data:
            done = os.pwrite(handle, data, at)
            data, at = data[done:], at + done
