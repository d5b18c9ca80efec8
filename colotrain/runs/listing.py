"""`colotrain runs` and `colotrain stop`: list all runs, and stop one of them."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from colotrain.errors import ColotrainError, UsageError
from colotrain.events.fold import Fold, follow
from colotrain.events.liveness import find, is_waiting, launcher_of, state
from colotrain.events.log import EventReader
from colotrain.events.view import ENDED, RunView, overall_tokens_per_s, unit
from colotrain.records import to_plain
from colotrain.rundir import RUNS, RunDir, read_json
from colotrain.runs import naming
from colotrain.schedulers import registry
from colotrain.schedulers.job import OVER, JobState, Submitted
from colotrain.schedulers.registry import has_foreign_job, recall
from colotrain.show.console import print_json, stderr_console, stdout_console, tell
from colotrain.show.formatting import clean, shown, shown_loss
from colotrain.show.progress import print_plain
from colotrain.show.terminal import is_live
from colotrain.spec.plan import RunPlan
from colotrain.spec.quantities import short_duration

FOREIGN_JOB = "its job.json was not written by you on this machine: no scheduler is asked"
STOP_TIMEOUT_S = 120.0
POLL_S = 0.2
REPORT_S = 10.0
WITHOUT_TERMINAL = 1000  # columns, so that each run is one line, however long its name
STYLES = {
    "running": "green",
    "starting": "green",
    "failed": "red",
    "dead": "red",
    "damaged": "red",
    "preempted": "yellow",
    "interrupted": "yellow",
}


def list_runs(*, as_json: bool, root: Path = RUNS, place: str = "") -> int:
    """Print all runs under `root`, newest first; `place`: the store that they were fetched from."""
    rundirs = newest_first(root)
    different = naming.settings_that_differ(rundirs, by_recipe=True)
    rows = [
        replace(row, settings=own) for row, own in zip(rows_of(rundirs), different, strict=True)
    ]
    rows = [replace(row, run_dir=f"{place}/{row.name}") for row in rows] if place else rows
    if as_json:
        print_json(to_plain(rows))
        return 0
    for row in rows:
        if row.problem is not None:
            tell(f"warning: {row.name}: {row.problem}")
    if rows:
        print_table(rows)
    else:
        tell(f"no runs under {place or root.absolute()}")
    return 0


def rows_of(rundirs: list[RunDir]) -> list[Row]:
    """Return the rows of runs, from their folders and from the schedulers of their jobs."""
    rows = [row_of(rundir) for rundir in rundirs]
    for rundir in filter(has_foreign_job, rundirs):
        tell(f"warning: {rundir.name}: {FOREIGN_JOB}")
    jobs = {rundir.name: known for rundir in rundirs if (known := recall(rundir))}
    if not jobs:
        return rows
    answers = registry.ask(jobs.values())
    if answers.trouble:
        tell(f"warning: {answers.trouble}")
    return [
        row if row.name not in jobs else _with_job(row, jobs[row.name], answers.states)
        for row in rows
    ]


ELSEWHERE = {"RUNNING": "running", "COMPLETED": "finished", "FAILED": "failed"}
"""State of a job → state of its run, whose files are on the job's nodes."""


def _with_job(row: Row, known: Submitted, states: dict[str, JobState]) -> Row:
    """Add the job's state to a row; a run whose job ended before it started is "cancelled"."""
    said, job = states.get(known.job), known.job
    if said is None:
        return replace(row, job=job)
    now = "cancelled" if row.state == "starting" and said.state in OVER else row.state
    if row.state == "starting" and registry.scheduler_of_job(known).is_elsewhere:
        now = ELSEWHERE.get(said.state, now)
    return replace(row, state=now, job=job, job_state=said.state, job_reason=said.reason or None)


def newest_first(root: Path) -> list[RunDir]:
    """Return all folders with a run or the remains of one, newest first."""
    try:
        folders = [entry for entry in root.iterdir() if entry.is_dir()]
    except OSError:
        return []
    found = [rundir for folder in folders if _is_run(rundir := RunDir(folder))]
    return sorted(found, key=lambda rundir: (_written_at(rundir), rundir.name), reverse=True)


def row_of(rundir: RunDir) -> Row:
    """Return the row of one run, however damaged it is."""
    age_s = time.time() - _written_at(rundir)
    try:
        return _row(rundir, rundir.plan(), age_s)
    except (ColotrainError, OSError, ValueError) as error:
        return Row(
            name=rundir.name,
            state="damaged",
            age_s=age_s,
            run_dir=str(rundir.path),
            problem=str(error),
        )


def _row(rundir: RunDir, plan: RunPlan, age_s: float) -> Row:
    outline = follow(rundir, ranks=())
    row = Row(
        name=rundir.name,
        state=outline.status,
        plugin=plan.plugin.name,
        world_size=plan.world_size,
        max_steps=plan.train.max_steps,
        age_s=time.time() - outline.launched_at if outline.launched_at else age_s,
        run_dir=str(rundir.path),
    )
    return _from_summary(row, rundir, outline) or _from_events(row, rundir, plan)


def _from_summary(row: Row, rundir: RunDir, outline: RunView) -> Row | None:
    """Return the row of an ended run from its summary alone; None if that may be outdated."""
    if outline.status not in ENDED or outline.ended_at is None:
        return None
    try:
        if rundir.summary_file.stat().st_mtime < outline.ended_at:  # it is from an earlier launch
            return None
        summary = read_json(rundir.summary_file, rundir.open)
        return replace(
            row,
            steps=int(summary["steps"]),
            loss=_number(float, summary["loss"]["last"]),
            validation_loss=_number(float, summary["validation_loss"]),
            tokens_per_s=float(summary["tokens_per_s"]) or None,
            unit=str(summary.get("unit", row.unit)),
            restarts=_number(int, summary.get("restarts")),
            nodes_left=len(summary.get("nodes_left", ())),
            lost_steps=_number(int, summary.get("goodput", {}).get("lost_steps")),
            goodput=_number(float, summary.get("goodput", {}).get("share")),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None


def _number(kind: type[int] | type[float], value: Any) -> Any:
    """Return a number of a summary, which anybody may have written; None where it has none."""
    return None if value is None else kind(value)


def _from_events(row: Row, rundir: RunDir, plan: RunPlan) -> Row:
    view = follow(rundir, ranks={0})
    return replace(
        row,
        state=state(rundir, view),
        world_size=view.world_size or row.world_size,
        steps=view.steps,
        loss=view.loss[-1][1] if view.loss else None,
        validation_loss=view.evals[-1][1] if view.evals else None,
        tokens_per_s=overall_tokens_per_s(view) or None,
        unit=unit(view, plan),
        restarts=view.restarts,
        nodes_left=len(view.nodes_left),
        lost_steps=view.goodput.lost_steps,
        goodput=view.goodput.goodput,
    )


def _is_run(rundir: RunDir) -> bool:
    try:
        is_sweep = rundir.sweep_file.exists()  # whose runs have folders of their own
        return rundir.plan_file.exists() or (rundir.events.is_dir() and not is_sweep)
    except OSError:  # no permission to read it: it is listed as damaged
        return True


def _written_at(rundir: RunDir) -> float:
    for path in (rundir.plan_file, rundir.path):
        try:
            return path.stat().st_mtime
        except OSError:
            continue
    return -math.inf


WITH_COSTS = 110
"""Columns of a terminal with room for what restarts cost."""


def print_table(rows: list[Row]) -> None:
    """Print the table as wide as the terminal; without a terminal, one line per run."""
    console = stdout_console()
    if not is_live(console):
        console.width = WITHOUT_TERMINAL
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("NAME", "STATE", "PLUGIN"):
        table.add_column(title, overflow="fold")
    for title in ("WORLD", "STEP", "LOSS", "VAL", "SPEED", "AGE"):
        table.add_column(title, justify="right", no_wrap=True)
    differ = any(row.settings for row in rows)
    if differ:
        table.add_column("SETTINGS THAT DIFFER", overflow="fold")
    restarted = console.width >= WITH_COSTS and any(row.restarts or row.lost_steps for row in rows)
    for title in ("RESTARTS", "LOST STEPS", "USEFUL") if restarted else ():
        table.add_column(title, justify="right", no_wrap=True)
    has_jobs = any(row.job for row in rows)
    if has_jobs:
        table.add_column("JOB", overflow="fold")
    for row in rows:
        own = [Text(clean(naming.shown(row.settings, most=3)))] if differ else []
        cost = [Text(text) for text in cost_cells(row)] if restarted else []
        table.add_row(*cells(row), *own, *cost, *([Text(clean(job_text(row)))] if has_jobs else []))
    console.print(table)


def speed(per_s: float | None, unit: str) -> str:
    """Return text like `1,234 tokens/s`."""
    return "-" if per_s is None else f"{per_s:,.0f} {unit}/s"


def cells(row: Row) -> list[Text]:
    steps = f"{shown(row.steps, 'd')}/{shown(row.max_steps, 'd')}"
    texts = [
        row.plugin or "-",
        shown(row.world_size, "d"),
        steps if row.max_steps is not None else "-",
        shown_loss(row.loss),
        shown_loss(row.validation_loss),
        speed(row.tokens_per_s, row.unit),
        short_duration(row.age_s),
    ]
    state = Text(row.state, style=STYLES.get(row.state, ""))
    return [Text(clean(row.name)), state, *(Text(text) for text in texts)]


def stop(
    run: str | None,
    *,
    as_json: bool = False,
    root: Path = RUNS,
    timeout_s: float = STOP_TIMEOUT_S,
) -> int:
    """Ask a run to save and stop, and wait until it has; return 1 if it fails or runs on."""
    rundir = find(run, root=root)
    submitted, launcher = recall(rundir), launcher_of(rundir)
    by_hand = launcher is not None and not launcher.job  # as after `resume` of a former job
    if submitted is not None and not by_hand:
        return stop_job(rundir, submitted, as_json=as_json, timeout_s=timeout_s)
    view = follow(rundir, ranks={0})
    now = state(rundir, view)
    waiting = is_waiting(rundir, view)
    if now not in ("starting", "running") or waiting:
        what = "not started yet" if waiting else f"not running ({now})"
        what += f"; {FOREIGN_JOB}" if has_foreign_job(rundir) else ""
        raise UsageError(f"{rundir.name}: {what}", "`colotrain runs` shows which are running")
    ask_to_stop(rundir)
    ended = wait_for_end(rundir, timeout_s=timeout_s)
    if ended is not None:
        rundir.stop_file.unlink(missing_ok=True)
    return tell_end(rundir, ended, as_json=as_json, timeout_s=timeout_s)


def stop_job(rundir: RunDir, submitted: Submitted, *, as_json: bool, timeout_s: float) -> int:
    """Let a job's run save, then cancel the job, so that it is not requeued."""
    job, answers = submitted.job, registry.ask([submitted])
    said = answers.states.get(job)
    if said is None or said.state in OVER:
        what = f"job {job} is over ({said.state})" if said else f"job {job} is not known"
        trouble = f" ({answers.trouble})" if answers.trouble else ""
        raise UsageError(f"{rundir.name}: {what}{trouble}", "`colotrain runs` shows what runs")
    scheduler = registry.scheduler_of_job(submitted)
    if scheduler.is_elsewhere and launcher_of(rundir) is None:
        registry.cancel(submitted)
        if as_json:
            print_json({"run": rundir.name, "state": said.state, "job": job})
        else:
            print(f"{rundir.name}: was {said.state}; job {job} was asked to save, and is gone")
        return 0
    rundir.write(rundir.cancel_file, "")
    ended: str | None = said.state
    if said.state == "RUNNING":
        ask_to_stop(rundir)
        ended = wait_for_end(rundir, timeout_s=timeout_s)
        rundir.stop_file.unlink(missing_ok=True)
    try:
        registry.cancel(submitted)
    except ColotrainError:  # the run has saved, but the job is not known to be over
        tell_end(rundir, ended, as_json=as_json, timeout_s=timeout_s)
        raise
    return tell_end(rundir, ended, job=job, as_json=as_json, timeout_s=timeout_s)


def tell_end(
    rundir: RunDir, ended: str | None, *, job: str | None = None, as_json: bool, timeout_s: float
) -> int:
    """Report how a run that was asked to stop ended.

    `ended` is the run's state, the state of a job that was waiting, or None if the run still
    runs. Returns 1 if it still runs or has failed, else 0.
    """
    view = follow(rundir, ranks={0})
    if as_json:
        saved = view.checkpoint.step if view.checkpoint else None
        what = {"state": ended or state(rundir, view), "steps": view.steps, "saved_step": saved}
        print_json({"run": rundir.name, **what, "job": job})
    elif ended is not None:
        cancelled = f"; job {job} is cancelled" if job else ""
        print(_how_it_ended(rundir, view, ended, is_job=bool(job)) + cancelled)
    if ended is None:
        tell(_still_running(rundir, timeout_s))
    return 1 if ended in (None, "failed", "dead") else 0


def ask_to_stop(rundir: RunDir) -> None:
    rundir.write(rundir.stop_file, json.dumps({"reason": "colotrain stop", "t": time.time()}))


def wait_for_end(rundir: RunDir, *, timeout_s: float) -> str | None:
    """Return the state in which a run ends, or None if it does not end in time."""
    reader, fold = EventReader(rundir, ranks={0}), Fold()
    deadline = time.monotonic() + timeout_s
    with _waiting(rundir.name) as report:
        while True:
            now = state(rundir, fold.add(reader.poll()).view())
            if now not in ("starting", "running"):
                return now
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return None
            if not rundir.stop_file.exists():  # a launch that was just starting deleted it
                ask_to_stop(rundir)
            report(left_s)
            time.sleep(min(POLL_S, left_s))


@contextmanager
def _waiting(name: str) -> Iterator[Callable[[float], None]]:
    """Yield a callback that shows on stderr how long the wait may still take."""
    console = stderr_console()
    what = f"waiting for {clean(name)} to save and stop"
    if is_live(console):
        with console.status(Text(what)) as status:
            yield lambda left_s: status.update(Text(f"{what} ({short_duration(left_s)} left)"))
        return
    printed_at = -math.inf

    def report(left_s: float) -> None:
        nonlocal printed_at
        if time.monotonic() - printed_at >= REPORT_S:
            printed_at = time.monotonic()
            print_plain(console, f"{what} ({short_duration(left_s)} left)")

    yield report


def _how_it_ended(rundir: RunDir, view: RunView, ended: str, *, is_job: bool) -> str:
    if ended.isupper():  # a job's state
        return clean(f"{rundir.name}: was waiting ({ended})")
    saved, goes_on = "; nothing was saved", "starts over"
    if view.checkpoint:
        saved, goes_on = f"; saved at step {view.checkpoint.step}", "continues"
    again = naming.submit_again(rundir) if is_job else f"`colotrain resume {rundir.argument}`"
    hint = "" if ended == "finished" else f"; {again} {goes_on}"
    cause = f" ({view.cause})" if view.cause else ""
    return clean(f"{rundir.name}: {ended}{cause} after step {view.steps}{saved}{hint}")


def _still_running(rundir: RunDir, waited_s: float) -> str:
    """Return advice for a run that does not stop."""
    launcher = launcher_of(rundir)
    where = f": process {launcher.pid} on {launcher.host}" if launcher else ""
    return clean(
        f"error: {rundir.name}: not stopped after {short_duration(waited_s)}; it stops after the "
        f"step it is in: wait for it in `colotrain runs`, or end its launcher{where}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One run in the list; unknown fields are None."""

    name: str
    state: str
    plugin: str | None = None
    world_size: int | None = None
    steps: int | None = None
    max_steps: int | None = None
    loss: float | None = None
    validation_loss: float | None = None
    tokens_per_s: float | None = None
    unit: str = "tokens"
    """Unit of `tokens_per_s`."""
    restarts: int | None = None
    nodes_left: int | None = None
    """Nodes that held the others up, and without which the run went on."""
    lost_steps: int | None = None
    """Finished steps that restarts and rollbacks made again."""
    goodput: float | None = None
    """Share of the time that was spent in steps that count, over all launches."""
    age_s: float | None = None
    """Seconds since the first launch, or since the plan was written."""
    run_dir: str
    problem: str | None = None
    """Why a damaged run cannot be read."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings that differ from those of other runs with the same recipe."""
    job: str | None = None
    """Id of the run's job."""
    job_state: str | None = None
    job_reason: str | None = None


def cost_cells(row: Row) -> list[str]:
    """Return what restarts cost a run."""
    left = f", {row.nodes_left} node{'s' * (row.nodes_left > 1)} left" if row.nodes_left else ""
    restarts = shown(row.restarts, "d") + left
    return [restarts, shown(row.lost_steps, "d"), shown(row.goodput, ".0%")]


def job_text(row: Row) -> str:
    """Return text like `123 PENDING (Resources)`."""
    if row.job is None:
        return "-"
    reason = f" ({row.job_reason})" if row.job_reason else ""
    return f"{row.job} {row.job_state or 'unknown'}{reason}"
