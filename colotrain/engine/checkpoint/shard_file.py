"""One rank's part of a checkpoint as a file: the bytes of its tensors, one after the other.

Written past the page cache where the file system allows it: that costs a sixth of the processor
time, and leaves the memory of training alone.
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
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from colotrain.engine.raw_bytes import bytes_of

BUFFER_BYTES = 8 << 20
WINDOW_BYTES = 32 << 20
"""Written at once from where it lies: for each, Python's lock changes hands a few times."""
POLL_S = 0.02
ALIGNMENT = 64
"""Where a tensor may begin in the file."""
BLOCK = 4096
"""Writes past the page cache are of whole blocks, from memory that begins at a page."""
LARGE_BYTES = 1 << 20
"""Tensors from here on are written from where they lie, all others through a buffer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of a tensor that one rank holds: rows of dimension 0, or all of it."""

    name: str
    local: Tensor
    shape: tuple[int, ...]
    """Of the whole tensor."""
    first_row: int = 0
    must_be_finite: bool = False
    lasts: bool = False
    """It does not change before the next update: parameters and what the optimizer holds."""
    is_copy: bool = False
    """It does not change at all."""

    @property
    def offsets(self) -> list[int]:
        return [self.first_row if axis == 0 else 0 for axis in range(len(self.shape))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What lies where in the file."""

    starts: tuple[int, ...]
    """Of each piece, in bytes."""
    num_bytes: int
    checksum: str
    """xxh3-128 of the file, in hexadecimal."""


class NotFinite(ValueError):
    """A value that must never replace a good one."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each piece lies in a file, and in an image of it in memory.

    Large pieces lie in their blocks as they do in their pages, and so can be written from there.
    """

    starts: tuple[int, ...]
    """Of each piece, in bytes."""
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


def _address(tensor: Tensor) -> int:
    return tensor.data_ptr() if tensor.device.type == "cpu" else 0


class Turns:
    """Whose turn it is with the pieces: the writer's, window by window, or training's."""

    def __init__(self) -> None:
        self.next = 0
        """The first piece of which something is still to be read."""
        self._lock, self._free = threading.Lock(), threading.Event()
        self._free.set()

    @contextmanager
    def read(self, index: int) -> Iterator[None]:
        """The writer's: pieces from `index` on stay as they are until this is left."""
        self._free.wait()
        with self._lock:
            self.next = index
            yield

    @contextmanager
    def exchange(self, waiting: Callable[[], None] = lambda: None) -> Iterator[int]:
        """Training's: pieces from the one that this gives on may be exchanged for copies.

        `waiting` is called again and again until the window that is being written is done.
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
    *,
    layout: Layout | None = None,
    turns: Turns | None = None,
    report: Callable[[int], None] = lambda num_bytes: None,
) -> Written:
    """Write and sync the file `path`; OSError where that fails, NotFinite where a value is bad.

    `report` is told how many bytes were written since it was last called. At most `BUFFER_BYTES`
    are held beside the tensors. `pieces` may be exchanged for equal ones in `turns`.
    """
    layout, turns = layout or Layout.of(pieces), turns or Turns()
    checksum, handle, done = xxhash.xxh3_128(), _create(path), 0
    try:
        with closing(_windows(pieces, layout, turns)) as windows:  # it holds a turn where one fails
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
    return Written(starts=layout.starts, num_bytes=layout.num_bytes, checksum=checksum.hexdigest())


def _windows(pieces: list[Piece], layout: Layout, turns: Turns) -> Generator[memoryview]:
    """The file's content in whole blocks that begin at a page; each valid until the next."""
    buffer = mmap.mmap(-1, BUFFER_BYTES)
    with memoryview(buffer) as view, closing(_parts(pieces, layout, turns)) as parts:
        filled = 0
        for part in parts:
            if filled % BLOCK == 0 and len(part) % BLOCK == 0 and _start_of(part) % BLOCK == 0:
                if filled:
                    yield view[:filled]
                    filled = 0
                yield part
                continue
            while part:
                taken = part[: BUFFER_BYTES - filled]
                view[filled : filled + len(taken)] = taken
                part, filled = part[len(taken) :], filled + len(taken)
                if filled == BUFFER_BYTES:
                    yield view
                    filled = 0
        if filled:
            whole = -(-filled // BLOCK) * BLOCK
            view[filled:whole] = bytes(whole - filled)
            yield view[:whole]


def _parts(pieces: list[Piece], layout: Layout, turns: Turns) -> Generator[memoryview]:
    """The file's content, whole blocks apart where they begin at a page; each until the next."""
    end = 0
    for index, start in enumerate(layout.starts):
        if start > end:
            yield memoryview(bytearray(start - end))
        end = start + pieces[index].local.nbytes
        head = min(-start % BLOCK, end - start)
        at, read = 0, None
        while at < end - start:
            with turns.read(index):
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
    """The address of what `data` shows."""
    return torch.frombuffer(data, dtype=torch.uint8).data_ptr()


def _check(piece: Piece, part: memoryview) -> None:
    if piece.must_be_finite and not all_finite(torch.frombuffer(part, dtype=piece.local.dtype)):
        raise NotFinite(f"{piece.name} holds values that are not finite")


def all_finite(tensor: Tensor) -> bool:
    """Whether every value is; mostly told by the sum, which is the fastest thing to compute."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    dtype = torch.float32 if tensor.dtype.itemsize < 4 else tensor.dtype
    return math.isfinite(tensor.sum(dtype=dtype).item()) or bool(torch.isfinite(tensor).all())


def _create(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:  # which says that it cannot be had here
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
