"""Simulation of glibc's heap: best fit with merging of free neighbours, as in malloc's large bins.

Standard library only.
"""

from __future__ import annotations

from bisect import bisect_left, insort

ALIGNMENT, HEADER_BYTES = 64, 16
SPARE_BYTES = ALIGNMENT + 32
"""Bytes by which a free part must exceed an aligned request; the rest is given back. A part of
exactly the requested size is not used (`_int_memalign`)."""
SMALL_BYTES = 1024
"""Size in bytes below which tensors are ignored: they fit into gaps between others."""


class Heap:
    """Addresses of tensors, and the largest extent of the heap, all of which stays resident."""

    def __init__(self) -> None:
        self.top = self.extent = 0
        """End of the highest tensor now, and the highest end so far."""
        self.placed: dict[object, tuple[int, int]] = {}
        """Key of a tensor → its start and size."""
        self.free: list[tuple[int, int]] = []
        """Size and start of each free part, sorted."""
        self.size_at: dict[int, int] = {}
        """Start of a free part → its size."""
        self.start_before: dict[int, int] = {}
        """End of a free part → its start."""

    def take(self, key: object, num_bytes: int) -> None:
        if num_bytes < SMALL_BYTES:
            return
        size = -(-(num_bytes + HEADER_BYTES) // ALIGNMENT) * ALIGNMENT
        at = bisect_left(self.free, (size + SPARE_BYTES, -1))
        if at < len(self.free):
            found, start = self.free[at]
            self._remove(start)
            if found > size:
                self._add(start + size, found - size)
        else:
            start, self.top = self.top, self.top + size
            self.extent = max(self.extent, self.top)
        self.placed[key] = start, size

    def give(self, key: object) -> None:
        start, size = self.placed.pop(key, (0, 0))
        if not size:
            return
        if start in self.start_before:
            before = self.start_before[start]
            self._remove(before)
            start, size = before, size + start - before
        if start + size in self.size_at:
            size += self._remove(start + size)
        if start + size == self.top:
            self.top = start
        else:
            self._add(start, size)

    def _add(self, start: int, size: int) -> None:
        insort(self.free, (size, start))
        self.size_at[start], self.start_before[start + size] = size, start

    def _remove(self, start: int) -> int:
        size = self.size_at.pop(start)
        del self.start_before[start + size], self.free[bisect_left(self.free, (size, start))]
        return size
