"""`colotrain plan --measure`: measure this machine's speed with as many ranks as the plan has."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from colotrain.addresses import LOOPBACK
from colotrain.dotted import new_python
from colotrain.errors import ColotrainError, ConfigError, UsageError
from colotrain.launch.server.forkserver import environment
from colotrain.planner import rates
from colotrain.planner.time import amounts_of
from colotrain.records import from_plain, to_plain
from colotrain.runs.resolving import ResolvedConfig, resolve_config
from colotrain.show.console import stderr_console

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LIMIT_S = 300.0
"""Seconds after which the ranks are killed."""


def measure(resolved: ResolvedConfig) -> rates.Measurement:
    """Measure this machine as the plan would use it and save the result; takes 20 seconds."""
    plan = resolved.plan
    if plan.cluster.device != "cpu" or resolved.config["hardware"]["name"]:
        raise UsageError(
            f"--measure: the plan is for {plan.cluster.device}, and only CPUs are measured",
            "leave it out: GPUs are planned for with the published figures of hardware=NAME",
        )
    ranks, precision = plan.cluster.procs_per_node, plan.train.precision
    threads = plan.cluster.threads_per_rank
    cores = resolved.context.machine.cores_used(ranks)
    task = _task(ranks, threads, precision)
    with tempfile.TemporaryDirectory(prefix="colotrain-measure-") as folder:
        file = Path(folder, "task.json")
        file.write_text(json.dumps(task), "utf-8")
        found = _run(file, ranks)
    rates.remember(found, cores=cores, ranks=ranks, precision=precision)
    return found


def _task(ranks: int, threads: int, precision: str) -> dict[str, object]:
    """Return `planner.traced.measuring.Task` as plain data."""
    cases = []
    for index in range(len(rates.SHAPES)):
        case = resolve_config(rates.overrides(index, ranks=ranks, precision=precision), here=False)
        plan, layout = case.plan, case.context.layout(case.plan.plugin)
        recompute = plan.train.activation_checkpointing
        trace = case.context.stage.traces(recompute, plan.batch.micro_batch)
        assert trace is not None, "colotrain's own models can be followed"
        amounts = amounts_of(layout, case.survey, trace)
        cases.append({"plan": to_plain(plan), "amounts": amounts})
    with socket.create_server((LOOPBACK, 0)) as server:
        port = server.getsockname()[1]
    guess = rates.guess(threads=threads, precision=precision)
    common = {"port": port, "ranks": ranks, "threads": threads}
    return {**common, "precision": precision, "cases": cases, "guess": guess}


def _run(file: Path, ranks: int) -> rates.Measurement:
    command = [*new_python(), "-m", "colotrain.planner.traced.measuring", str(file)]
    with tempfile.TemporaryFile("w+") as errors:
        processes = [
            subprocess.Popen(
                [*command, str(rank)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                stderr=errors,
                text=True,
                env={**os.environ, **environment()},
            )
            for rank in range(ranks)
        ]
        limit = threading.Timer(LIMIT_S, _end, [processes])  # ends ranks that hang
        limit.start()
        try:
            answer = _follow(processes[0])
            for process in processes:
                process.wait()
        finally:
            limit.cancel()
            _end(processes)
        if answer is None:
            errors.seek(0)
            last = [line.strip() for line in errors if line.strip()]
            raise ColotrainError(
                f"--measure: {last[-1] if last else 'a rank ended without an answer'}",
                "see `colotrain doctor`; without --measure, times are of typical cores",
            )
        return answer


def _end(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.kill()
        process.wait()


def _follow(process: subprocess.Popen[str]) -> rates.Measurement | None:
    """Show the first rank's progress; return its answer, or None if it gave none."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    assert process.stdout is not None
    console = stderr_console()
    columns = (TextColumn("measuring this machine"), BarColumn(), TimeElapsedColumn())
    answer = None
    with Progress(*columns, console=console, transient=True) as progress:
        shown = progress.add_task("", total=None)
        for line in process.stdout:
            if line.startswith("{"):
                answer = _read(line)
            else:
                _advance(progress, shown, line.split())
    return answer


def _read(line: str) -> rates.Measurement | None:
    try:
        return from_plain(rates.Measurement, json.loads(line))
    except (ValueError, ConfigError):
        return None


def _advance(progress: Progress, shown: TaskID, words: Sequence[str]) -> None:
    if len(words) == 3 and words[0].isdigit() and words[2].isdigit():
        progress.update(shown, completed=int(words[0]), total=int(words[2]))
