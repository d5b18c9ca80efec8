"""A rank's memory by category, predicted or measured, and whether a plan fits in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBreakdown:
    """Bytes by category on a rank at its peak, predicted or measured in the same shape."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    gathered: int = 0
    buffers: int = 0
    baseline: int = 0
    """Bytes that the process holds before the model is built."""

    @property
    def total(self) -> int:
        return (
            self.parameters
            + self.gradients
            + self.optimizer
            + self.activations
            + self.gathered
            + self.buffers
            + self.baseline
        )


Verdict = Literal["yes", "tight", "no"]
"""Whether a plan fits in memory; `tight` means perhaps: the run starts, and memory is watched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakRange:
    """Expected range of a rank's peak memory, in bytes; zeros where nothing was predicted."""

    exact: int = 0
    """Largest sum of live tensors plus the process itself: no run needs less."""
    low: int = 0
    high: int = 0

    def verdict(self, capacity: int) -> Verdict:
        """Whether the range fits in `capacity` bytes; an unknown capacity, 0, always fits."""
        if not capacity:
            return "yes"
        if self.exact > capacity:
            return "no"
        return "tight" if self.high > capacity else "yes"
