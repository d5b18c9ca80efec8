"""Dynamic loss scaling for fp16 (Micikevicius et al. 2018)."""

from __future__ import annotations

from dataclasses import dataclass

INITIAL_SCALE = 2.0**16
GROWTH_INTERVAL = 2000


@dataclass(slots=True, kw_only=True)
class LossScale:
    """The same on every rank: it is fed with what all ranks agreed on."""

    scale: float = 1.0
    dynamic: bool = False
    clean_steps: int = 0

    @staticmethod
    def for_precision(precision: str) -> LossScale:
        if precision == "fp16":
            return LossScale(scale=INITIAL_SCALE, dynamic=True)
        return LossScale()

    @property
    def can_fall(self) -> bool:
        """Whether a lower scale may cure an overflow."""
        return self.dynamic and self.scale > 1.0

    def update(self, *, overflow: bool) -> None:
        """After each step: halve on overflow, double after 2,000 clean steps."""
        if not self.dynamic:
            return
        self.clean_steps = 0 if overflow else self.clean_steps + 1
        if overflow:
            self.scale = max(self.scale / 2, 1.0)
        elif self.clean_steps == GROWTH_INTERVAL:
            self.scale, self.clean_steps = self.scale * 2, 0
