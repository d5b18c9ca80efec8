"""Which ranks hold the others up, and why, as far as their own events tell."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from colotrain.events.view import RankView, RunView

SLOW = 1.25
"""Multiple of the others' time above which a rank is slow."""
SLOW_S = 0.005
"""Seconds above the others' time that count as noise."""
MOST_OF = 0.5
"""Share of what a rank takes longer that a cause must explain."""
SWAPPING_PER_S = 100.0
"""Page faults per second, each a read from a disk, that slow a rank down."""
DATA = "its data comes late"
FOR_STEPS, FOR_S = 20, 10.0
"""Steps in a row, and seconds, for which a rank must be slow before it is told."""


@dataclass(frozen=True, slots=True)
class Slowness:
    """How slow a rank is, and the likely cause; empty if its events show none."""

    times: str
    cause: str
    factor: float = 1.0
    """Its time divided by the others'."""
    is_data: bool = False
    """Whether its data explains it, which it would take along to another machine."""

    def __str__(self) -> str:
        return f"{self.times}{self.cause and ', '}{self.cause}"


def slow_ranks(ranks: Sequence[RankView]) -> dict[int, Slowness]:
    """Return the ranks that are slow, each compared with those of its own pipeline stage."""
    by_stage: dict[int | None, list[RankView]] = {}
    for rank in ranks:
        by_stage.setdefault(rank.stage, []).append(rank)
    return {number: why for own in by_stage.values() for number, why in _slow_among(own).items()}


def _slow_among(ranks: Sequence[RankView]) -> dict[int, Slowness]:
    """Return the slow of ranks that do the same.

    A rank is compared with the lower median of all, so that one of two ranks can be slow.
    """
    if len(ranks) < 2:
        return {}
    usual_s = statistics.median_low(rank.busy_s for rank in ranks)
    data_s = statistics.median_low(rank.data_s for rank in ranks)
    usual_mhz, found = _usual_clock_mhz(ranks), {}
    for rank in ranks:
        longer_s = rank.busy_s - usual_s
        if longer_s > SLOW_S and longer_s > (SLOW - 1) * usual_s:
            times = f"{rank.busy_s / usual_s:.1f}× the median" if usual_s > 0 else "slow"
            share_of_data = (rank.data_s - data_s) / longer_s
            cause = _cause(rank, longer_s / rank.busy_s, share_of_data, usual_mhz)
            factor = rank.busy_s / max(usual_s, SLOW_S)
            found[rank.rank] = Slowness(times, cause, factor, is_data=cause == DATA)
    return found


def _usual_clock_mhz(ranks: Sequence[RankView]) -> float | None:
    clocks = [r.pressure.clock_mhz for r in ranks if r.pressure and r.pressure.clock_mhz]
    return statistics.median_high(clocks) if clocks else None


def _cause(
    rank: RankView, share_longer: float, share_of_data: float, usual_mhz: float | None
) -> str:
    """Return what explains most of the time that a rank takes longer; empty if nothing does."""
    pressure = rank.pressure
    if share_of_data >= MOST_OF:
        return DATA
    if pressure is None:
        return ""
    if pressure.held_back is not None and pressure.held_back >= MOST_OF * share_longer:
        return "its container has used up its CPU quota"
    if pressure.waiting_threads is not None and pressure.waiting_threads >= MOST_OF * share_longer:
        nice = f" (it has nice {pressure.nice})" if pressure.nice > 0 else ""
        return f"other processes have its cores{nice}"
    if pressure.major_faults_per_s >= SWAPPING_PER_S:
        return "its memory is read back from swap or disk"
    clock = pressure.clock_mhz
    if usual_mhz and clock and clock <= (1 - MOST_OF * share_longer) * usual_mhz:
        return f"its clock is low ({clock / 1000:.1f} GHz, others have {usual_mhz / 1000:.1f})"
    return ""


class SlowRankWatch:
    """Tells once of each rank that has been slow for many steps, and again if it recovers."""

    def __init__(self) -> None:
        self._since: dict[int, RankView] = {}
        """Rank → itself when it became slow."""
        self._told: set[int] = set()

    def look(self, view: RunView) -> list[str]:
        """Return what is new since the last view. Call it several times a second."""
        ranks, slow = {rank.rank: rank for rank in view.ranks}, slow_ranks(view.ranks)
        self._since = {number: self._since.get(number, ranks[number]) for number in slow}
        lasting = {r for r, first in self._since.items() if _lasts(first, ranks[r])}
        fresh, recovered = sorted(lasting - self._told), sorted(self._told - slow.keys())
        self._told = (self._told | lasting) & slow.keys()
        texts = [f"rank {number} holds the others up: {slow[number]}" for number in fresh]
        return texts + [f"rank {number} no longer holds the others up" for number in recovered]


def _lasts(first: RankView, now: RankView) -> bool:
    return now.step - first.step >= FOR_STEPS and now.t - first.t >= FOR_S
