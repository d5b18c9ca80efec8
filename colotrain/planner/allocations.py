"""Live bytes by category, and the resident memory that follows from them.

Standard library only.
"""

from __future__ import annotations

import dataclasses

from colotrain.planner.heap import Heap
from colotrain.planner.memory_changes import MemoryChange
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

    def replay(self, change: MemoryChange, category: str) -> None:
        """Count the allocations and frees of a change, whose storages are all of `category`."""
        live, outside, made = change.live, change.outside, change.made
        if self.now + live.peak > self.fullest:
            self.fullest = self.now + live.peak
            self.at_fullest = {**self.sums, category: self.sums[category] + live.peak}
        self.most[category] = max(self.most[category], self.sums[category] + live.peak)
        self.most_outside = max(self.most_outside, self.outside + outside.peak)
        self.most_made = max(self.most_made, self.made_bytes + made.peak)
        self.now += live.net
        self.sums[category] += live.net
        self.outside += outside.net
        self.made_bytes += made.net
        for storage, num_bytes in change.placed:
            if num_bytes:
                self.heap.take(storage, num_bytes)
            else:
                self.heap.give(storage)

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
