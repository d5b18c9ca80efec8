"""What is alive at a time, by the ledger's categories, and at which moment most was."""

from __future__ import annotations

import dataclasses

from colotrain.estimate.heap import Heap
from colotrain.plan import Ledger


class Tally:
    """Bytes alive by category, and what they were at the highest moment so far.

    With a heap, what its free parts keep resident counts as buffers.
    """

    def __init__(self, heap: Heap | None) -> None:
        self.heap = heap
        self.alive: dict[object, tuple[str, int]] = {}
        self.sums = dict.fromkeys((f.name for f in dataclasses.fields(Ledger)), 0)
        self.now = self.fullest = self.highest = 0
        self.at_fullest = dict(self.sums)
        self.most = dict(self.sums)
        """Of each category by itself."""

    def begin(self, key: object, category: str, num_bytes: int, *, lasts: bool = False) -> None:
        """`lasts`: it lives as long as the run, in pages of its own."""
        if num_bytes <= 0:
            return
        self.alive[key] = (category, num_bytes)
        self.now += num_bytes
        total = self.sums[category] = self.sums[category] + num_bytes
        if total > self.most[category]:
            self.most[category] = total
        reach = self.now
        if self.heap is not None:
            if not lasts:
                self.heap.take(key, num_bytes)
            reach += self.heap.slack
        if reach > self.highest:
            self.highest = reach
        if self.now > self.fullest:
            self.fullest, self.at_fullest = self.now, self.sums.copy()

    def peak(self, spread: int = 0) -> Ledger:
        """The fullest moment; what is resident beyond it, and `spread`, count as buffers."""
        retained = self.highest - self.fullest + spread
        return Ledger(**{**self.at_fullest, "buffers": self.at_fullest["buffers"] + retained})

    def end(self, key: object) -> None:
        category, num_bytes = self.alive.pop(key, ("", 0))
        if not category:
            return
        self.sums[category] -= num_bytes
        self.now -= num_bytes
        if self.heap is not None:
            self.heap.give(key)

    def become(self, key: object, category: str) -> None:
        """The same bytes are something else from now on."""
        if key in self.alive:
            old, num_bytes = self.alive[key]
            self.alive[key] = (category, num_bytes)
            self.sums[old] -= num_bytes
            self.sums[category] += num_bytes
