"""Malloc's heap, as tensors on CPU make it grow. Standard library only."""

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
        self.most_in_one: dict[int, int] = {}
        """Start of a free part → size of the largest single tensor that was freed in it."""

    def take(self, key: object, num_bytes: int, *, in_one: bool = False) -> None:
        """Place a tensor in the smallest free part that is large enough, else at the top.

        With `in_one` small objects are alive between the tensors that were freed, so that a free
        part has no more room than the largest of these had.
        """
        if num_bytes < SMALL_BYTES:
            return
        size = -(-(num_bytes + HEADER_BYTES) // ALIGNMENT) * ALIGNMENT
        at = bisect_left(self.free, (size + SPARE_BYTES, -1))
        while in_one and at < len(self.free) and self.most_in_one[self.free[at][1]] < size:
            at += 1
        if at < len(self.free):
            found, start = self.free[at]
            _, most = self._remove(start)
            if found > size:
                self._add(start + size, found - size, most)
        else:
            start, self.top = self.top, self.top + size
            self.extent = max(self.extent, self.top)
        self.placed[key] = start, size

    def give(self, key: object) -> None:
        start, size = self.placed.pop(key, (0, 0))
        if not size:
            return
        most = size
        if start in self.start_before:
            start = self.start_before[start]
            size, most = self._merged(start, size, most)
        if start + size in self.size_at:
            size, most = self._merged(start + size, size, most)
        if start + size == self.top:
            self.top = start
        else:
            self._add(start, size, most)

    def _merged(self, start: int, size: int, most: int) -> tuple[int, int]:
        """Remove the free part at `start`; returns its size and `most_in_one` with those given."""
        other_size, other_most = self._remove(start)
        return size + other_size, max(most, other_most)

    def _add(self, start: int, size: int, most: int) -> None:
        insort(self.free, (size, start))
        self.size_at[start], self.start_before[start + size] = size, start
        self.most_in_one[start] = min(size, most)

    def _remove(self, start: int) -> tuple[int, int]:
        size = self.size_at.pop(start)
        del self.start_before[start + size], self.free[bisect_left(self.free, (size, start))]
        return size, self.most_in_one.pop(start)
