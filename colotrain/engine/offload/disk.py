"""Memory mapped from files, which is written back and dropped page range by page range.

The files have no name, so the kernel deletes each one when the last process that maps it ends. Disk
space is allocated when a file is made: a full disk is an error at that point and no SIGBUS later.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from colotrain.errors import ColotrainError

PAGE = mmap.PAGESIZE
ALIGNMENT = 64
"""Alignment in bytes of the tensors inside a region: malloc's for vector instructions."""
MADV_WILLNEED, MADV_DONTNEED, MADV_POPULATE_READ, MADV_POPULATE_WRITE = 3, 4, 22, 23
WAIT_BEFORE, WRITE, WAIT_AFTER = 1, 2, 4  # flags of sync_file_range

_libc = ctypes.CDLL(None, use_errno=True)  # calls through ctypes release the interpreter's lock
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


@dataclass(slots=True, kw_only=True)
class _File:
    """A mapped file, of which the first `used` bytes are handed out."""

    handle: int
    memory: mmap.mmap
    used: int = 0

    def __del__(self) -> None:
        os.close(self.handle)


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A range of whole pages of a mapped file."""

    file: _File
    start: int
    num_bytes: int
    address: int

    def carve(self, sizes: Sequence[int], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
        """Flat tensors of `sizes` elements, one after the other, each with its own storage."""
        tensors, offset = [], self.start
        for size, dtype in zip(sizes, dtypes, strict=True):
            if size:
                tensor = torch.frombuffer(self.file.memory, dtype=dtype, count=size, offset=offset)
            else:
                tensor = torch.empty(0, dtype=dtype)
            tensors.append(tensor)
            offset += aligned(size * dtype.itemsize)
        return tensors

    def memory(self) -> Tensor:
        """Return the whole region as bytes."""
        return torch.frombuffer(
            self.file.memory, dtype=torch.uint8, count=self.num_bytes, offset=self.start
        )

    def fetch(self, *, to_write: bool) -> None:
        """Read the pages and map them; blocks until they are in memory."""
        advice = MADV_POPULATE_WRITE if to_write else MADV_POPULATE_READ
        if _libc.madvise(self.address, self.num_bytes, advice) != 0:  # Linux before 5.14
            _libc.madvise(self.address, self.num_bytes, MADV_WILLNEED)

    def start_writing(self) -> None:
        """Begin to write the changed pages to disk, and unmap them from this process."""
        self.drop()  # first: the kernel learns here which pages were changed
        _libc.sync_file_range(self.file.handle, self.start, self.num_bytes, WRITE)

    def finish_writing(self, *, forget: bool) -> None:
        """Wait until the pages are written; with `forget`, also free their page cache."""
        flags = WAIT_BEFORE | WRITE | WAIT_AFTER
        _libc.sync_file_range(self.file.handle, self.start, self.num_bytes, flags)
        if forget:
            os.posix_fadvise(self.file.handle, self.start, self.num_bytes, os.POSIX_FADV_DONTNEED)

    def drop(self) -> None:
        """Unmap the pages from this process; their content stays in the file."""
        _libc.madvise(self.address, self.num_bytes, MADV_DONTNEED)


@dataclass(slots=True, kw_only=True)
class DiskStore:
    """The files in which this rank keeps tensors, all in one folder."""

    folder: Path
    limit: int
    """Bytes that this rank may use."""
    taken: int = 0
    files: list[_File] = field(default_factory=list)

    def reserve(self, num_bytes: int) -> None:
        """Allocate disk space for later regions; `ColotrainError` where there is too little."""
        if num_bytes <= 0:
            return
        num_bytes = whole_pages(num_bytes)
        if self.taken + num_bytes > self.limit:
            raise ColotrainError(
                f"plugin.budget.disk: {self.taken + num_bytes:,} bytes are needed per rank, "
                f"{self.limit:,} are allowed",
                "raise plugin.budget.disk or plugin.budget.host",
            )
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.files.append(_open(self.folder, num_bytes))
        except OSError as error:
            raise ColotrainError(
                f"plugin.disk_path={self.folder}: no file of {num_bytes:,} bytes can be made "
                f"({error.strerror})",
                "free some space, or name another folder",
            ) from error
        self.taken += num_bytes

    def take(self, num_bytes: int) -> Region:
        """Return a region of zeros, in reserved space where enough is left."""
        num_bytes = whole_pages(num_bytes)
        file = next((f for f in self.files if len(f.memory) - f.used >= num_bytes), None)
        if file is None:
            self.reserve(num_bytes)
            file = self.files[-1]
        start = file.used
        file.used += num_bytes
        first = ctypes.addressof(ctypes.c_char.from_buffer(file.memory))
        return Region(file=file, start=start, num_bytes=num_bytes, address=first + start)


def _open(folder: Path, num_bytes: int) -> _File:
    """Make a file without a name and allocate its space."""
    handle = _nameless(folder)
    try:
        os.posix_fallocate(handle, 0, num_bytes)
        return _File(handle=handle, memory=mmap.mmap(handle, num_bytes))
    except BaseException:
        os.close(handle)
        raise


def _nameless(folder: Path) -> int:
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:  # the file system does not support O_TMPFILE
        handle, name = tempfile.mkstemp(dir=folder, prefix=".colotrain-")
        os.unlink(name)
        return handle


def fetch(to_read: Sequence[Region], to_write: Sequence[Region]) -> None:
    for region in to_read:
        region.fetch(to_write=False)
    for region in to_write:
        region.fetch(to_write=True)


def write(regions: Sequence[Region]) -> None:
    for region in regions:
        region.start_writing()
    for region in regions:
        region.finish_writing(forget=False)


def whole_pages(num_bytes: int) -> int:
    return math.ceil(num_bytes / PAGE) * PAGE


def aligned(num_bytes: int) -> int:
    return math.ceil(num_bytes / ALIGNMENT) * ALIGNMENT


def return_free_memory() -> None:
    """Return memory that the C library has freed but kept to the system (glibc only)."""
    trim = getattr(_libc, "malloc_trim", None)
    if trim is not None:
        trim(0)
