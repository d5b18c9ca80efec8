"""Exit codes of commands, which other programs rely on, and of workers, for the launcher."""

from __future__ import annotations

import signal

DONE = 0
FAILED = 1
USAGE = 2
"""Bad usage, configuration or input."""
DOES_NOT_FIT = 3
"""The plan needs more memory than there is."""
UNVERIFIED = 4
NOT_CHECKED = 5
"""Nothing wrong was found, but not everything could be checked."""
PREEMPTED = 75
"""Preempted or stopped on request; `resume` continues the run."""
LEFT = 76
"""The run goes on without this node, which held the others up."""
INTERRUPTED = 130

EXIT_CODE_BY_STATUS = {
    "finished": DONE,
    "failed": FAILED,
    "preempted": PREEMPTED,
    "interrupted": INTERRUPTED,
    "left": LEFT,
}
"""Status with which a launch ended → exit code."""
STOPPED = (PREEMPTED, INTERRUPTED)
"""Exit codes of a launch that was asked to stop."""
WORST_FIRST = (INTERRUPTED, PREEMPTED, FAILED, USAGE, DOES_NOT_FIT)
"""Order in which a command over several runs chooses its exit code: the first that occurs."""

FAILURES = (FAILED, USAGE)
"""Exit codes of a launch that failed: with the second, a rank has found the cause in the input."""

WORKER_FINAL = 113
"""Exit code of a worker whose error a restart would only repeat; it is not restarted. A user's code
may end a rank with a code of its own, which is a small one."""
WORKER_USAGE = 114
"""The same, where the error is one of configuration or input."""


def signal_name(number: int) -> str:
    """Return the name of a signal that ended a process; real-time signals have none in Python."""
    names = {known.value: known.name for known in signal.Signals}
    return names.get(number, f"signal {number}")
