"""What a rank lacks while it trains: a core to run on, or memory that need not be read back."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

from colotrain.events.kinds import Pressure

EVERY_S = 5.0
"""Seconds between two events: reading the counts of all threads takes a millisecond or less."""
TASKS = Path("/proc/self/task")


class PressureMeter:
    """Compares the kernel's counts for this process every few seconds."""

    def __init__(self) -> None:
        self._at, self._before = time.monotonic(), _counts()

    def read(self, step: int) -> Pressure | None:
        """Return what was lacking since the last event; None while that is too short ago."""
        seconds = time.monotonic() - self._at
        if seconds < EVERY_S:
            return None
        (queued, faults), (queued_before, faults_before) = _counts(), self._before
        self._at, self._before = time.monotonic(), (queued, faults)
        waiting = None
        if queued is not None and queued_before is not None:  # threads may have ended
            waiting = max(0.0, queued - queued_before) / seconds
        return Pressure(
            step=step,
            waiting_threads=waiting,
            major_faults_per_s=(faults - faults_before) / seconds,
            nice=os.getpriority(os.PRIO_PROCESS, 0),
        )


def _counts() -> tuple[float | None, int]:
    """Return the seconds that threads waited for a core (None: not known), and major faults.

    The second number of `schedstat` is in nanoseconds (Documentation/scheduler/sched-stats of
    Linux); kernels without that count, or containers that hide it, have no such file.
    """
    queued: float | None = None
    for task in os.listdir(TASKS) if TASKS.is_dir() else ():
        try:
            nanoseconds = int((TASKS / task / "schedstat").read_bytes().split()[1])
        except (OSError, IndexError, ValueError):
            continue
        queued = (queued or 0.0) + nanoseconds / 1e9
    return queued, resource.getrusage(resource.RUSAGE_SELF).ru_majflt
