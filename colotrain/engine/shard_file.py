"""One rank's part of a checkpoint as a file: the bytes of its tensors, one after the other.

Written past the page cache where the file system allows it: that costs a sixth of the processor
time, and leaves the memory of training alone.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from torch import Tensor

BUFFER_BYTES = 8 << 20
WINDOW_BYTES = 32 << 20
"""Written at once of what lies in memory as it will on the disk."""
ALIGNMENT = 64
"""Where a tensor may begin in the file."""
BLOCK = 4096
"""Writes past the page cache are of whole blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of a tensor that one rank holds: rows of dimension 0, or all of it."""

    name: str
    local: Tensor
    shape: tuple[int, ...]
    """Of the whole tensor."""
    first_row: int = 0
    must_be_finite: bool = False

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
    """Where each piece lies in a file, and in an image of it in memory."""

    starts: tuple[int, ...]
    """Of each piece, in bytes."""
    num_bytes: int

    @property
    def room(self) -> int:
        """What it takes on a disk: whole blocks."""
        return -(-self.num_bytes // BLOCK) * BLOCK

    @staticmethod
    def of(pieces: list[Piece]) -> Layout:
        starts, at = [], 0
        for piece in pieces:
            at += -at % ALIGNMENT
            starts.append(at)
            at += piece.local.nbytes
        return Layout(tuple(starts), at)


def write_pieces(
    path: Path, pieces: list[Piece], *, report: Callable[[int], None] = lambda num_bytes: None
) -> Written:
    """Write and sync the file `path`; OSError where that fails, NotFinite where a value is bad.

    `report` is told how many bytes were written since it was last called. At most `BUFFER_BYTES`
    are held beside the tensors.
    """
    layout = Layout.of(pieces)
    return _write_windows(path, _gathered(pieces, layout), layout, report)


def write_image(path: Path, image: Tensor, pieces: list[Piece], layout: Layout) -> Written:
    """The same of pieces that lie in memory as they will in the file.

    `image` holds `layout.room` bytes at least, on the CPU, and begins at a page.
    """
    for piece in pieces:
        _check(piece)
    whole = memoryview(image.numpy().data)[: layout.room]
    windows = (whole[at : at + WINDOW_BYTES] for at in range(0, len(whole), WINDOW_BYTES))
    return _write_windows(path, windows, layout, lambda num_bytes: None)


def _check(piece: Piece) -> None:
    if piece.must_be_finite and not all_finite(piece.local):
        raise NotFinite(f"{piece.name} holds values that are not finite")


def all_finite(tensor: Tensor) -> bool:
    """Whether every value is; mostly told by the sum, which is the fastest thing to compute."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    dtype = torch.float32 if tensor.dtype.itemsize < 4 else tensor.dtype
    return bool(torch.isfinite(tensor.sum(dtype=dtype))) or bool(torch.isfinite(tensor).all())


def _gathered(pieces: list[Piece], layout: Layout) -> Iterator[memoryview]:
    """The file's content, one full buffer after the other; each is valid until the next."""
    buffer = mmap.mmap(-1, BUFFER_BYTES)  # begins at a page, as the writes must
    with memoryview(buffer) as view:
        filled = end = 0
        for piece, start in zip(pieces, layout.starts, strict=True):
            _check(piece)
            for data in (memoryview(bytes(start - end)), _bytes_of(piece.local)):
                at = 0
                while at < len(data):
                    part = data[at : at + BUFFER_BYTES - filled]
                    view[filled : filled + len(part)] = part
                    filled, at = filled + len(part), at + len(part)
                    if filled == BUFFER_BYTES:
                        yield view
                        filled = 0
            end = start + piece.local.nbytes
        if filled:
            whole = -(-filled // BLOCK) * BLOCK
            view[filled:whole] = bytes(whole - filled)
            yield view[:whole]


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().contiguous().cpu().view(-1)
    return memoryview(flat.view(torch.uint8).numpy().data) if len(flat) else memoryview(b"")


def _write_windows(
    path: Path, windows: Iterable[memoryview], layout: Layout, report: Callable[[int], None]
) -> Written:
    """Write a file's content from parts of whole blocks, each beginning at a page."""
    checksum, handle, done = xxhash.xxh3_128(), _create(path), 0
    try:
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
