"""Memory that the ranks of one host share, and how they wait for one another in it.

The memory is an anonymous file (memfd): it has no name in any file system, so however the ranks
die, the kernel frees it with the last of them, and the size of /dev/shm is no limit to it. A rank
calls another by a POSIX semaphore that lies in the memory: who waits sleeps in the kernel, and
libc's semaphores order reads and writes on every architecture.
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
from colotrain.torch_internals import timeout_s

PAGE = mmap.PAGESIZE
SEMAPHORE_BYTES = 64
"""One cache line each; sem_t takes 32 bytes or less."""
HEADER_BYTES = 64
"""16 random bytes that prove the memory to be the one meant; then which rank was found gone."""
LOST = 2
"""Where in the header, in int64s: 1 + the rank that was found gone."""
TRIES = 20
"""Attempts, each after giving the core away, before a waiting rank goes to sleep."""
LOOK_EVERY_S = 0.2
"""How often a sleeping rank looks whether the others live."""
SHARE_OF_FREE_MEMORY = 0.5
"""Less is left alone."""

_libc = ctypes.CDLL(None, use_errno=True)


class Unavailable(Exception):
    """Why ranks cannot share memory; raised on all of them or on none."""


class PeerLost(RuntimeError):
    """A rank ended, or did not come in time, while this one waited for it."""


class _Timespec(ctypes.Structure):
    _fields_ = (("s", ctypes.c_long), ("ns", ctypes.c_long))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Hello:
    """What the ranks tell each other before they share memory."""

    host: str
    pid: int
    fd: int
    token: bytes
    problem: str | None


class SharedMemory:
    """`num_bytes` of memory, zero at first, mapped by all ranks of a group on one host.

    All ranks of `group` must create it together. Beside the bytes there are `num_bells` bells for
    each ordered pair of ranks: `ring` counts one up for a rank, `wait` counts one down.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_bytes: int,
        *,
        num_bells: int,
        share_of_free: float = SHARE_OF_FREE_MEMORY,
    ) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.ranks = dist.get_process_group_ranks(group)
        self.timeout_s = timeout_s(group)
        num_semaphores = num_bells * self.size**2
        self._start = round_up(HEADER_BYTES + num_semaphores * SEMAPHORE_BYTES, PAGE)
        self.num_bytes = self._start + round_up(num_bytes, PAGE)
        self._map(num_semaphores, share_of_free)
        self.header = memoryview(self.memory)[:HEADER_BYTES].cast("q")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory)) + HEADER_BYTES

    def _map(self, num_semaphores: int, share_of_free: float) -> None:
        fd, problem, token = -1, None, os.urandom(16)
        try:
            if self.rank == 0:
                fd = _create(self.num_bytes, num_semaphores, token, share_of_free)
        except (OSError, Unavailable) as error:
            problem = str(error)
        mine = _Hello(host=_host(), pid=os.getpid(), fd=fd, token=token, problem=problem)
        hellos: list[_Hello] = _tell(self.group, mine)
        try:
            _agree([hello.problem for hello in hellos])
            if len({hello.host for hello in hellos}) > 1:
                raise Unavailable("its ranks run on different hosts")
            problem = None
            try:
                self._attach(hellos)
            except (OSError, AttributeError) as error:
                problem = f"rank {self.ranks[self.rank]}: {error}"
            _agree(_tell(self.group, problem))
        finally:
            if fd >= 0:
                os.close(fd)

    def _attach(self, hellos: list[_Hello]) -> None:
        owner = hellos[0]
        fd = os.open(f"/proc/{owner.pid}/fd/{owner.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            self.memory = mmap.mmap(fd, self.num_bytes)
        finally:
            os.close(fd)
        if self.memory[:16] != owner.token:
            raise OSError("the process of another rank cannot be reached through /proc")
        self.pids = [hello.pid for hello in hellos]
        self.watched = [os.pidfd_open(pid) for pid in self.pids]
        self.close = weakref.finalize(self, _close, self.watched)
        """Stop watching the other ranks; the memory goes with the last tensor that uses it."""

    def bytes(self, start: int, num_bytes: int) -> Tensor:
        """A view of the shared bytes: uint8 [num_bytes]."""
        start += self._start
        return torch.frombuffer(self.memory, dtype=torch.uint8, count=num_bytes, offset=start)

    def advise(self, advice: int, start: int, num_bytes: int) -> None:
        """`madvise` for shared bytes that begin and end with a page."""
        if num_bytes:
            self.memory.madvise(advice, self._start + start, num_bytes)

    def lend(self, start: int, num_bytes: int) -> Any:
        """The shared bytes as a buffer of its own, whose end a weak reference can tell."""
        return (ctypes.c_ubyte * num_bytes).from_buffer(self.memory, self._start + start)

    def _bell(self, bell: int, sender: int, receiver: int) -> ctypes.c_void_p:
        index = (bell * self.size + receiver) * self.size + sender
        return ctypes.c_void_p(self._address + index * SEMAPHORE_BYTES)

    def ring(self, bell: int, receiver: int) -> None:
        """Count `bell` of the rank `receiver` up by one."""
        _libc.sem_post(self._bell(bell, self.rank, receiver))

    def wait(self, bell: int, sender: int, *, what: str) -> None:
        """Count `bell` down by one, once the rank `sender` has rung it.

        Raises `PeerLost` within seconds of the end of that process, or when any rank found another
        one gone, or after the timeout of the process group. Time that this process was stopped
        (SIGSTOP) does not count: so were the others.
        """
        waited_s, looked_at = 0.0, time.monotonic()
        while not self.heard(bell, sender, within_s=LOOK_EVERY_S):
            lost = self._lost(sender)
            if lost is not None and not self.heard(bell, sender, within_s=0.0):
                self.header[LOST] = lost + 1
                name = f"rank {self.ranks[lost]} (process {self.pids[lost]})"
                raise PeerLost(f"Connection closed by peer: {name} has gone during {what}")
            now = time.monotonic()
            waited_s, looked_at = waited_s + min(now - looked_at, 2 * LOOK_EVERY_S), now
            if waited_s > self.timeout_s:
                name = f"rank {self.ranks[sender]}"
                raise PeerLost(f"Timed out waiting {self.timeout_s:g} s for {name} in {what}")

    def meet(self, bell: int, what: str) -> None:
        """Wait until all ranks are here, each of which rings `bell`. Raises as `wait` does."""
        peers = [rank for rank in range(self.size) if rank != self.rank]
        for peer in peers:
            self.ring(bell, peer)
        for peer in peers:
            self.wait(bell, peer, what=what)

    def heard(self, bell: int, sender: int, *, within_s: float) -> bool:
        """Count `bell` down by one if the rank `sender` rings it within about `within_s`."""
        semaphore = self._bell(bell, sender, self.rank)
        for _ in range(TRIES):
            if _libc.sem_trywait(semaphore) == 0:
                return True
            os.sched_yield()
        if within_s == 0.0:
            return False
        return _sleep(semaphore, within_s)

    def _lost(self, sender: int) -> int | None:
        """The rank that another rank found gone (who then may be gone too), or else `sender`."""
        if self.header[LOST]:
            return int(self.header[LOST]) - 1
        poll = select.poll()
        poll.register(self.watched[sender], select.POLLIN)
        return sender if poll.poll(0) else None


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def available_bytes() -> int:
    """Memory that can still be had on this host, within the limits of a container."""
    return host.free_bytes()


def _create(num_bytes: int, num_semaphores: int, token: bytes, share_of_free: float) -> int:
    if not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):
        raise Unavailable("this system has no memfd or no pidfd (Linux 5.3 or later has both)")
    if num_bytes > share_of_free * available_bytes():
        need, free = num_bytes >> 20, available_bytes() >> 20
        raise Unavailable(f"{need} MiB are needed, and only {free} MiB of memory are free")
    fd = os.memfd_create("colotrain", os.MFD_CLOEXEC)
    os.ftruncate(fd, num_bytes)
    with mmap.mmap(fd, num_bytes) as memory:
        memory[:16] = token
        first = ctypes.c_char.from_buffer(memory, HEADER_BYTES)
        address = ctypes.addressof(first)
        for index in range(num_semaphores):
            _libc.sem_init(ctypes.c_void_p(address + index * SEMAPHORE_BYTES), 1, 0)
        del first  # or the mapping could not be closed
    return fd


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
    fds.clear()


def _host() -> str:
    """The same on two ranks if they can share memory and see each other's processes."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    space = Path("/proc/self/ns/pid")
    known = [str(p.read_text() if p is boot else p.readlink()) for p in (boot, space) if p.exists()]
    return " ".join((socket.gethostname(), *known))


def _tell(group: dist.ProcessGroup, value: Any) -> list[Any]:
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


def _agree(problems: list[str | None]) -> None:
    found = [problem for problem in problems if problem]
    if found:
        raise Unavailable(found[0])


def _sleep(semaphore: ctypes.c_void_p, within_s: float) -> bool:
    """Wait in the kernel; False after that time, or when a signal came."""
    if hasattr(_libc, "sem_clockwait"):  # glibc 2.30; the other one jumps with the wall clock
        until = ctypes.byref(_timespec(time.monotonic() + within_s))
        return bool(_libc.sem_clockwait(semaphore, time.CLOCK_MONOTONIC, until) == 0)
    until = ctypes.byref(_timespec(time.time() + within_s))
    return bool(_libc.sem_timedwait(semaphore, until) == 0)


def _timespec(at: float) -> _Timespec:
    return _Timespec(int(at), int(at % 1 * 1e9))
