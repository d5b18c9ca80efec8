"""Timeouts that do not count time in which this process was suspended (Ctrl-Z, SLURM)."""

from __future__ import annotations

import select
import time
from dataclasses import dataclass, field

from colotrain.connections import Link

POLL_S = 0.5
MOST_S = 2.0
"""Seconds that one check may count: after a longer gap the process was suspended or had no core."""


@dataclass(slots=True)
class AwakeTimeout:
    """Timeout of `limit_s` seconds that excludes time in which this process was suspended.

    The other side was suspended too and resumes at about the same moment. Call `is_over` often.
    """

    limit_s: float
    waited_s: float = 0.0
    checked_at: float = field(default_factory=time.monotonic)

    def is_over(self) -> bool:
        now = time.monotonic()
        self.waited_s, self.checked_at = self.waited_s + min(now - self.checked_at, MOST_S), now
        return self.waited_s >= self.limit_s


def wait_readable(link: Link, limit_s: float) -> None:
    """Wait until data has arrived; raise `TimeoutError` after `limit_s` seconds."""
    timeout = AwakeTimeout(limit_s)
    poll = select.poll()
    poll.register(link, select.POLLIN)
    while not link.holds_data() and not poll.poll(POLL_S * 1000):
        if timeout.is_over():
            raise TimeoutError("timed out")
