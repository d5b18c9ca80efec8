"""Identity of a run's launcher process, and whether that process is still alive.

The launcher's identity file records host, boot, process id and process start time, so that another
process that reuses the id is not mistaken for the launcher.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from colotrain import host
from colotrain.errors import ColotrainError, ConfigError, UsageError
from colotrain.events.fold import follow
from colotrain.events.kinds import Step
from colotrain.events.log import event_files, lines_of
from colotrain.events.view import ENDED, RunView
from colotrain.parent_process import stat_of
from colotrain.records import from_plain, to_plain
from colotrain.rundir import HOW_TO_START, RUNS, RunDir, read_json
from colotrain.spec.schedulers import job_id

SILENT_S = 120.0
"""Seconds without new events after which a run on another host is presumed dead."""
AHEAD_S = 3600.0
"""Seconds by which clocks that tell the time may differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """The process that launches a run."""

    host: str
    boot_id: str
    pid_namespace: str
    """PID namespace: containers can share host name and boot id but number processes separately."""
    pid: int
    start_time: str
    """Opaque value, equal only for the same process; empty where the system does not tell."""
    job: str = ""
    """Id of the scheduler's job, of which no scheduler runs two allocations at once."""


_UNKNOWN = ""
_PLACE = ("host", "boot_id", "pid_namespace")


def claim(rundir: RunDir) -> contextlib.ExitStack:
    """Become the launcher of a run, until `release` or the end of a `with` over the result.

    Raises `UsageError` if another live process is the launcher. Two launchers that claim a run at
    once are serialized by a lock on its folder, if the filesystem supports such locks.
    """
    with _locked(rundir.path):
        holder, mine = launcher_of(rundir), _identity(os.getpid())
        succeeds = bool(holder and holder.job and holder.job == mine.job)
        if succeeds and is_alive(rundir) is None:  # its node was lost
            holder = None
        if holder is not None and holder != mine and _holds(rundir, now=time_there):
            fix = f"stop it with `colotrain stop {rundir.argument}`"
            if is_alive(rundir) is None:
                fix += f", or wait until it has been silent for {SILENT_S:.0f} s"
            where = f"process {holder.pid} on {holder.host}"
            raise UsageError(f"{rundir.path}: {where} launches this run already", fix)
        rundir.write(rundir.launcher_file, json.dumps(to_plain(mine)) + "\n")
    held = contextlib.ExitStack()
    held.callback(release, rundir)
    return held


def release(rundir: RunDir) -> None:
    """Give up being the launcher; no effect in any other process."""
    if launcher_of(rundir) == _identity(os.getpid()):
        with contextlib.suppress(OSError):  # the folder may have become read-only
            rundir.launcher_file.unlink()


def is_alive(rundir: RunDir) -> bool | None:
    """Whether the run's launcher is alive; None if that cannot be told from this process.

    It cannot be told if the launcher ran on another host, in another container or before a reboot.
    """
    holder = launcher_of(rundir)
    return False if holder is None else is_running(holder)


def is_running(launcher: Launcher) -> bool | None:
    """Whether the process exists, also after it has released its run; None as for `is_alive`."""
    here = _identity(os.getpid())
    if any(getattr(launcher, name) != getattr(here, name) for name in _PLACE):
        return None
    start_time = _start_time(launcher.pid)
    return start_time in (_UNKNOWN, launcher.start_time)


def state(rundir: RunDir, view: RunView) -> str:
    """Return finished, failed, preempted, interrupted, running, starting, or dead.

    Dead means that the launcher is gone without having recorded how the run ended. A run that was
    never launched, for example one that waits in a queue, is starting.
    """
    if view.status in ENDED or is_waiting(rundir, view) or _holds(rundir):
        return view.status
    now = follow(rundir, ranks=())  # it may have ended since `view` was taken
    return now.status if now.status in ENDED else "dead"


def is_waiting(rundir: RunDir, view: RunView) -> bool:
    """Whether the run was never launched, for example while its job waits in a queue."""
    was_launched = view.launched_at is not None or rundir.launcher_file.exists()
    return view.status == "starting" and not was_launched


def has_trained(rundir: RunDir) -> bool:
    """Whether the run has completed a step."""
    mark = f'"kind":"{Step.KIND}"'.encode()
    for path, rank, _ in event_files(rundir, ranks={0}):
        if rank is not None:
            with contextlib.suppress(OSError):
                if any(mark in line for line in lines_of(path, rundir.open)):
                    return True
    return False


def find(
    name: str | None, *, root: Path = RUNS, counts: Callable[[RunDir], bool] = has_trained
) -> RunDir:
    """Return the run `name`; if None, the newest that is alive, queued, or passes `counts`."""
    if name is not None:
        return RunDir.find(name, root=root)
    known = RunDir.all(root)[::-1]
    if not known:
        raise UsageError(f"no runs under {root.absolute()}", HOW_TO_START)
    return next((r for r in known if _holds(r) or counts(r) or _is_queued(r)), known[0])


def _is_queued(rundir: RunDir) -> bool:
    """Whether the run is a job that was neither started nor cancelled by `colotrain stop`."""
    over = rundir.launcher_events.exists() or rundir.cancel_file.exists()
    return rundir.job_file.exists() and not over


def _holds(rundir: RunDir, *, now: Callable[[RunDir], float] = lambda _: time.time()) -> bool:
    """Whether a launcher seems alive; on another host, whether the run has written recently.

    `now` returns the Unix time to compare with.
    """
    alive = is_alive(rundir)
    return _silence_s(rundir, now(rundir)) <= SILENT_S if alive is None else alive


def _silence_s(rundir: RunDir, now: float) -> float:
    """Return the seconds since the run last wrote an event or was claimed.

    A time far ahead is from before the clock was set back: whoever is alive writes again.
    """
    files = [path for path, _, _ in event_files(rundir)] + [rundir.launcher_file]
    written = [when for path in files if (when := _modified_at(path)) is not None]
    return now - max((when for when in written if when <= now + AHEAD_S), default=float("-inf"))


def time_there(rundir: RunDir) -> float:
    """Return the Unix time by the clock that gives the run's files theirs, such as a server's.

    Writes a file. Where two machines' clocks differ, a run of the other one must not look dead.
    """
    probe = rundir.launcher_file.with_name("clock")
    try:
        rundir.write(probe, "")
        return probe.stat().st_mtime
    except OSError:
        return time.time()
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()


def _modified_at(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def launcher_of(rundir: RunDir) -> Launcher | None:
    """Return the launcher in the identity file; None if there is no readable one."""
    try:
        return from_plain(Launcher, read_json(rundir.launcher_file, rundir.open))
    except (OSError, ValueError, ConfigError):
        return None


def _identity(pid: int) -> Launcher:
    return Launcher(
        host=socket.gethostname(),
        boot_id=host.boot_id(),
        pid_namespace=host.pid_namespace(),
        pid=pid,
        start_time=_start_time(pid) or _UNKNOWN,
        job=job_id(),
    )


def _start_time(pid: int) -> str | None:
    """Return the start time of process `pid`; None if it is gone or a zombie.

    The unit is clock ticks since boot, because wall-clock times shift when the clock is set.
    """
    try:
        stat = stat_of(pid)
    except OSError:
        return _UNKNOWN if _exists(pid) else None
    return None if stat[0] in "ZX" else stat[19]


def _exists(pid: int) -> bool:
    """Whether the process exists, if /proc is missing (macOS) or hides other users' processes."""
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # the process belongs to another user
        return True
    return True


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a lock on `folder`; some network filesystems have none and it is left unlocked."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise ColotrainError(
            f"{folder}: cannot be opened ({error})", "choose another run"
        ) from error
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
