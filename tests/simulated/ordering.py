"""Who did what to which memory, and who can know: vector clocks over streams and the host.

Without torch. A `Timeline` does one thing after another; what it knows of others grows only where
it waits for them. An access to memory that another timeline used, and that it does not know to be
over, is a race.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

_ticks = itertools.count(1)


class Timeline:
    """A stream, or the host: what it has done, and what it knows others to have done."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.known: dict[Timeline, int] = {}

    def tick(self) -> int:
        """Do the next thing; returns when."""
        now = self.known[self] = next(_ticks)
        return now

    def follow(self, known: dict[Timeline, int]) -> None:
        """What comes next comes after all that is in `known`."""
        for timeline, tick in known.items():
            if self.known.get(timeline, 0) < tick:
                self.known[timeline] = tick


@dataclass(frozen=True, slots=True)
class Access:
    """One use of memory."""

    by: Timeline
    tick: int
    what: str

    def is_over_for(self, timeline: Timeline) -> bool:
        return timeline.known.get(self.by, 0) >= self.tick


@dataclass(slots=True)
class Memory:
    """One storage: its size as the allocator counts it, and its last uses."""

    home: Timeline
    """The stream that was current as it was allocated: freed memory goes to that stream's pool."""
    on_device: bool
    made: str
    num_bytes: int = 0
    written: Access | None = None
    read: dict[Timeline, Access] = field(default_factory=dict)
    recorded: set[Timeline] = field(default_factory=set)
    """Streams that `record_stream` told the allocator of."""

    def use(self, by: Timeline, tick: int, what: str, *, writes: bool) -> list[str]:
        """Note an access; returns the races that it is part of."""
        earlier = [self.written] if self.written else []
        if writes:
            earlier += self.read.values()
        verb = "writes" if writes else "reads"
        races = [
            f"race: {by.name} {verb} in {what} what {access.by.name} "
            f"{'wrote' if access is self.written else 'reads'} in {access.what}"
            for access in earlier
            if not access.is_over_for(by)
        ]
        if writes:
            self.written, self.read = Access(by, tick, what), {}
        else:
            self.read[by] = Access(by, tick, what)
        return races

    def left_open(self) -> list[Access]:
        """Uses by streams that the allocator does not know of, as the memory is freed."""
        uses = [*self.read.values(), *([self.written] if self.written else [])]
        return [use for use in uses if use.by is not self.home and use.by not in self.recorded]
