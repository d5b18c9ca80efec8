"""Copies in memory that this launcher keeps for the ranks of another node, and gives back.

Each node of a round keeps the copies of the next one's ranks, and the last node those of the
first, beside its own. Ranks send a copy as soon as they have made it, and go on once it is kept. A
launcher that takes the place of a lost one fetches the copies of its ranks before it starts them. A
copy that was not received whole fails its own checksums (`engine.checkpoint.memory_file`).
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from colotrain import host
from colotrain.connections import (
    Connection,
    accept_all,
    read,
    receive_file,
    send,
    send_file,
    welcome,
)
from colotrain.launch.memory_files import COPIES
from colotrain.spec.elastic import COPY_STALL_S

SHARE_OF_FREE_MEMORY = 0.9


@dataclass(slots=True)
class _Kept:
    """The files of one rank; empty before it has sent anything."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    handles: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=lambda: [0] * COPIES)
    """Bytes of the last whole copy in each file."""
    numbers: list[int] = field(default_factory=lambda: [-1] * COPIES)
    """Numbers of these copies."""


class CopyKeeper:
    """Listens until `close`, and keeps the two newest copies of each rank that sends some."""

    def __init__(self, listener: socket.socket, *, secret: Callable[[], str]) -> None:
        self.listener, self.secret = listener, secret
        self.port: int = listener.getsockname()[1]
        self.kept: dict[int, _Kept] = {}
        self._lock = threading.Lock()
        accept_all(self.listener, self._serve, name="copy-keeper")

    def close(self) -> None:
        """Stop listening, and free the files into which nothing is being received."""
        self.listener.close()
        with self._lock:
            for kept in self.kept.values():
                # never released, so that nothing more is kept
                if kept.lock.acquire(blocking=False):
                    for handle in kept.handles:
                        os.close(handle)

    def _serve(self, connection: socket.socket) -> None:
        gone = (OSError, ValueError, LookupError, TypeError, RecursionError)
        with contextlib.suppress(*gone), connection, connection.makefile("rwb") as stream:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection.settimeout(COPY_STALL_S)
            hello = welcome(stream, self.secret())
            with self._lock:
                kept = self.kept.setdefault(int(hello["rank"]), _Kept())
            if hello["fetch"]:
                self._give_back(stream, kept)
                return
            while True:
                connection.settimeout(None)  # steps may take hours
                header = read(stream)
                connection.settimeout(COPY_STALL_S)
                with kept.lock:
                    self._keep(stream, kept, header)

    def _keep(self, stream: Any, kept: _Kept, header: dict[str, Any]) -> None:
        """Receive a copy in place of one that is older or void."""
        number, num_bytes = int(header["number"]), int(header["bytes"])
        if not kept.handles:
            kept.handles = [
                os.memfd_create("colotrain-kept", os.MFD_CLOEXEC) for _ in range(COPIES)
            ]
        slot = next(i for i, other in enumerate(kept.numbers) if other != header["beside"])
        more = num_bytes - os.fstat(kept.handles[slot]).st_size
        if more > SHARE_OF_FREE_MEMORY * host.free_bytes():
            send(stream, {"refused": f"its node has no {num_bytes >> 20} MiB free"})
            return
        send(stream, {"refused": ""})
        receive_file(stream, kept.handles[slot], num_bytes)
        kept.sizes[slot], kept.numbers[slot] = num_bytes, number
        send(stream, {"kept": number})

    def _give_back(self, stream: Any, kept: _Kept) -> None:
        if not kept.lock.acquire(timeout=COPY_STALL_S):
            return
        try:
            for handle, num_bytes in zip(kept.handles, kept.sizes, strict=False):
                send(stream, {"bytes": num_bytes})
                send_file(stream, handle, num_bytes)
            send(stream, {"end": True})
        finally:
            kept.lock.release()


@dataclass(frozen=True, slots=True, kw_only=True)
class Buddy:
    """The keeper of this node's copies: another node's launcher."""

    host: str
    port: int
    secret: str

    def for_ranks(self) -> str:
        """Return what a rank needs to reach it, as text."""
        return json.dumps([self.host, self.port, self.secret])

    def fetch_all(self, first_rank: int, handles: Sequence[int]) -> None:
        """Read the copies of a machine's ranks, from `first_rank` on, into their files."""
        for start in range(0, len(handles), COPIES):
            self.fetch(first_rank + start // COPIES, handles[start : start + COPIES])

    def fetch(self, rank: int, handles: Sequence[int]) -> bool:
        """Read the copies of a rank into files; return whether there were any.

        What cannot be fetched is left out: the run goes on from a checkpoint then.
        """
        found = False
        with contextlib.suppress(OSError, ValueError):
            hello = {"rank": rank, "fetch": True}
            connection = Connection(
                self.host, self.port, secret=self.secret, hello=hello, timeout_s=COPY_STALL_S
            )
            with contextlib.closing(connection):
                for handle in handles:
                    num_bytes = int(read(connection.stream).get("bytes", -1))
                    if num_bytes < 0:
                        break
                    receive_file(connection.stream, handle, num_bytes)
                    found = found or num_bytes > 0
        return found
