"""Copies of workers' state in the launcher's memory, those of another node's ranks included.

They are in anonymous files, which outlive the workers and have no name in any file system, so that
the kernel frees them however the launcher ends.

Each node of a round keeps the copies of the next one's ranks, and the last node those of the
first, beside its own. Ranks send a copy as soon as they have made it, and go on once it is kept.
Where ranks begin with other nodes than before, they read what they need of any copy, those of this
launcher's own ranks included. A copy that was not received whole fails its own checksums
(`engine.state.memory_file`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from colotrain import host
from colotrain.connections import MALFORMED, Link, Service
from colotrain.spec.elastic import COPIES, COPY_SERVICE, COPY_STALL_S
from colotrain.spec.plan import RunPlan


class MemoryFiles:
    """The files of this machine's workers; none where the plan or the system has no such files."""

    def __init__(self, plan: RunPlan) -> None:
        wanted = plan.elastic.memory_copy.enabled and hasattr(os, "memfd_create")
        num = COPIES * plan.cluster.procs_per_node if wanted else 0
        self.handles = [os.memfd_create("colotrain-copy", os.MFD_CLOEXEC) for _ in range(num)]

    def close(self) -> None:
        """Free the memory, unless workers still run."""
        handles, self.handles = self.handles, []
        for handle in handles:
            with contextlib.suppress(OSError):
                os.close(handle)


@dataclass(slots=True)
class _Kept:
    """The files of one rank; empty before it has sent anything."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    handles: list[int] = field(default_factory=list)
    numbers: list[int] = field(default_factory=lambda: [-1] * COPIES)
    """Numbers of the last whole copy in each file."""


class CopyKeeper:
    """Listens until `close`, and keeps the two newest copies of each rank that sends some."""

    def __init__(
        self,
        listener: socket.socket,
        *,
        secret: Callable[[], str],
        files: MemoryFiles,
        say: Callable[[str], None] = print,
    ) -> None:
        """`files` are those of this launcher's own ranks; `secret` must not wait, and `say` tells
        people why connections are refused."""
        self.files = files
        self.port: int = listener.getsockname()[1]
        self.kept: dict[int, _Kept] = {}
        self.senders = set[Link]()
        self._lock = threading.Lock()
        self._service = Service(listener, self._serve, secret=secret, name=COPY_SERVICE, say=say)

    def close(self) -> None:
        """Stop listening, and free the files into which nothing is being received."""
        self._service.close()
        with self._lock:
            for kept in self.kept.values():
                # never released, so that nothing more is kept
                if kept.lock.acquire(blocking=False):
                    for handle in kept.handles:
                        os.close(handle)

    def end_senders(self) -> None:
        """End the connections of an earlier round's ranks, so that what is kept stays as it is."""
        with self._lock:
            senders, self.senders = self.senders, set()
            everything = list(self.kept.values())
        for link in senders:
            link.cut()
        for kept in everything:
            if kept.lock.acquire(timeout=COPY_STALL_S):
                kept.lock.release()

    def handles(self) -> tuple[int, ...]:
        """Return the files of all ranks that have sent something."""
        with self._lock:
            return tuple(handle for kept in self.kept.values() for handle in kept.handles)

    def _serve(self, link: Link) -> None:
        with contextlib.suppress(*MALFORMED):
            hello = link.read(within_s=COPY_STALL_S)
            if hello["to"] != f"{link.own_address}:{self.port}":
                return  # somebody on the way sent it here
            serve: Callable[[Link, dict[str, Any]], None] = self._answer
            if "rank" in hello:
                with self._lock:
                    self.senders.add(link)
                    kept = self.kept.setdefault(int(hello["rank"]), _Kept())
                serve = lambda link, header: self._keep(link, kept, header)  # noqa: E731
            while True:
                link.wait()  # steps may take hours
                serve(link, link.read(within_s=COPY_STALL_S))

    def _keep(self, link: Link, kept: _Kept, header: dict[str, Any]) -> None:
        """Receive a copy in place of one that is older or void."""
        number, num_bytes = int(header["number"]), int(header["bytes"])
        with kept.lock:
            if not kept.handles:
                names = ["colotrain-kept"] * COPIES
                kept.handles = [os.memfd_create(name, os.MFD_CLOEXEC) for name in names]
            slot = int(kept.numbers[0] == header["beside"])
            more = num_bytes - os.fstat(kept.handles[slot]).st_size
            if not host.has_room(more):
                refused = f"its node has no {num_bytes >> 20} MiB free"
                link.send({"refused": refused}, within_s=COPY_STALL_S)
                return
            link.send({"refused": ""}, within_s=COPY_STALL_S)
            link.receive_file(kept.handles[slot], num_bytes, stall_s=COPY_STALL_S)
            kept.numbers[slot] = number
            link.send({"kept": number}, within_s=COPY_STALL_S)

    def _answer(self, link: Link, asked: dict[str, Any]) -> None:
        """Send a part of a file, or free copies that are of no use any more."""
        if "free_before" in asked:
            self._free(int(asked["free_before"]))
            link.send({"freed": True}, within_s=COPY_STALL_S)
            return
        num_bytes, start = int(asked["bytes"]), int(asked["start"])
        with self._readable(int(asked["file"])) as handle:
            link.send_file(handle, num_bytes, start=start, stall_s=COPY_STALL_S)

    def _free(self, number: int) -> None:
        """Free the files of ranks of whom no copy is of this number or a later one."""
        with self._lock:
            everything = list(self.kept.values())
        for kept in everything:
            with kept.lock:
                if max(kept.numbers) < number:
                    kept.numbers = [-1] * COPIES
                    for handle in kept.handles:
                        os.ftruncate(handle, 0)

    @contextlib.contextmanager
    def _readable(self, handle: int) -> Iterator[int]:
        """Yield a handle that others may read; `LookupError` for any other of this process."""
        if handle in self.files.handles:
            yield handle
            return
        with self._lock:
            kept = next((k for k in self.kept.values() if handle in k.handles), None)
        if kept is None:
            raise LookupError(handle)
        with kept.lock:
            yield handle
