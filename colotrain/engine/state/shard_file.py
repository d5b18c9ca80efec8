"""One rank's part of the state as a file: the bytes of its tensors, one after the other.

Writes to a disk bypass the page cache where the file system allows it (O_DIRECT): this costs a
sixth of the processor time, and training's memory is not displaced.
"""

from __future__ import annotations

import errno
import fcntl
import math
import mmap
import os
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from colotrain.engine.comms.raw_bytes import bytes_of
from colotrain.engine.parts.part_map import Part
from colotrain.engine.state.manifest import Manifest

BUFFER_BYTES = 8 << 20
WINDOW_BYTES = 32 << 20
"""Bytes per direct write from a tensor; each write releases and takes the GIL a few times."""
POLL_S = 0.02
ALIGNMENT = 64
"""Alignment in bytes of tensors in the file."""
BLOCK = 4096
"""Bytes per block: direct writes are whole blocks, from memory that begins at a page."""
LARGE_BYTES = 1 << 20
"""Tensors of at least this size are written from their own memory, others through a buffer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The part of a tensor that one rank writes, with its numbers."""

    part: Part
    local: Tensor
    must_be_finite: bool = False
    lasts: bool = False
    """Whether it changes only in updates: parameters and optimizer state."""
    is_copy: bool = False
    """Whether it is a copy, which never changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """One rank's part of a run's state after a step, as it is saved or copied to memory."""

    pieces: list[Piece]
    manifest: Manifest
    """Everything but the tensors."""


class NotFinite(ValueError):
    """A value is not finite and must never replace a good one."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Positions of the pieces in a file, and in an image of the file in memory.

    Large pieces are offset from a block in the file as from a page in memory, as O_DIRECT needs.
    """

    starts: tuple[int, ...]
    """Position of each piece, in bytes."""
    num_bytes: int

    @staticmethod
    def of(pieces: list[Piece]) -> Layout:
        starts, at = [], 0
        for piece in pieces:
            at += -at % ALIGNMENT
            if piece.local.nbytes >= LARGE_BYTES:
                at += (_address(piece.local) - at) % BLOCK
            starts.append(at)
            at += piece.local.nbytes
        return Layout(tuple(starts), at)

    def copy(self, pieces: list[Piece], index: int, image: Tensor, *, wait: bool = True) -> Piece:
        """Copy a piece to its place in `image`, and return it as it is there.

        Without `wait` a copy from a GPU is only queued, where `image` is page-locked.
        """
        piece, start = pieces[index], self.starts[index]
        there = image[start : start + piece.local.nbytes].view(piece.local.dtype)
        there = there.view(piece.local.shape).copy_(piece.local, non_blocking=not wait)
        return replace(piece, local=there, is_copy=True)


def _address(tensor: Tensor) -> int:
    return tensor.data_ptr() if tensor.device.type == "cpu" else 0


class PieceLock:
    """A lock on the pieces, for the thread that writes them window by window and for training."""

    def __init__(self) -> None:
        self.next = 0
        """Index of the first piece that is not written to its end."""
        self._lock, self._free = threading.Lock(), threading.Event()
        self._free.set()

    @contextmanager
    def read(self, index: int) -> Iterator[None]:
        """Lock for the writer: pieces from `index` on do not change inside the context."""
        self._free.wait()
        with self._lock:
            self.next = index
            yield

    @contextmanager
    def replace(self, waiting: Callable[[], None] = lambda: None) -> Iterator[int]:
        """Lock for training: inside, pieces from the yielded index on may be replaced by copies.

        `waiting` is called repeatedly until the window that is being written is done.
        """
        self._free.clear()
        try:
            while not self._lock.acquire(timeout=POLL_S):
                waiting()
            try:
                yield self.next
            finally:
                self._lock.release()
        finally:
            self._free.set()


def write_pieces(
    path: Path,
    pieces: list[Piece],
    layout: Layout,
    *,
    lock: PieceLock | None = None,
    report: Callable[[int], None] = lambda num_bytes: None,
) -> str:
    """Write and sync the file `path`, and return its checksum: 128-bit XXH3 in hexadecimal.

    Raises `OSError`, or `NotFinite` for a bad value.

    `report` is called with the bytes written since its last call. At most `BUFFER_BYTES` are used
    beside the tensors. `pieces` may be replaced by equal ones under `lock`.
    """
    lock, checksum, handle, done = lock or PieceLock(), xxhash.xxh3_128(), _create(path), 0
    try:
        with closing(windows_of(pieces, layout, lock)) as windows:  # on error it may hold the lock
            for window in windows:
                inside = window[: layout.num_bytes - done]
                checksum.update(inside)
                _write_all(handle, window)
                done += len(inside)
                report(len(inside))
        os.ftruncate(handle, layout.num_bytes)
        os.fsync(handle)
    finally:
        os.close(handle)
    return checksum.hexdigest()


def windows_of(
    pieces: list[Piece], layout: Layout, lock: PieceLock, *, buffer_bytes: int = BUFFER_BYTES
) -> Generator[memoryview]:
    """Yield the file's content in whole blocks, page-aligned; each is valid until the next."""
    buffer = mmap.mmap(-1, buffer_bytes)
    with memoryview(buffer) as view, closing(_parts(pieces, layout, lock)) as parts:
        filled = 0
        for part in parts:
            if filled % BLOCK == 0 and len(part) % BLOCK == 0 and _start_of(part) % BLOCK == 0:
                if filled:
                    yield view[:filled]
                    filled = 0
                yield part
                continue
            while part:
                taken = part[: buffer_bytes - filled]
                view[filled : filled + len(taken)] = taken
                part, filled = part[len(taken) :], filled + len(taken)
                if filled == buffer_bytes:
                    yield view
                    filled = 0
        if filled:
            whole = -(-filled // BLOCK) * BLOCK
            view[filled:whole] = bytes(whole - filled)
            yield view[:whole]


def _parts(pieces: list[Piece], layout: Layout, lock: PieceLock) -> Generator[memoryview]:
    """Yield the file's content, aligned whole blocks separately; each is valid until the next."""
    end = 0
    for index, start in enumerate(layout.starts):
        if start > end:
            yield memoryview(bytearray(start - end))
        end = start + pieces[index].local.nbytes
        head = min(-start % BLOCK, end - start)
        at, read = 0, None
        while at < end - start:
            with lock.read(index):
                piece = pieces[index]
                if piece is not read:
                    read, data = piece, bytes_of(piece.local.cpu())
                blocks = (end - start - at) // BLOCK * BLOCK
                num = head if at < head else min(blocks, WINDOW_BYTES) or end - start - at
                part = data[at : at + num]
                _check(piece, part)
                yield part
                at += num


def _start_of(data: memoryview) -> int:
    """Return the address of the first byte of `data`."""
    return torch.frombuffer(data, dtype=torch.uint8).data_ptr()


def _check(piece: Piece, part: memoryview) -> None:
    if piece.must_be_finite and not all_finite(torch.frombuffer(part, dtype=piece.local.dtype)):
        raise NotFinite(f"{piece.part.name} holds values that are not finite")


def all_finite(tensor: Tensor) -> bool:
    """Whether every value is finite. The sum, which is fast to compute, usually tells."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    dtype = torch.float32 if tensor.dtype.itemsize < 4 else tensor.dtype
    return math.isfinite(tensor.sum(dtype=dtype).item()) or bool(torch.isfinite(tensor).all())


def _create(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL means that O_DIRECT is not supported
            raise
        return os.open(path, flags, 0o600)


def _write_all(handle: int, data: memoryview) -> None:
    while data:
        data = data[_write(handle, data) :]


def _write(handle: int, data: memoryview) -> int:
    try:
        return os.write(handle, data)
    except OSError as error:
        direct, flags = getattr(os, "O_DIRECT", 0), fcntl.fcntl(handle, fcntl.F_GETFL)
        if error.errno != errno.EINVAL or not flags & direct:
            raise
        fcntl.fcntl(handle, fcntl.F_SETFL, flags & ~direct)
        return os.write(handle, data)
