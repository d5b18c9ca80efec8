"""Detects a loss above its recent range."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

WINDOW = 128
SIGMAS = 6.0
MIN_STEPS = 32
"""Steps before the mean and deviation are used."""


@dataclass(slots=True)
class LossSpikes:
    """The losses of the last 128 steps."""

    recent: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def check(self, loss: float) -> str | None:
        """Return a warning if `loss` is over 6 σ above the window's mean, and add it to the window.

        A loss that is not finite is not added; other code reports it.
        """
        if not math.isfinite(loss):
            return None
        warning = None
        if len(self.recent) >= MIN_STEPS:
            mean, sigma = statistics.fmean(self.recent), statistics.pstdev(self.recent)
            if loss > mean + SIGMAS * sigma > mean:
                warning = (
                    f"loss {loss:.4f} is {(loss - mean) / sigma:.0f} σ above the last "
                    f"{len(self.recent)} steps' {mean:.4f}"
                )
        self.recent.append(loss)
        return warning
