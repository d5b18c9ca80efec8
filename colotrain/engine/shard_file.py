"""One rank's part of a checkpoint as a file: the bytes of its tensors, one after the other.

Written past the page cache where the file system allows it: that costs a sixth of the processor
time, and leaves the memory of training alone.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

BUFFER_BYTES = 8 << 20
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
    sha256: str


class NotFinite(ValueError):
    """A value that must never replace a good one."""


def write_pieces(
    path: Path, pieces: list[Piece], *, report: Callable[[int], None] = lambda num_bytes: None
) -> Written:
    """Write and sync the file `path`; OSError where that fails, NotFinite where a value is bad.

    `report` is told how many bytes were written since it was last called. At most `BUFFER_BYTES`
    are held beside the tensors.
    """
    starts, at = [], 0
    with _Output(path, report) as out:
        for piece in pieces:
            out.add(bytes(-at % ALIGNMENT))
            at += -at % ALIGNMENT
            starts.append(at)
            local = piece.local.detach().contiguous()
            if piece.must_be_finite and not all_finite(local):
                raise NotFinite(f"{piece.name} holds values that are not finite")
            for chunk in _chunks(local):
                out.add(chunk)
            at += local.nbytes
        digest = out.finish()
    return Written(starts=tuple(starts), num_bytes=at, sha256=digest)


def all_finite(tensor: Tensor) -> bool:
    """Whether every value is; mostly told by the sum, which is the fastest thing to compute."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    dtype = torch.float32 if tensor.dtype.itemsize < 4 else tensor.dtype
    return bool(torch.isfinite(tensor.sum(dtype=dtype))) or bool(torch.isfinite(tensor).all())


def _chunks(tensor: Tensor) -> Iterator[memoryview]:
    if not tensor.numel():
        return
    view = memoryview(tensor.cpu().view(-1).view(torch.uint8).numpy().data)
    for first in range(0, len(view), BUFFER_BYTES):
        yield view[first : first + BUFFER_BYTES]


class _Output:
    """A file that is written in whole buffers."""

    def __init__(self, path: Path, report: Callable[[int], None]) -> None:
        self.report = report
        self.buffer = mmap.mmap(-1, BUFFER_BYTES)  # begins at a page, as the writes must
        self.filled = self.written = 0
        self.sha256 = hashlib.sha256()
        self.handle = _create(path)

    def __enter__(self) -> _Output:
        return self

    def __exit__(self, *_: Any) -> None:
        os.close(self.handle)
        self.buffer.close()

    def add(self, data: bytes | memoryview) -> None:
        at = 0
        while at < len(data):
            part = data[at : at + BUFFER_BYTES - self.filled]
            self.buffer[self.filled : self.filled + len(part)] = part
            self.filled += len(part)
            at += len(part)
            if self.filled == BUFFER_BYTES:
                self._flush()

    def _flush(self) -> None:
        """Write the buffer, its last block filled up with zeros that `finish` cuts off."""
        end = -(-self.filled // BLOCK) * BLOCK
        with memoryview(self.buffer) as view:
            with view[: self.filled] as filled:
                self.sha256.update(filled)
            view[self.filled : end] = bytes(end - self.filled)
            done = 0
            while done < end:
                with view[done:end] as rest:
                    done += _write(self.handle, rest)
        self.written += self.filled
        self.report(self.filled)
        self.filled = 0

    def finish(self) -> str:
        """Write what is left and sync; returns the checksum."""
        self._flush()
        os.ftruncate(self.handle, self.written)
        os.fsync(self.handle)
        return self.sha256.hexdigest()


def _create(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    try:
        return os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:  # which says that it cannot be had here
            raise
        return os.open(path, flags, 0o600)


def _write(handle: int, data: memoryview) -> int:
    try:
        return os.write(handle, data)
    except OSError as error:
        direct, flags = getattr(os, "O_DIRECT", 0), fcntl.fcntl(handle, fcntl.F_GETFL)
        if error.errno != errno.EINVAL or not flags & direct:
            raise
        fcntl.fcntl(handle, fcntl.F_SETFL, flags & ~direct)
        return os.write(handle, data)
