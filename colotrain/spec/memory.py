"""A rank's memory by category, predicted or measured, and whether a plan fits in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Bytes by category on the rank that peaks, predicted or measured in the same shape."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    gathered: int = 0
    buffers: int = 0
    baseline: int = 0
    """What the process holds before there is a model."""

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
"""Whether a plan fits in memory; `tight`: perhaps, so the run starts and is watched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakRange:
    """Bytes that a rank's peak is expected to lie between; zeros where nothing was predicted."""

    exact: int = 0
    """Live tensors at their fullest moment, and the process itself: no run needs less."""
    low: int = 0
    high: int = 0

    def verdict(self, capacity: int) -> Verdict:
        """Whether that fits in `capacity` bytes; 0 is not known, and refuses nothing."""
        if not capacity:
            return "yes"
        if self.exact > capacity:
            return "no"
        return "tight" if self.high > capacity else "yes"
