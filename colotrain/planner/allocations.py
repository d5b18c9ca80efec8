"""Live bytes by category, and the resident memory that follows from them.

Standard library only.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left, insort

from colotrain.spec.cpu_memory import OWN_PAGES_BYTES
from colotrain.spec.memory import MemoryBreakdown

SMALL_SHARE = 0.03
"""Memory of small objects between tensors, as a share of the heap."""
RANGE = 0.1
"""Share of the estimate within which 95 of 100 measured peaks are."""
CATEGORIES = tuple(field.name for field in dataclasses.fields(MemoryBreakdown))


class AllocationCounter:
    """Counts live bytes by category, now and at their peak, and resident memory on CPU.

    On CPU, freed memory stays in malloc's heap for the next step, and a tensor that fits in no free
    part makes the heap larger.
    """

    def __init__(self, *, on_cpu: bool) -> None:
        self.on_cpu = on_cpu
        self.alive: dict[object, tuple[str, int, bool]] = {}
        """Key → category, bytes, and whether they are in the heap."""
        self.sums = dict.fromkeys(CATEGORIES, 0)
        self.most = dict(self.sums)
        """Peak of each category, in the heap and outside."""
        self.outside = self.most_outside = 0
        """Bytes outside the heap, now and at their peak."""
        self.heap = Heap()
        self.pieces: dict[object, int] = {}
        """Key → number of its pieces in the heap."""
        self.in_backward = False
        """Whether new allocations belong to a backward, as set by the caller."""
        self.made: dict[object, int] = {}
        """Key → bytes in the heap from a backward (temporaries, recomputed activations)."""
        self.made_bytes = self.most_made = 0
        self.now = self.fullest = 0
        self.at_fullest = dict(self.sums)

    def begin(
        self,
        key: object,
        category: str,
        num_bytes: int,
        *,
        lasts: bool = False,
        pieces: int = 1,
        after_backward: bool = False,
    ) -> None:
        """Count an allocation of `num_bytes`, in `pieces` tensors.

        With `lasts` it lives as long as the run, in its own pages. `after_backward`: it is made
        while small objects of the backward through a group are alive between freed activations.
        """
        if num_bytes <= 0:
            return
        is_in_heap = self.on_cpu and not lasts and num_bytes < pieces * OWN_PAGES_BYTES
        self.alive[key] = (category, num_bytes, is_in_heap)
        self._add(category, num_bytes, is_in_heap)
        if is_in_heap:
            self.pieces[key] = pieces
            for piece in range(pieces):
                self.heap.take((key, piece), num_bytes // pieces, in_one=after_backward)
        if is_in_heap and self.in_backward:
            self.made[key] = num_bytes
            self.made_bytes += num_bytes
            self.most_made = max(self.most_made, self.made_bytes)
        if self.now > self.fullest:
            self.fullest, self.at_fullest = self.now, self.sums.copy()

    def end(self, *keys: object) -> None:
        for key in keys:
            category, num_bytes, is_in_heap = self.alive.pop(key, ("", 0, False))
            self.made_bytes -= self.made.pop(key, 0)
            for piece in range(self.pieces.pop(key, 0)):
                self.heap.give((key, piece))
            if category:
                self._add(category, -num_bytes, is_in_heap)

    def become(self, key: object, category: str) -> None:
        """Move the bytes of `key` to another category."""
        self.made_bytes -= self.made.pop(key, 0)
        if key in self.alive:
            old, num_bytes, is_in_heap = self.alive[key]
            self._add(old, -num_bytes, is_in_heap)
            self.alive[key] = (category, num_bytes, is_in_heap)
            self._add(category, num_bytes, is_in_heap)

    def _add(self, category: str, num_bytes: int, is_in_heap: bool) -> None:
        self.now += num_bytes
        self.sums[category] += num_bytes
        self.most[category] = max(self.most[category], self.sums[category])
        if not is_in_heap:
            self.outside += num_bytes
            self.most_outside = max(self.most_outside, self.outside)

    def resident(self) -> int:
        """Bytes resident at the peak: live ones, and freed ones that malloc's heap keeps.

        Backward's allocations seldom fit where forward's activations were freed, because small
        live objects lie between, so they are added.
        """
        if not self.on_cpu:
            return self.fullest
        heap = (self.heap.extent + self.most_made) * (1 + SMALL_SHARE)
        return max(self.fullest, self.most_outside + round(heap))


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
