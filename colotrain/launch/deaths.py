"""Exits of this machine's workers, read from their processes and logs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from colotrain.launch.causes import OF_A_WAITING_RANK, Death


def gone(processes: Any, group: Any) -> dict[int, Any]:
    """Return rank → result of all workers of this machine if all exited with code 0, else {}.

    torch's agent does not notice such exits: it waits for results, which our workers do not send.
    """
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    ended = _processes(processes)
    if any(process.exitcode != 0 for process in ended):
        return {}
    return {
        worker.global_rank: ProcessFailure(local, process.pid, process.exitcode, error_file="")
        for local, (worker, process) in enumerate(zip(group.workers, ended, strict=False))
    }


def deaths_of(logs: Path, processes: Any, failures: dict[int, Any]) -> list[Death]:
    """Return the exits of this machine's workers, without those that the agent terminated."""
    first_rank = min(rank - failure.local_rank for rank, failure in failures.items())
    ended = _processes(processes)
    codes = {first_rank + local: process.exitcode for local, process in enumerate(ended)}
    codes |= {rank: failure.exitcode for rank, failure in failures.items()}
    deaths = [
        _death(logs, rank, rank - first_rank, code)
        for rank, code in codes.items()
        if code is not None
    ]
    return [death for death in deaths if death.killed_by != "SIGTERM"] or deaths


def _processes(context: Any) -> list[Any]:
    """Return the processes of torch elastic's MultiprocessContext; none before they are started."""
    return [] if context is None or context._pc is None else list(context._pc.processes)


def _death(folder: Path, rank: int, local_rank: int, code: int) -> Death:
    logs = folder.glob(f"*/attempt_*/{local_rank}/stderr.log")
    log = max(logs, key=lambda path: path.stat().st_mtime, default=folder)
    lines = log.read_text("utf-8", "replace").splitlines() if log.is_file() else []
    gave_up = code < 0 and any(mark in text for text in lines for mark in OF_A_WAITING_RANK)
    last = lines[-1] if lines else ""
    return Death(rank=rank, exit_code=code, log=str(log), last_line=last, gave_up=gave_up)
