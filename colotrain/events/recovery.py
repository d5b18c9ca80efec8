"""The restarts of a run, from the events of its attempts."""

from __future__ import annotations

from collections.abc import Sequence

from colotrain.events import kinds
from colotrain.events.attempt import Attempt
from colotrain.events.goodput import Recovery


def recoveries(
    attempts: Sequence[Attempt], restarts: Sequence[kinds.Restart]
) -> tuple[Recovery, ...]:
    """Return the restarts in `restarts`, oldest first, each with the first step after it.

    A restart whose workers died again before a step is part of the next one that led to a step.
    """
    found, before = [], None
    for attempt in attempts:
        if not attempt.steps:
            continue
        first, base = attempt.steps[min(attempt.steps)], attempt.base() or 0
        if before is not None:
            decided = [r.t for r in restarts if before.steps[max(before.steps)].t <= r.t <= first.t]
            counts = [step.t for number, step in before.steps.items() if number <= base]
            began = max(counts, default=before.steps[min(before.steps)].t)
            if decided:
                found.append(
                    Recovery(
                        lost_steps=max(0, max(before.steps) - base),
                        lost_s=max(0.0, first.t - began - (first.step_s or 0.0)),
                        restart_s=first.t - min(decided),
                    )
                )
        before = attempt
    return tuple(found)
