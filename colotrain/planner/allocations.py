"""Live bytes by category, and the resident memory that follows from them.

Standard library only.
"""

from __future__ import annotations

import dataclasses

from colotrain.planner.heap import Heap
from colotrain.spec.cpu_memory import OWN_PAGES_BYTES
from colotrain.spec.memory import MemoryBreakdown

REUSED_SHARE = 0.5
"""Share of a later micro-batch's activations that fits in the heap between existing gradients; the
rest makes the heap larger."""
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
        self.alive: dict[object, tuple[str, int, str]] = {}
        """Key → category, bytes, and the category whose memory in the heap they use, or empty."""
        self.sums = dict.fromkeys(CATEGORIES, 0)
        self.most = dict(self.sums)
        """Peak of each category, in the heap and outside."""
        self.in_heap = dict(self.sums)
        self.most_in_heap = dict(self.sums)
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
        in_place_of: str = "",
    ) -> None:
        """Count an allocation of `num_bytes`, in `pieces` tensors.

        With `lasts` it lives as long as the run, in its own pages. `in_place_of` is a category
        whose memory in the heap is free whenever this allocation is alive, and is reused for it.
        """
        if num_bytes <= 0:
            return
        is_in_heap = self.on_cpu and not lasts and num_bytes < pieces * OWN_PAGES_BYTES
        place = (in_place_of or category) if is_in_heap else ""
        self.alive[key] = (category, num_bytes, place)
        self._add(category, num_bytes, place)
        if is_in_heap:
            self.pieces[key] = pieces
            for piece in range(pieces):
                self.heap.take((key, piece), num_bytes // pieces)
        if is_in_heap and self.in_backward:
            self.made[key] = num_bytes
            self.made_bytes += num_bytes
            self.most_made = max(self.most_made, self.made_bytes)
        if self.now > self.fullest:
            self.fullest, self.at_fullest = self.now, self.sums.copy()

    def end(self, *keys: object) -> None:
        for key in keys:
            category, num_bytes, place = self.alive.pop(key, ("", 0, ""))
            self.made_bytes -= self.made.pop(key, 0)
            for piece in range(self.pieces.pop(key, 0)):
                self.heap.give((key, piece))
            if category:
                self._add(category, -num_bytes, place)

    def become(self, key: object, category: str) -> None:
        """Move the bytes of `key` to another category."""
        self.made_bytes -= self.made.pop(key, 0)
        if key in self.alive:
            old, num_bytes, place = self.alive[key]
            self._add(old, -num_bytes, place)
            place = category if place else ""
            self.alive[key] = (category, num_bytes, place)
            self._add(category, num_bytes, place)

    def _add(self, category: str, num_bytes: int, place: str) -> None:
        self.now += num_bytes
        self.sums[category] += num_bytes
        self.most[category] = max(self.most[category], self.sums[category])
        if place:
            heap, most = self.in_heap, self.most_in_heap
            heap[place] += num_bytes
            most[place] = max(most[place], heap[place])
        else:
            self.outside += num_bytes
            self.most_outside = max(self.most_outside, self.outside)

    def resident(self, *, accumulates: bool) -> int:
        """Bytes resident at the peak: live ones, and freed ones that malloc's heap keeps.

        Backward's allocations seldom fit where forward's activations were freed, because small
        live objects lie between, so they are added. Nor do a later micro-batch's activations fit
        between existing gradients: each category counts with its own peak, and a share of the
        activations twice.
        """
        if not self.on_cpu:
            return self.fullest
        heap = float(self.heap.extent)
        if accumulates:
            anew = (1 - REUSED_SHARE) * self.most_in_heap["activations"]
            heap = max(heap, sum(self.most_in_heap.values()) + anew)
        heap = (heap + self.most_made) * (1 + SMALL_SHARE)
        return max(self.fullest, self.most_outside + round(heap))
