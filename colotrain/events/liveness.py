"""Who launches a run, and whether that process still lives.

The launcher's identity file names host, boot, process and the process's start time, so that a
process id that was given out again is not mistaken for the launcher.
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

from colotrain.errors import ColotrainError, ConfigError, UsageError
from colotrain.events.fold import follow
from colotrain.events.log import event_files
from colotrain.events.view import ENDED, RunView
from colotrain.records import from_plain, to_plain
from colotrain.rundir import HOW_TO_START, RUNS, RunDir, write_atomically

SILENT_S = 120.0
"""A run on another host whose event files are older than this is taken for dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """The process that launches a run."""

    host: str
    boot_id: str
    pid_namespace: str
    """Containers may share host name and boot, and yet count processes on their own."""
    pid: int
    start_time: str
    """Opaque; equal for the same process only. Empty where the system does not tell."""
    job: str = ""
    """Of SLURM, which never lets two allocations of one job be."""


_UNKNOWN = ""
_PLACE = ("host", "boot_id", "pid_namespace")


def claim(rundir: RunDir) -> contextlib.ExitStack:
    """Become the launcher of a run, until `release` or to the end of a `with` over the result.

    Raises `UsageError` where another live process is. Two launchers that try at once are
    serialised by a lock on the folder, where the filesystem has locks for folders.
    """
    with _locked(rundir.path):
        holder, mine = launcher_of(rundir), _identity(os.getpid())
        succeeds = bool(holder and holder.job and holder.job == mine.job)
        if succeeds and is_alive(rundir) is None:  # its node was lost
            holder = None
        if holder is not None and holder != mine and _holds(rundir):
            fix = f"stop it with `colotrain stop {rundir.name}`"
            if is_alive(rundir) is None:
                fix += f", or wait until it has been silent for {SILENT_S:.0f} s"
            where = f"process {holder.pid} on {holder.host}"
            raise UsageError(f"{rundir.path}: {where} launches this run already", fix)
        write_atomically(rundir.launcher_file, json.dumps(to_plain(mine)) + "\n")
    held = contextlib.ExitStack()
    held.callback(release, rundir)
    return held


def release(rundir: RunDir) -> None:
    """Stop being the launcher; without effect for any other process."""
    if launcher_of(rundir) == _identity(os.getpid()):
        rundir.launcher_file.unlink(missing_ok=True)


def is_alive(rundir: RunDir) -> bool | None:
    """Whether the run's launcher lives; None where that cannot be told from here.

    It ran on another host, in another container, or before a reboot.
    """
    holder = launcher_of(rundir)
    if holder is None:
        return False
    here = _identity(os.getpid())
    if any(getattr(holder, name) != getattr(here, name) for name in _PLACE):
        return None
    start_time = _start_time(holder.pid)
    return start_time in (_UNKNOWN, holder.start_time)


def state(rundir: RunDir, view: RunView) -> str:
    """finished, failed, preempted, interrupted, running, starting, or dead.

    Dead: the launcher is gone and has not said how the run ended. A run that was never launched,
    such as one that waits in a queue, is starting.
    """
    if view.status in ENDED or _holds(rundir):
        return view.status
    if view.launched_at is None and not rundir.launcher_file.exists():
        return view.status
    now = follow(rundir, ranks=())  # it may have ended since `view` was taken
    return now.status if now.status in ENDED else "dead"


def has_trained(rundir: RunDir) -> bool:
    """Whether the run has made a step."""
    for path, rank, _ in event_files(rundir, ranks={0}):
        if rank is not None:
            with contextlib.suppress(OSError), path.open("rb") as lines:
                if any(b'"kind":"step"' in line for line in lines):
                    return True
    return False


def find(
    name: str | None, *, root: Path = RUNS, counts: Callable[[RunDir], bool] = has_trained
) -> RunDir:
    """The run called `name`; with None the newest that `counts`, starts just now, or is queued."""
    if name is not None:
        return RunDir.find(name, root=root)
    known = RunDir.all(root)[::-1]
    if not known:
        raise UsageError(f"no runs under {root.absolute()}", HOW_TO_START)
    return next((r for r in known if _holds(r) or counts(r) or _is_queued(r)), known[0])


def _is_queued(rundir: RunDir) -> bool:
    """Whether it is a job that was neither started nor cancelled by `colotrain stop`."""
    over = rundir.launcher_events.exists() or rundir.cancel_file.exists()
    return rundir.job_file.exists() and not over


def _holds(rundir: RunDir) -> bool:
    """Whether a launcher seems to live; elsewhere, whether the run has written lately."""
    alive = is_alive(rundir)
    return _silence_s(rundir) <= SILENT_S if alive is None else alive


def _silence_s(rundir: RunDir) -> float:
    """Seconds since the run last wrote an event or was claimed."""
    files = [path for path, _, _ in event_files(rundir)] + [rundir.launcher_file]
    written = [when for path in files if (when := _modified_at(path)) is not None]
    return time.time() - max(written, default=float("-inf"))


def _modified_at(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def launcher_of(rundir: RunDir) -> Launcher | None:
    """Who the identity file names; None where there is none that can be read."""
    try:
        return from_plain(Launcher, json.loads(rundir.launcher_file.read_text("utf-8")))
    except (OSError, ValueError, RecursionError, ConfigError):
        return None


def _identity(pid: int) -> Launcher:
    return Launcher(
        host=socket.gethostname(),
        boot_id=_boot_id(),
        pid_namespace=_pid_namespace(),
        pid=pid,
        start_time=_start_time(pid) or _UNKNOWN,
        job=os.environ.get("SLURM_JOB_ID", ""),
    )


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:  # not Linux
        return ""


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux
        return ""


def _start_time(pid: int) -> str | None:
    """When process `pid` began, or None where it is gone, or a zombie.

    Clock ticks since boot: wall-clock times shift when the clock is set.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return _UNKNOWN if _exists(pid) else None
    after_name = stat.rpartition(")")[2].split()  # the name may hold spaces and brackets
    return None if after_name[0] in "ZX" else after_name[19]


def _exists(pid: int) -> bool:
    """Whether there is such a process, where /proc is missing (macOS) or hides other users'."""
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # it is another user's
        return True
    return True


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a lock on `folder`; without one where it cannot be locked (some network filesystems)."""
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
