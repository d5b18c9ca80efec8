"""What a traced micro-batch does to memory between one gradient and the next, added up.

A plan replays the same micro-batch several times for every plugin, and what lies between two
gradients has the same effect each time. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from colotrain.planner.heap import SMALL_BYTES
from colotrain.spec.cpu_memory import OWN_PAGES_BYTES
from colotrain.spec.survey import Segment, Trace


@dataclass(slots=True)
class Sum:
    """Bytes that are allocated less those that are freed: at the end, and at most."""

    net: int = 0
    peak: int = 0

    def add(self, num_bytes: int) -> None:
        self.net += num_bytes
        self.peak = max(self.peak, self.net)


@dataclass(slots=True)
class MemoryChange:
    """Allocations and frees between two gradients."""

    live: Sum = field(default_factory=Sum)
    """All of them."""
    outside: Sum = field(default_factory=Sum)
    """Those outside malloc's heap."""
    made: Sum = field(default_factory=Sum)
    """Those in the heap that a backward allocated."""
    placed: list[tuple[int, int]] = field(default_factory=list)
    """Those in the heap, in their order: the storage, and its bytes or 0 where it is freed."""


def memory_changes(
    segments: Iterable[Segment], trace: Trace, *, on_cpu: bool
) -> list[list[MemoryChange | int]]:
    """Return for each segment its changes, and between them the storages that are gradients."""
    alive: dict[int, bool] = {}
    """Storage → whether a backward allocated it."""
    found: list[list[MemoryChange | int]] = []
    for segment in segments:
        parts: list[MemoryChange | int] = []
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
                parts.append(MemoryChange())
            change = parts[-1]
            assert isinstance(change, MemoryChange)
            change.live.add(sign * num_bytes)
            if not on_cpu or num_bytes >= OWN_PAGES_BYTES:
                change.outside.add(sign * num_bytes)
                continue
            if made:
                change.made.add(sign * num_bytes)
            if num_bytes >= SMALL_BYTES:
                change.placed.append((number, num_bytes if event >= 0 else 0))
        found.append(parts)
    return found
