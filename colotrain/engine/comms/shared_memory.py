"""Memory that the ranks of one host share, with semaphores by which they wait for one another.

The memory is an anonymous file (memfd). It has no name in any file system, so the kernel frees it
when the last rank ends, however the ranks end, and the size of /dev/shm does not limit it. Ranks
signal each other by POSIX semaphores in the memory: a waiting rank sleeps in the kernel, and libc's
semaphores order reads and writes on every architecture.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import socket
import time
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from colotrain import host
from colotrain.engine.comms import exchange
from colotrain.engine.comms.waiting import waiting
from colotrain.lost_peers import PeerLost
from colotrain.records import from_plain, to_plain
from colotrain.torch_internals import timeout_s

PAGE = mmap.PAGESIZE
SEMAPHORE_BYTES = 64
"""Bytes per semaphore: one cache line, as sem_t takes 32 bytes or less."""
HEADER_BYTES = 64
"""Bytes of the header: 16 random ones that identify the memory, then the entry `LOST`."""
LOST = 2
"""Index in the header, in int64s, of 1 + the rank whose process was found to have ended."""
TRIES = 20
"""Attempts, each followed by giving up the core, before a waiting rank sleeps."""
LOOK_EVERY_S = 0.2
"""Seconds between two checks of a sleeping rank that the other ranks still run."""
SHARE_OF_FREE_MEMORY = 0.5
"""Largest part of the host's free memory that is used by default."""

_libc = ctypes.CDLL(None, use_errno=True)


class Unavailable(Exception):
    """Ranks cannot share memory; the message says why. Raised on all ranks or on none."""


class _Timespec(ctypes.Structure):
    _fields_ = (("s", ctypes.c_long), ("ns", ctypes.c_long))


@dataclass(frozen=True, slots=True, kw_only=True)
class _PeerInfo:
    """What each rank tells the others before they share memory."""

    host: str
    pid: int
    fd: int
    token: str
    """Text in hexadecimal."""
    problem: str | None


class SharedMemory:
    """`num_bytes` of memory, zero at first, mapped by all ranks of a group on one host.

    All ranks of `group` must create it together. It also has `num_semaphores` semaphores for each
    ordered pair of ranks: `post` posts one for a rank, `wait` waits for one.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_bytes: int,
        *,
        num_semaphores: int,
        share_of_free: float = SHARE_OF_FREE_MEMORY,
    ) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.ranks = dist.get_process_group_ranks(group)
        self.timeout_s = timeout_s(group)
        total = num_semaphores * self.size**2
        self._start = round_up(HEADER_BYTES + total * SEMAPHORE_BYTES, PAGE)
        self.num_bytes = self._start + round_up(num_bytes, PAGE)
        self._map(total, share_of_free)
        self.header = memoryview(self.memory)[:HEADER_BYTES].cast("q")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory)) + HEADER_BYTES

    def _map(self, num_semaphores: int, share_of_free: float) -> None:
        fd, problem, token = -1, None, os.urandom(16)
        try:
            if self.rank == 0:
                fd = _create(self.num_bytes, num_semaphores, token, share_of_free)
        except (OSError, Unavailable) as error:
            problem = str(error)
        own = _PeerInfo(host=_host(), pid=os.getpid(), fd=fd, token=token.hex(), problem=problem)
        told = exchange.all_gather(to_plain(own), self.group)
        infos = [from_plain(_PeerInfo, one) for one in told]
        try:
            _agree([info.problem for info in infos])
            if len({info.host for info in infos}) > 1:
                raise Unavailable("its ranks run on different hosts")
            problem = None
            try:
                self._attach(infos)
            except (OSError, AttributeError) as error:
                problem = f"rank {self.ranks[self.rank]}: {error}"
            _agree(exchange.all_gather(problem, self.group))
        finally:
            if fd >= 0:
                os.close(fd)

    def _attach(self, infos: list[_PeerInfo]) -> None:
        owner = infos[0]
        fd = os.open(f"/proc/{owner.pid}/fd/{owner.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            self.memory = mmap.mmap(fd, self.num_bytes)
        finally:
            os.close(fd)
        if self.memory[:16] != bytes.fromhex(owner.token):
            raise OSError("the process of another rank cannot be reached through /proc")
        self.pids = [info.pid for info in infos]
        self.watched = [os.pidfd_open(pid) for pid in self.pids]
        self.close = weakref.finalize(self, _close, self.watched)
        """Stop watching the other ranks. The last tensor that uses the memory unmaps it."""

    def bytes(self, start: int, num_bytes: int) -> Tensor:
        """Return a view of the shared bytes: uint8 [num_bytes]."""
        start += self._start
        return torch.frombuffer(self.memory, dtype=torch.uint8, count=num_bytes, offset=start)

    def advise(self, advice: int, start: int, num_bytes: int) -> None:
        """Call `madvise` on shared bytes, which must begin and end at page boundaries."""
        if num_bytes:
            self.memory.madvise(advice, self._start + start, num_bytes)

    def buffer_at(self, start: int, num_bytes: int) -> Any:
        """Return the shared bytes as an object of their own, which can have a weak reference."""
        return (ctypes.c_ubyte * num_bytes).from_buffer(self.memory, self._start + start)

    def _pointer(self, semaphore: int, sender: int, receiver: int) -> ctypes.c_void_p:
        index = (semaphore * self.size + receiver) * self.size + sender
        return ctypes.c_void_p(self._address + index * SEMAPHORE_BYTES)

    def post(self, semaphore: int, receiver: int) -> None:
        """Post `semaphore` of the rank `receiver`."""
        _libc.sem_post(self._pointer(semaphore, self.rank, receiver))

    def wait(self, semaphore: int, sender: int, *, what: str) -> None:
        """Wait until the rank `sender` has posted `semaphore` of this rank.

        Raises `PeerLost` within seconds of the end of that process, or when any rank found another
        one ended, or after the timeout of the process group. Time in which this process was stopped
        (SIGSTOP) does not count, because the other ranks were stopped too.
        """
        waited_s, looked_at = 0.0, time.monotonic()
        while not self.try_wait(semaphore, sender, within_s=LOOK_EVERY_S):
            lost = self._lost(sender)
            if lost is not None and not self.try_wait(semaphore, sender, within_s=0.0):
                self.header[LOST] = lost + 1
                name = f"rank {self.ranks[lost]} (process {self.pids[lost]})"
                raise PeerLost(f"Connection closed by peer: {name} has gone during {what}")
            now = time.monotonic()
            waited_s, looked_at = waited_s + min(now - looked_at, 2 * LOOK_EVERY_S), now
            if waited_s > self.timeout_s:
                name = f"rank {self.ranks[sender]}"
                raise PeerLost(f"Timed out waiting {self.timeout_s:g} s for {name} in {what}")

    def barrier(self, semaphore: int, what: str) -> None:
        """Wait until all ranks are here, by means of `semaphore`. Raises as `wait` does."""
        peers = [rank for rank in range(self.size) if rank != self.rank]
        for peer in peers:
            self.post(semaphore, peer)
        for peer in peers:
            self.wait(semaphore, peer, what=what)

    def try_wait(self, semaphore: int, sender: int, *, within_s: float) -> bool:
        """Wait about `within_s` for `sender` to post `semaphore`; False if it was not posted."""
        pointer = self._pointer(semaphore, sender, self.rank)
        if _libc.sem_trywait(pointer) == 0:
            return True
        with waiting():
            for _ in range(TRIES - 1):
                os.sched_yield()
                if _libc.sem_trywait(pointer) == 0:
                    return True
            return within_s > 0.0 and _sleep(pointer, within_s)

    def _lost(self, sender: int) -> int | None:
        """Return the rank that some rank found ended, or `sender` if it has ended, or None."""
        if self.header[LOST]:
            return int(self.header[LOST]) - 1
        poll = select.poll()
        poll.register(self.watched[sender], select.POLLIN)
        return sender if poll.poll(0) else None


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _create(num_bytes: int, num_semaphores: int, token: bytes, share_of_free: float) -> int:
    if not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):
        raise Unavailable("this system has no memfd or no pidfd (Linux 5.3 or later has both)")
    if num_bytes > share_of_free * host.free_bytes():
        need, free = num_bytes >> 20, host.free_bytes() >> 20
        raise Unavailable(f"{need} MiB are needed, and only {free} MiB of memory are free")
    fd = os.memfd_create("colotrain", os.MFD_CLOEXEC)
    os.ftruncate(fd, num_bytes)
    with mmap.mmap(fd, num_bytes) as memory:
        memory[:16] = token
        first = ctypes.c_char.from_buffer(memory, HEADER_BYTES)
        address = ctypes.addressof(first)
        for index in range(num_semaphores):
            _libc.sem_init(ctypes.c_void_p(address + index * SEMAPHORE_BYTES), 1, 0)
        del first  # otherwise the mapping cannot be closed
    return fd


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
    fds.clear()


def _host() -> str:
    """Return a text, equal on ranks that can share memory and see each other's processes."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    space = Path("/proc/self/ns/pid")
    known = [str(p.read_text() if p is boot else p.readlink()) for p in (boot, space) if p.exists()]
    return " ".join((socket.gethostname(), *known))


def _agree(problems: list[str | None]) -> None:
    found = [problem for problem in problems if problem]
    if found:
        raise Unavailable(found[0])


def _sleep(semaphore: ctypes.c_void_p, within_s: float) -> bool:
    """Wait in the kernel. False after that time, or when a signal came."""
    if hasattr(_libc, "sem_clockwait"):  # glibc 2.30; the other call jumps with the wall clock
        until = ctypes.byref(_timespec(time.monotonic() + within_s))
        return bool(_libc.sem_clockwait(semaphore, time.CLOCK_MONOTONIC, until) == 0)
    until = ctypes.byref(_timespec(time.time() + within_s))
    return bool(_libc.sem_timedwait(semaphore, until) == 0)


def _timespec(at: float) -> _Timespec:
    return _Timespec(int(at), int(at % 1 * 1e9))
