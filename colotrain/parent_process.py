"""Ends this process together with another one; state, signals and end of other processes."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path


def die_with(pid: int) -> None:
    """Kill this process as soon as process `pid` is gone for any reason. Returns at once."""
    threading.Thread(target=_wait_and_die, args=(pid,), daemon=True).start()


def _wait_and_die(pid: int) -> None:
    try:
        _wait(os.pidfd_open(pid), None)
    except ProcessLookupError:
        pass
    except OSError:  # pidfd is not supported: check once a second
        while os.path.exists(f"/proc/{pid}"):
            time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)


def send(number: signal.Signals, pid: int) -> None:
    """Send a signal to a process, if it has not ended yet."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def stat_of(pid: int | str) -> list[str]:
    """Return what /proc/PID/stat has after the process's name, its state letter first (proc(5)).

    `OSError` where there is no such process, or no /proc.
    """
    text = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    return text.rpartition(")")[2].split()  # the name may hold spaces and brackets


def has_ended(pid: int, *, within_s: float = 0.0) -> bool:
    """Wait at most `within_s` seconds for the end of any process; True if it has ended."""
    deadline = time.monotonic() + within_s
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except OSError:  # pidfd is not supported
        while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
            time.sleep(0.05)
        return not os.path.exists(f"/proc/{pid}")
    try:
        return _wait(fd, 1000 * within_s)
    finally:
        os.close(fd)


def _wait(fd: int, within_ms: float | None) -> bool:
    """Wait for the end of a process; False where it goes on. `select` knows handles below 1024."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(within_ms))
