"""What restarts and rollbacks cost a run: steps done twice, seconds, and the useful share."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from colotrain.events import kinds


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One restart of the workers, once a step was finished after it.

    Also a launch that had to make steps of a killed launch again."""

    lost_steps: int
    """Finished steps that had to be made again."""
    lost_s: float
    """Seconds from the end of the last step that counts to the beginning of the next one, without
    a time between two launches."""
    restart_s: float
    """Seconds from the decision to restart, or the new launch, to the next finished step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Recovery over the run's whole life, all of its launches."""

    recoveries: tuple[Recovery, ...] = ()
    rolled_back: int = 0
    """Finished steps that had to be made again because training went back to a checkpoint."""
    useful_s: float = 0.0
    """Seconds in steps that count: not in those that were made again."""
    wall_s: float = 0.0
    """Seconds in which a launcher of the run ran, from each command's beginning."""

    @property
    def goodput(self) -> float | None:
        return min(1.0, self.useful_s / self.wall_s) if self.wall_s > 0 else None

    @property
    def cost(self) -> str:
        """Text like `1 step lost, 2.1 s to the next step, 97 % of the time useful`."""
        steps = self.lost_steps - self.rolled_back
        lost = f"{steps} step{'s' * (steps != 1)} lost"
        again = f", {self.restart_s:.1f} s to the next step" if self.restart_s is not None else ""
        share = f", {self.goodput:.0%} of the time useful" if self.goodput is not None else ""
        return f"{lost}{again}{share}"

    @property
    def lost_steps(self) -> int:
        """Finished steps that had to be made again, after restarts and rollbacks."""
        return sum(recovery.lost_steps for recovery in self.recoveries) + self.rolled_back

    @property
    def restart_s(self) -> float | None:
        """Typical seconds from the decision to restart to the next finished step."""
        found = [recovery.restart_s for recovery in self.recoveries]
        return statistics.median(found) if found else None


def wall_s(
    launches: Sequence[kinds.LaunchStarted], ends: Sequence[float], times: Sequence[float]
) -> float:
    """Return the seconds in which a launcher ran.

    `ends` are the times at which launches said that they were over, `times` those of any signs of
    life: a launcher that was killed ended with the last one.
    """
    total = 0.0
    starts = sorted(launches, key=lambda launch: launch.t)
    for number, launch in enumerate(starts):
        until = starts[number + 1].t if number + 1 < len(starts) else float("inf")
        signs = [t for t in (*ends, *times) if launch.t <= t < until]
        said = [t for t in ends if launch.t <= t < until]
        end = max(said or signs, default=launch.t)
        total += end - (launch.began_at or launch.t)
    return total
