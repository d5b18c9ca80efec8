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
from collections.abc import Mapping
from typing import Any

import torch
import xxhash
from torch import Tensor

from colotrain.engine.comms.raw_bytes import bytes_of

SEAL = struct.Struct("<8sqq16s")
"""Magic bytes, position and length of the description, and its checksum (128-bit XXH3)."""
MAGIC = b"colocopy"
NO_SEAL = bytes(SEAL.size)
FIRST = 4096
"""Position of the first tensor."""
ALIGNMENT = 64
WINDOW_BYTES = 1 << 20
"""Bytes that are summed and written while they are in the processor's cache."""


class MemoryFile:
    """A file of `path`, such as /proc/PID/fd/N of the launcher. Raises `OSError` as files do."""

    def __init__(self, path: str) -> None:
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

    def write(self, tensors: Mapping[str, Tensor], about: dict[str, Any]) -> None:
        """Replace the content. `about` is plain data, and returned by `read`."""
        self.clear()
        output, places = _Output(self.handle), places_of(tensors)
        for name, tensor in tensors.items():
            output.add(memoryview(bytes(places[name][0] - output.end)))
            output.add(bytes_of(tensor.cpu()))
        output.flush()
        summed, at = output.summed.hexdigest(), output.end
        document = {"about": about, "tensors": places, "end": at, "xxh128": summed}
        text = json.dumps(document, separators=(",", ":")).encode()
        _write_all(self.handle, memoryview(text), at)
        self.num_bytes = max(self.num_bytes, at + len(text))
        sealed = xxhash.xxh3_128_digest(text)
        _write_all(self.handle, memoryview(SEAL.pack(MAGIC, at, len(text), sealed)), 0)

    def read(self) -> dict[str, Any] | None:
        """Return the `about` of the content; None where there is none, or none that is whole."""
        found = self._document()
        return found["about"] if found else None

    def sizes(self) -> dict[str, int]:
        """Return the names of the tensors, and their bytes."""
        return {name: size for name, (_, size) in self.places().items()}

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

    def read_into(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill tensors with the bytes of their names, all of which the content must have."""
        places = self.places()
        for name, tensor in tensors.items():
            start, num_bytes = places[name]
            if num_bytes != tensor.nbytes:
                raise ValueError(f"{name}: {num_bytes} bytes instead of {tensor.nbytes}")
            direct = tensor.device.type == "cpu" and tensor.is_contiguous()
            filled = tensor if direct else torch.empty(tensor.shape, dtype=tensor.dtype)
            _read_all(self.handle, bytes_of(filled), start)
            if not direct:
                tensor.copy_(filled)

    def places(self) -> dict[str, tuple[int, int]]:
        """Return the names of the tensors, and where each begins and its bytes."""
        document = self._document()
        return document["tensors"] if document else {}

    def _document(self) -> dict[str, Any] | None:
        magic, at, length, sealed = SEAL.unpack(os.pread(self.handle, SEAL.size, 0) or NO_SEAL)
        if magic != MAGIC:
            return None
        text = os.pread(self.handle, length, at)
        if xxhash.xxh3_128_digest(text) != sealed:
            return None
        document: dict[str, Any] = json.loads(text)
        return document


def places_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    """Return where a copy of each of these tensors begins in a file, and its bytes."""
    places, end = {}, FIRST
    for name, tensor in tensors.items():
        start = end + -end % ALIGNMENT
        places[name], end = (start, tensor.nbytes), start + tensor.nbytes
    return places


class _Output:
    """Writes the tensors one after the other: small ones together, large ones by windows."""

    def __init__(self, handle: int) -> None:
        self.handle, self.written_to, self.summed = handle, FIRST, xxhash.xxh3_128()
        self.small = bytearray()

    @property
    def end(self) -> int:
        return self.written_to + len(self.small)

    def add(self, data: memoryview) -> None:
        if len(self.small) + len(data) > WINDOW_BYTES:
            self.flush()
        if len(data) < WINDOW_BYTES:
            self.small += data
            return
        for start in range(0, len(data), WINDOW_BYTES):
            self._write(data[start : start + WINDOW_BYTES])

    def flush(self) -> None:
        small, self.small = self.small, bytearray()
        self._write(memoryview(small))

    def _write(self, data: memoryview) -> None:
        self.summed.update(data)
        _write_all(self.handle, data, self.written_to)
        self.written_to += len(data)


def _write_all(handle: int, data: memoryview, at: int) -> None:
    while data:
        done = os.pwrite(handle, data, at)
        data, at = data[done:], at + done


def _read_all(handle: int, data: memoryview, at: int) -> None:
    while data:
        done = os.preadv(handle, [data], at)
        if not done:
            raise EOFError(f"a copy in memory ends at byte {at}")
        data, at = data[done:], at + done
