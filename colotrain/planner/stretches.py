"""A traced micro-batch in stretches between gradients, each with the sums of what it allocates.

A plan replays the same micro-batch several times for every plugin. What lies between two gradients
has the same effect each time, so it is added up once. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from colotrain.planner.heap import SMALL_BYTES
from colotrain.spec.cpu_memory import OWN_PAGES_BYTES
from colotrain.spec.survey import Segment, Trace


@dataclass(slots=True)
class Sum:
    """Bytes that come and go: how many more there are at the end, and at most."""

    change: int = 0
    rise: int = 0

    def add(self, num_bytes: int) -> None:
        self.change += num_bytes
        self.rise = max(self.rise, self.change)


@dataclass(slots=True)
class Stretch:
    """Allocations and frees between two gradients."""

    live: Sum = field(default_factory=Sum)
    outside: Sum = field(default_factory=Sum)
    """Outside malloc's heap."""
    made: Sum = field(default_factory=Sum)
    """In the heap, by a backward."""
    placed: list[tuple[int, int]] = field(default_factory=list)
    """Each storage in the heap with its bytes, where it is allocated, and with 0 where freed."""


def divide(segments: Iterable[Segment], trace: Trace, *, on_cpu: bool) -> list[list[Stretch | int]]:
    """Return the stretches of each segment, and between them the storages that are gradients."""
    alive: dict[int, bool] = {}
    """Storage → whether a backward allocated it."""
    found: list[list[Stretch | int]] = []
    for segment in segments:
        parts: list[Stretch | int] = []
        for event in segment.events:
            number = event if event >= 0 else -1 - event
            if number in trace.gradients:  # whose end is that of its group's reduction
                if event >= 0:
                    parts.append(number)
                continue
            if event >= 0:
                alive[number] = segment.phase == "backward"
            elif number not in alive:
                continue
            made = alive[number] if event >= 0 else alive.pop(number)
            num_bytes, sign = trace.storages[number], 1 if event >= 0 else -1
            if not parts or isinstance(parts[-1], int):
                parts.append(Stretch())
            stretch = parts[-1]
            assert isinstance(stretch, Stretch)
            stretch.live.add(sign * num_bytes)
            if not on_cpu or num_bytes >= OWN_PAGES_BYTES:
                stretch.outside.add(sign * num_bytes)
                continue
            if made:
                stretch.made.add(sign * num_bytes)
            if num_bytes >= SMALL_BYTES:
                stretch.placed.append((number, num_bytes if event >= 0 else 0))
        found.append(parts)
    return found
