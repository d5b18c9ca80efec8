"""The restarts of a run, from the events of its attempts."""

from __future__ import annotations

from collections.abc import Sequence

from colotrain.events import kinds
from colotrain.events.attempt import Attempt
from colotrain.events.goodput import Recovery


def recoveries(
    attempts: Sequence[Attempt],
    restarts: Sequence[kinds.Restart],
    launches: Sequence[kinds.LaunchStarted],
) -> tuple[Recovery, ...]:
    """Return the restarts in `restarts`, oldest first, each with the first step after it.

    A restart whose workers died again before a step is part of the next one that led to a step. A
    launch that had to make steps again, because the launch before it was killed, counts too; the
    time between the two does not.
    """
    found, before = [], None
    for attempt in attempts:
        if not attempt.steps:
            continue
        first, base = attempt.steps[min(attempt.steps)], attempt.base() or 0
        if before is not None:
            last = before.steps[max(before.steps)]
            counts = [step.t for number, step in before.steps.items() if number <= base]
            began = max(counts, default=before.steps[min(before.steps)].t)
            lost_steps = max(0, last.step - base)
            decided = [r.t for r in restarts if last.t <= r.t <= first.t]
            again = [launch.began_at or launch.t for launch in launches]
            again = [t for t in again if lost_steps and last.t <= t <= first.t]
            if decided or again:
                pause_s = 0.0 if decided else max(again) - last.t
                found.append(
                    Recovery(
                        lost_steps=lost_steps,
                        lost_s=max(0.0, first.t - began - pause_s - (first.step_s or 0.0)),
                        restart_s=first.t - (min(decided) if decided else max(again)),
                    )
                )
        before = attempt
    return tuple(found)
