"""Input of one dashboard frame, and what the panes derive from it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from colotrain.events.gradients import ParameterGradient
from colotrain.events.slow_ranks import Slowness, slow_ranks
from colotrain.events.view import ENDED, RankView, RunView
from colotrain.spec.plan import RunPlan
from colotrain.spec.quantities import short_duration

Focus = Literal["overview", "gradients", "ranks", "output"]
FOCI: tuple[Focus, ...] = ("overview", "gradients", "ranks", "output")
SILENT_S = 30.0
"""Minimum seconds without a step before a rank is reported as silent; 10 steps if longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameState:
    """State of a run at one moment. Only `view` and `plan` are independent of the clock."""

    view: RunView
    plan: RunPlan
    now: float
    """Current Unix time, or the time of a replayed frame."""
    state: str
    """Result of `liveness.state`: the view's status, or dead."""
    output: tuple[str, ...] = ()
    """Last lines that workers wrote."""

    @property
    def ended(self) -> bool:
        return self.state in ENDED or self.state == "dead"

    @property
    def until(self) -> float:
        """Return the current time, or for an ended run the time of its end."""
        if not self.ended:
            return self.now
        return self.view.ended_at or self.view.last_event_at or self.now

    def ago(self, t: float) -> str:
        age = short_duration(max(0.0, self.until - t))
        return f"{age} before the end" if self.ended else f"{age} ago"


def stragglers(frame: FrameState) -> list[tuple[RankView, str]]:
    """Return the ranks that hold the others up, worst first, each with the reason."""
    ranks = frame.view.ranks
    if len(ranks) < 2:
        return []
    slow, newest = slow_ranks(ranks), max(rank.step for rank in ranks)
    found = [(rank, why) for rank in ranks if (why := _slowness(rank, slow, newest, frame))]
    return sorted(found, key=lambda item: (item[0].step, -item[0].busy_s))


def _slowness(rank: RankView, slow: dict[int, Slowness], newest: int, frame: FrameState) -> str:
    silence = frame.until - rank.t
    limit = max(SILENT_S, 10 * (frame.view.pace_s or 0.0))
    if not frame.ended and silence > limit:
        return f"silent for {short_duration(silence)}"
    if rank.step < newest - 1:
        return f"{newest - rank.step} steps behind"
    return slow[rank.rank].times if rank.rank in slow else ""


def worst_parameters(view: RunView) -> list[tuple[ParameterGradient, str]]:
    """Return the parameters of the newest record to look at first, each with the reason.

    Non-finite ones come first; then, alternating, those with the largest update ratios and the
    largest norms; a few unused or zero ones come early and the rest of these last.
    """
    if view.gradients is None:
        return []
    rows = view.gradients.parameters
    bad = [(row, row.reason or "not finite") for row in rows if row.status == "nonfinite"]
    idle = [(row, row.reason or row.status) for row in rows if row.status in ("unused", "zero")]
    trained = [row for row in rows if row.status == "trained"]
    by_update = sorted(trained, key=lambda row: -_number(row.update_ratio))
    by_norm = sorted(trained, key=lambda row: -_number(row.norm))
    found, seen = bad, {row.name for row, _ in bad}
    for place, (first, second) in enumerate(zip(by_update, by_norm, strict=True), 1):
        for row, why in ((first, f"update #{place}"), (second, f"norm #{place}")):
            if row.name not in seen:
                seen.add(row.name)
                found.append((row, why))
    return [*found[:4], *idle[:3], *found[4:], *idle[3:]]  # a short pane shows some idle ones


def _number(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else -math.inf
