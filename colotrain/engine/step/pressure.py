"""What a rank lacks while it trains: a core to run on, or memory that need not be read back."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

from colotrain import host
from colotrain.events.machines import Pressure

EVERY_S = 5.0
"""Seconds between two events: reading the counts of all threads takes a millisecond or less."""
TASKS = Path("/proc/self/task")
OWN_STAT = Path("/proc/thread-self/stat")
CPUS = Path("/sys/devices/system/cpu")


class PressureMeter:
    """Compares the kernel's counts for this process every few seconds."""

    def __init__(self) -> None:
        self._at, self._before = time.monotonic(), _counts()
        self._held_back_s = _held_back_s()

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
        held_back, held_back_s = None, _held_back_s()
        if held_back_s is not None and self._held_back_s is not None:
            held_back = (held_back_s - self._held_back_s) / seconds
        self._held_back_s = held_back_s
        return Pressure(
            step=step,
            waiting_threads=waiting,
            major_faults_per_s=(faults - faults_before) / seconds,
            nice=os.getpriority(os.PRIO_PROCESS, 0),
            held_back=held_back,
            clock_mhz=_clock_mhz(),
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


def _held_back_s() -> float | None:
    """Return the CPU seconds that quotas have taken from this process's control groups so far.

    None where no control group has a quota. `throttled_usec` and, in version 1, `throttled_time` in
    nanoseconds are sums over CPUs (Documentation/scheduler/sched-bwc of Linux).
    """
    found = []
    for folder in host.cgroups("cpu"):
        words = [line.split() for line in host.text_of(folder / "cpu.stat").splitlines()]
        stat = {word[0]: int(word[1]) for word in words if len(word) == 2 and word[1].isdigit()}
        if stat.get("nr_periods"):
            ns = stat.get("throttled_time", 1000 * stat.get("throttled_usec", 0))
            found.append(ns / 1e9)
    return max(found, default=None)


def _clock_mhz() -> float | None:
    """Return the clock of the CPU that this thread runs on; None where the kernel does not tell."""
    fields = host.text_of(OWN_STAT).rpartition(")")[2].split()
    cpu = fields[36] if len(fields) > 36 else ""  # the 39th of all
    text = host.text_of(CPUS / f"cpu{cpu}" / "cpufreq" / "scaling_cur_freq")
    return int(text) / 1000 if text.isdigit() else None
