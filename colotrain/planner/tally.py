"""Bytes alive at a time by category, and the resident memory that follows from them.

Standard library only.
"""

from __future__ import annotations

import dataclasses

from colotrain.planner.heap import Heap
from colotrain.spec.memory import Ledger

OWN_PAGES_BYTES = 32 << 20
"""On CPU an allocation from this size on has pages of its own, which go back to the system when it
ends (`engine.allocator.FLEETING_BYTES`). What is smaller comes from malloc's heap, which stays
resident."""
REUSED_SHARE = 0.5
"""Share of the activations of a later micro-batch that finds room in the heap between the gradients
made meanwhile; the rest makes the heap larger."""
SMALL_SHARE = 0.03
"""What small objects between the tensors add to a heap, as a share of it."""
RANGE = 0.1
"""A measured peak lies this near to the estimate, as a share of it, in 95 of 100 runs."""
CATEGORIES = tuple(field.name for field in dataclasses.fields(Ledger))


class Tally:
    """Bytes alive by category: now, at their fullest moment, and what stays resident (CPU).

    On CPU, freed memory stays in malloc's heap for the next step, and a tensor that does not fit
    into what another has left makes it larger.
    """

    def __init__(self, *, on_cpu: bool) -> None:
        self.on_cpu = on_cpu
        self.alive: dict[object, tuple[str, int, str]] = {}
        """Key → its category, its bytes, and in the heap the category whose memory they take."""
        self.sums = dict.fromkeys(CATEGORIES, 0)
        self.most = dict(self.sums)
        """The most of each category, wherever it lay."""
        self.in_heap = dict(self.sums)
        self.most_in_heap = dict(self.sums)
        self.outside = self.most_outside = 0
        """Bytes that are not in the heap."""
        self.heap = Heap()
        self.pieces: dict[object, int] = {}
        """In how many pieces each key lies in the heap."""
        self.in_backward = False
        """Whether what begins now is made by a backward: the caller says so."""
        self.made: dict[object, int] = {}
        """Bytes in the heap that a backward made (temporaries, recomputed activations), by key."""
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
        """Count `num_bytes`, which may come in several `pieces`.

        `lasts`: they live as long as the run, in pages of their own. `in_place_of` is the category
        whose memory they take, where that is free whenever these bytes are alive.
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

    def end(self, key: object) -> None:
        category, num_bytes, place = self.alive.pop(key, ("", 0, ""))
        self.made_bytes -= self.made.pop(key, 0)
        for piece in range(self.pieces.pop(key, 0)):
            self.heap.give((key, piece))
        if category:
            self._add(category, -num_bytes, place)

    def become(self, key: object, category: str) -> None:
        """The same bytes are something else from now on."""
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
        """Bytes that stay in memory at the peak: what is alive, and what malloc's heap keeps.

        What backward makes seldom fits where forward's activations have just been freed, for small
        objects of those that are left lie in between; so it counts beside them. Nor does a later
        micro-batch fit between the gradients that are there by then: each category counts with its
        own maximum, and a share of the activations once more.
        """
        if not self.on_cpu:
            return self.fullest
        heap = float(self.heap.extent)
        if accumulates:
            anew = (1 - REUSED_SHARE) * self.most_in_heap["activations"]
            heap = max(heap, sum(self.most_in_heap.values()) + anew)
        heap = (heap + self.most_made) * (1 + SMALL_SHARE)
        return max(self.fullest, self.most_outside + round(heap))
