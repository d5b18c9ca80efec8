"""One copy of a rank's state in a file in memory, which the rank's launcher holds open.

The file is anonymous (memfd): it has no name in any file system, it outlives the rank, and the
kernel frees it once the launcher has ended in any way. It begins with a block that tells where the
description of the content is. This block is cleared before the content changes and written last,
so that a copy that a rank did not finish is never read. Ranks write to the file and do not map it:
its bytes count as the host's memory, and not as any rank's.
"""

from __future__ import annotations

import json
import os
import struct
from contextlib import closing
from pathlib import Path
from typing import Any

import xxhash

from colotrain.engine.state.index import describe
from colotrain.engine.state.shard_file import Layout, Piece, PieceLock, windows_of

SEAL = struct.Struct("<8sqq16s")
"""Magic bytes, position and length of the description, and its checksum (128-bit XXH3)."""
MAGIC = b"colocopy"
NO_SEAL = bytes(SEAL.size)
FIRST = 4096
"""Position of the first piece."""
WINDOW_BYTES = 1 << 20
"""Bytes that are summed and written while they are in the processor's cache."""


class MemoryFile:
    """A file of `path`, such as /proc/PID/fd/N of the launcher. Raises `OSError` as files do."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self.num_bytes = os.fstat(self.handle).st_size
        """Bytes that the file has memory for."""

    def reserve(self, num_bytes: int) -> None:
        """Take memory for `num_bytes` in all; `OSError` where there is not enough."""
        if num_bytes > self.num_bytes:
            os.posix_fallocate(self.handle, 0, num_bytes)
            self.num_bytes = num_bytes

    def clear(self) -> None:
        """Make the content unreadable."""
        os.pwrite(self.handle, NO_SEAL, 0)

    def write(self, pieces: list[Piece], about: dict[str, Any], *, name: str = "") -> None:
        """Replace the content by `pieces` on the host, and by `about`, which is plain data.

        `name` is the file's in the description of the pieces, which `read` returns, too.
        """
        self.clear()
        layout, summed, at = Layout.of(pieces), xxhash.xxh3_128(), FIRST
        end = FIRST + layout.num_bytes
        windows = windows_of(pieces, layout, PieceLock(), buffer_bytes=WINDOW_BYTES)
        with closing(windows):
            for window in windows:
                for start in range(0, len(window), WINDOW_BYTES):
                    data = window[start : start + WINDOW_BYTES][: end - at]
                    summed.update(data)
                    _write_all(self.handle, data, at)
                    at += len(data)
        starts = [FIRST + start for start in layout.starts]
        about = about | {"tensors": describe(pieces, starts, name)}
        document = {"about": about, "end": end, "xxh128": summed.hexdigest()}
        text = json.dumps(document, separators=(",", ":")).encode()
        _write_all(self.handle, memoryview(text), end)
        self.num_bytes = max(self.num_bytes, end + len(text))
        sealed = xxhash.xxh3_128_digest(text)
        _write_all(self.handle, memoryview(SEAL.pack(MAGIC, end, len(text), sealed)), 0)

    def read(self) -> dict[str, Any] | None:
        """Return the `about` of the content; None where there is none, or none that is whole.

        Beside what was given to `write` it has `tensors`, by which `index_of` finds the pieces.
        """
        found = self._document()
        return found["about"] if found else None

    def end(self) -> int:
        """Return the bytes of the file that the content takes; 0 where there is none."""
        magic, at, length, _ = SEAL.unpack(os.pread(self.handle, SEAL.size, 0) or NO_SEAL)
        return int(at + length) if magic == MAGIC else 0

    def is_intact(self) -> bool:
        """Whether the tensors are what was written, by their checksum."""
        document = self._document()
        if document is None:
            return False
        summed = xxhash.xxh3_128()
        for at in range(FIRST, document["end"], WINDOW_BYTES):
            summed.update(os.pread(self.handle, min(WINDOW_BYTES, document["end"] - at), at))
        return bool(summed.hexdigest() == document["xxh128"])

    def _document(self) -> dict[str, Any] | None:
        magic, at, length, sealed = SEAL.unpack(os.pread(self.handle, SEAL.size, 0) or NO_SEAL)
        if magic != MAGIC:
            return None
        text = os.pread(self.handle, length, at)
        if xxhash.xxh3_128_digest(text) != sealed:
            return None
        document: dict[str, Any] = json.loads(text)
        return document


def _write_all(handle: int, data: memoryview, at: int) -> None:
    while data:
        done = os.pwrite(handle, data, at)
        data, at = data[done:], at + done
