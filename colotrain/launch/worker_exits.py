"""Exits of this machine's workers, read from their processes and logs."""

from __future__ import annotations

import os
from collections.abc import Set
from pathlib import Path
from typing import Any

from colotrain.events.kinds import WorkerExit
from colotrain.lost_peers import NCCL_WATCHDOG_MESSAGES
from colotrain.rundir import regular

READ_BYTES = 1 << 20
"""Bytes at the end of a rank's log that are read."""


def clean_exits(processes: Any, group: Any) -> dict[int, Any]:
    """Return rank → result of all workers of this machine if all exited with code 0, else {}.

    torch's agent does not notice such exits: it waits for results, which our workers do not send.
    """
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    ended = processes_of(processes)
    if any(process.exitcode != 0 for process in ended):
        return {}
    return {
        worker.global_rank: ProcessFailure(local, process.pid, process.exitcode, error_file="")
        for local, (worker, process) in enumerate(zip(group.workers, ended, strict=False))
    }


def worker_exits(
    logs: Path, processes: Any, failures: dict[int, Any], *, ended: Set[int] = frozenset()
) -> list[WorkerExit]:
    """Return the exits of this machine's workers, without those that the agent terminated.

    `ended` are the local ranks that the launcher has killed itself, because of another's end.

    Those that made the agent end the others come first: it kills what does not end in time.
    """
    first_rank = min(rank - failure.local_rank for rank, failure in failures.items())
    codes = {rank: failure.exitcode for rank, failure in failures.items()}
    for local, process in enumerate(processes_of(processes)):
        codes.setdefault(first_rank + local, process.exitcode)
    exits = [
        _exit_of(logs, rank, rank - first_rank, code)
        for rank, code in codes.items()
        if code is not None and rank - first_rank not in ended
    ]
    return [x for x in exits if x.killed_by != "SIGTERM"] or exits


def processes_of(context: Any) -> list[Any]:
    """Return the processes of torch elastic's MultiprocessContext; none before they are started."""
    return [] if context is None or context._pc is None else list(context._pc.processes)


def _end_of(log: Path) -> str:
    """Return the last part of a log, which may be of any size."""
    try:
        with open(log, "rb", opener=regular) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - READ_BYTES))
            return file.read(READ_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def newest_log(folder: Path, local_rank: int) -> Path:
    """Return the log of one of this machine's ranks in its newest attempt; `folder` without any.

    Attempts are numbered: the clock, which files' times follow, may have been set back.
    """
    logs = folder.glob(f"*/attempt_*/{local_rank}/stderr.log")
    return max(logs, key=_attempt_and_time, default=folder)


def _attempt_and_time(log: Path) -> tuple[int, float]:
    number = log.parent.parent.name.removeprefix("attempt_")
    try:
        return int(number) if number.isdecimal() else -1, log.stat().st_mtime
    except OSError:
        return -1, 0.0


def _exit_of(folder: Path, rank: int, local_rank: int, code: int) -> WorkerExit:
    log = newest_log(folder, local_rank)
    lines = _end_of(log).splitlines()
    gave_up = code < 0 and any(mark in text for text in lines for mark in NCCL_WATCHDOG_MESSAGES)
    last = lines[-1] if lines else ""
    return WorkerExit(rank=rank, exit_code=code, log=str(log), last_line=last, gave_up=gave_up)
