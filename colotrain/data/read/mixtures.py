"""Mixtures: several datasets in fixed shares, in an order that depends on seed and position."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from colotrain.data.read.packing import Concatenation

BLOCK = 10_000
"""Positions after which shares are exact, and the resolution of weights."""


class Mixture(Concatenation):
    """Datasets one after the other, with their weights in the mixture.

    Parts without samples in a split are left out, and the others' shares grow.
    """

    def __init__(self, parts: Sequence[Any], weights: Sequence[float]) -> None:
        super().__init__(parts)
        self.weights = [w for part, w in zip(parts, weights, strict=True) if len(part)]

    @property
    def sizes(self) -> list[int]:
        return [len(part) for part in self.parts]


class MixtureOrder:
    """Order of a mixture's samples.

    Every block of `BLOCK` positions contains each part in its share, shuffled within the block (or
    spread evenly, without shuffling). A part's samples come in the part's own order, which
    continues from block to block and begins a new epoch when all are used. So the sample at any
    position is computed without those before it, and resuming is exact.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float],
        *,
        seed: int,
        shuffle: bool,
        order: Callable[[int, int, bool], Any],
    ) -> None:
        """`order(size, seed, shuffle)` makes the order of a part."""
        self.num_samples = sum(sizes)
        self.seed, self.shuffle = seed, shuffle
        self.counts = block_counts(weights)
        self._starts = np.concatenate([[0], np.cumsum(sizes)])
        self._orders = [
            order(size, (seed + (index + 1) * 0x9E3779B97F4A7C15) % 2**63, shuffle)
            for index, size in enumerate(sizes)
        ]
        self._block = -1
        self._part = self._rank = np.empty(0, np.int64)

    def sample_at(self, position: int) -> int:
        block, offset = divmod(position, BLOCK)
        if block != self._block:
            self._part, self._rank = self._arrange(block)
            self._block = block
        part = int(self._part[offset])
        own = block * self.counts[part] + int(self._rank[offset])
        return int(self._starts[part]) + int(self._orders[part].sample_at(own))

    def samples_at(self, positions: range) -> list[int]:
        return [self.sample_at(position) for position in positions]

    def _arrange(self, block: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """The part at each position of a block, and that part's number of earlier positions."""
        parts = np.repeat(np.arange(len(self.counts)), self.counts)
        ranks = np.concatenate([np.arange(count) for count in self.counts])
        if self.shuffle:
            key = np.array([self.seed % 2**64, block + 2**62], dtype=np.uint64)
            parts = parts[np.argsort(np.random.Philox(key=key).random_raw(BLOCK), kind="stable")]
            found = np.empty(BLOCK, np.int64)
            for part, count in enumerate(self.counts):
                found[parts == part] = np.arange(count)
            return parts, found
        places = (ranks + 0.5) / np.repeat(self.counts, self.counts)
        spread = np.argsort(places, kind="stable")
        return parts[spread], ranks[spread]


def block_counts(weights: Sequence[float]) -> list[int]:
    """Positions per block of each part: at least 1, rounded by largest remainders."""
    shares = np.asarray(weights, dtype=np.float64) / sum(weights) * BLOCK
    counts = np.maximum(np.floor(shares).astype(int), 1)
    while (left := BLOCK - int(counts.sum())) != 0:
        remainders = shares - counts
        if left < 0:  # a part's only position stays
            remainders = np.where(counts > 1, remainders, np.inf)
        chosen = int(remainders.argmax() if left > 0 else remainders.argmin())
        counts[chosen] += 1 if left > 0 else -1
    return [int(count) for count in counts]
