"""`colotrain logs`: print the output of a run's workers, detached launcher and job."""

from __future__ import annotations

import math
import os
import subprocess
import time

from colotrain.errors import UsageError, printable
from colotrain.events.fold import follow
from colotrain.events.liveness import Launcher, find, is_running, launcher_of, state
from colotrain.events.view import ENDED, LIVE
from colotrain.rundir import RUNS, RunDir
from colotrain.schedulers import commands
from colotrain.schedulers.registry import job_logs, recall, scheduler_of_job
from colotrain.show.console import print_json, tell
from colotrain.show.logs import LAUNCHERS, READ_BYTES, Lines, sources

POLL_S = 0.5
LOG_S = 60.0
"""Seconds in which a scheduler has to give a job's output."""
LAST_LINES_S = 30.0
"""Seconds to wait after a run's end for its launcher's last lines: trackers may take 20 s."""


def _has_logs(rundir: RunDir) -> bool:
    return rundir.launcher_log.exists() or any(rundir.events.glob("rank*"))


def logs(
    run: str | None,
    *,
    follows: bool = False,
    rank: int | None = None,
    lines: int = 40,
    as_json: bool = False,
) -> int:
    """Print the last lines of every log; with `follows`, continue until the run has ended."""
    rundir = find(run, root=RUNS, counts=_has_logs)
    job = recall(rundir)
    if job is not None and not _has_logs(rundir):
        words = scheduler_of_job(job).commands.log_command(job, lines=lines, follow=follows)
        if words is not None:
            return _print_of(rundir, words, follows=follows, rank=rank, as_json=as_json)
    logs_of_job = job_logs(rundir)
    found = {s.name: Lines(s) for s in sources(rundir, job_logs=logs_of_job, rank=rank)}
    last = [line for reader in found.values() for line in reader.last(lines)]
    if as_json:
        rows = [{"from": name, "file": str(r.source.path)} for name, r in found.items()]
        print_json({"run": rundir.name, "logs": rows, "lines": last})
        return 0
    for line in last:
        print(line)
    if not found and not follows:
        tell(f"{rundir.name}: nothing was printed yet")
    launcher, deadline = launcher_of(rundir), math.inf
    while follows:
        launcher = launcher_of(rundir) or launcher
        now = state(rundir, follow(rundir, ranks={0}))
        if now in ENDED and not LAUNCHERS.isdisjoint(found) and _may_print(rundir, launcher):
            deadline = min(deadline, time.monotonic() + LAST_LINES_S)
            is_over = time.monotonic() > deadline
        else:
            deadline, is_over = math.inf, now not in LIVE
        if is_over:
            time.sleep(POLL_S)  # what the launcher printed last may not be in the file yet
        for source in sources(rundir, job_logs=job_logs(rundir), rank=rank):
            known = found.get(source.name)
            if known is None or known.source != source:
                found[source.name] = Lines(source)
        for reader in found.values():
            for line in reader.more():
                print(line, flush=True)
        if is_over:
            return 0
        time.sleep(POLL_S)
    return 0


def _print_of(
    rundir: RunDir, words: list[str], *, follows: bool, rank: int | None, as_json: bool
) -> int:
    """Print what a job's nodes print, by the scheduler's command: their files are not here."""
    if rank is not None:
        problem = "--rank: the files of ranks are on the job's nodes"
        raise UsageError(problem, "show what the nodes print, without --rank")
    if follows:
        return _follow(words)
    done = commands.run(words, label=words[0], timeout_s=LOG_S)
    printed = commands.checked(done, what=words[0], fix="`colotrain runs` shows the job's state")
    found = [printable(line) for line in printed.splitlines()]
    if as_json:
        print_json({"run": rundir.name, "logs": [], "lines": found})
        return 0
    for line in found:
        print(line)
    return 0


def _follow(words: list[str]) -> int:
    """Print what a command prints until it ends, line by line."""
    try:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    except FileNotFoundError as error:
        raise UsageError(f"{words[0]}: the command is not here", "install it") from error
    with process:
        assert process.stdout is not None
        try:
            while line := process.stdout.readline(READ_BYTES):
                print(printable(line), flush=True)
        except BaseException:
            process.kill()
            raise
    return int(process.returncode != 0)


def _may_print(rundir: RunDir, launcher: Launcher | None) -> bool:
    """Whether the launcher still exists or, if it is on another host, still has the run."""
    if launcher is None:
        return False
    found = is_running(launcher)
    return launcher_of(rundir) == launcher if found is None else found
