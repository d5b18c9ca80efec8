"""Exit codes: of commands, which other programs rely on, and of a worker towards its launcher."""

from __future__ import annotations

DONE = 0
FAILED = 1
USAGE = 2
"""Bad usage, configuration or input."""
DOES_NOT_FIT = 3
"""The plan needs more memory than there is."""
UNVERIFIED = 4
PREEMPTED = 75
"""Preempted or stopped: `resume` continues."""
INTERRUPTED = 130

OF_STATUS = {
    "finished": DONE,
    "failed": FAILED,
    "preempted": PREEMPTED,
    "interrupted": INTERRUPTED,
}
"""How a launch ended → its exit code."""
STOPPED = (PREEMPTED, INTERRUPTED)
"""Of a launch that was asked to stop."""
WORST_FIRST = (INTERRUPTED, PREEMPTED, FAILED, USAGE, DOES_NOT_FIT)
"""Which of several runs' codes a command ends with."""

WORKER_FINAL = 3
"""Of a worker whose error would only come again: it is not restarted."""
