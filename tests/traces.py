"""Reading what the planner followed of a micro-batch."""

from __future__ import annotations

from colotrain.spec.survey import Trace


def most_alive(found: Trace) -> int:
    """The most bytes of activations at a time, by the trace's own events."""
    alive = highest = 0
    for event in (event for segment in found.segments for event in segment.events):
        alive += found.storages[event] if event >= 0 else -found.storages[-1 - event]
        highest = max(highest, alive)
    return highest
