"""Waits that Ctrl-Z or SLURM's suspend must not end."""

from __future__ import annotations

import select
import socket
import time
from dataclasses import dataclass, field

LOOK_EVERY_S = 0.5
MOST_S = 2.0
"""A process that did not look for longer than that was stopped, or had no core."""


@dataclass(slots=True)
class Patience:
    """Whether a wait has lasted `limit_s`, without the time in which this process was stopped.

    The other side was stopped, too, and wakes at about the same moment. Ask often.
    """

    limit_s: float
    waited_s: float = 0.0
    looked_at: float = field(default_factory=time.monotonic)

    def is_over(self) -> bool:
        now = time.monotonic()
        self.waited_s, self.looked_at = self.waited_s + min(now - self.looked_at, MOST_S), now
        return self.waited_s >= self.limit_s


def wait_readable(connection: socket.socket, limit_s: float) -> None:
    """Wait until something has come; raises `TimeoutError` after so long."""
    patience = Patience(limit_s)
    while not select.select([connection], [], [], LOOK_EVERY_S)[0]:
        if patience.is_over():
            raise TimeoutError("timed out")
