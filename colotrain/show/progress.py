"""Progress of `colotrain run` as greppable lines without a terminal, and its final summary."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from colotrain.events import kinds
from colotrain.events.event import Event
from colotrain.events.fold import eta_s
from colotrain.events.view import ENDED, RunView, StageView, stages, unit
from colotrain.show.formatting import clean, epoch, quoted, shown, shown_loss
from colotrain.show.terminal import is_live
from colotrain.spec.plan import RunPlan, TrainPlan
from colotrain.spec.quantities import short_duration, short_size

REFRESH_PER_SECOND = 4
SHORTEST_LINE_S, LONGEST_LINE_S = 10.0, 60.0
"""Limits of the seconds between two progress lines; the interval grows with the run's age."""
LINE_SHARE = 0.01
"""Interval between progress lines as a share of the run's age."""
PREPARATION_LINE_S = 5.0
RANKS_SHOWN = 8

Prepare = Callable[[str, int, int], None]
"""Callback (what, done, total) of a long preparation; `total` is 0 if unknown."""

# Event kind → fields in its plain line. Workers' events are shown for rank 0 only. A rank's failure
# has no line: the restart's cause or the command's last line reports it.
_LINES = {
    kinds.LaunchStarted.KIND: ("world_size", "host", "pid"),
    kinds.WorkerStarted.KIND: ("attempt", "world_size", "host", "device", "step"),
    kinds.Resumed.KIND: ("step", "path", "in_memory"),
    kinds.MemoryCopied.KIND: ("step", "bytes", "seconds", "every"),
    kinds.Evaluation.KIND: ("step", "loss", "best"),
    kinds.Checkpoint.KIND: ("step", "seconds", "path"),
    kinds.CheckpointFailed.KIND: ("step", "error"),
    kinds.Restart.KIND: ("attempt", "cause"),
    kinds.Note.KIND: ("text",),
    kinds.WorkerStopped.KIND: ("step", "reason"),
    kinds.WorkerFinished.KIND: ("step",),
    kinds.LaunchEnded.KIND: ("status", "exit_code", "cause"),
}


_ENDS = (
    kinds.WorkerStopped.KIND,
    kinds.WorkerFinished.KIND,
    kinds.Restart.KIND,
    kinds.LaunchEnded.KIND,
)
"""Events after which no step follows, or not the next one."""


class ProgressView:
    """Shows a run within a `with` block; `update` takes the view and the new events."""

    def __init__(self, console: Console, plan: RunPlan) -> None:
        self.console, self.plan = console, plan

    def __enter__(self) -> ProgressView:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, view: RunView, new_events: Sequence[Event]) -> None:
        raise NotImplementedError

    def _is_shown(self, event: Event) -> bool:
        return event.kind in _LINES and (event.rank in (None, 0) or event.kind == kinds.Note.KIND)


class PlainProgress(ProgressView):
    """Prints a line per event and progress lines by `observe.log_every`; no control characters."""

    def __init__(self, console: Console, plan: RunPlan, *, past: bool = False) -> None:
        """`past`: the run ended earlier, so its cause must be printed here."""
        super().__init__(console, plan)
        self._past = past
        self._first_at, self._printed_at = math.inf, -math.inf
        self._held: kinds.Step | None = None
        """Newest step without a line yet; it is printed if the run ends with it."""

    def update(self, view: RunView, new_events: Sequence[Event]) -> None:
        for event in new_events:
            if event.kind == kinds.Step.KIND and event.rank == 0:
                self._take_step(kinds.Step.of(event), view)
            elif event.kind == kinds.StepProgress.KIND and event.rank == 0:
                if self.plan.observe.log_every and self._is_time(event.t):
                    print_plain(
                        self.console, progress_line(kinds.StepProgress.of(event), self.plan)
                    )
            elif self._is_shown(event):
                if event.kind in _ENDS and self._held is not None:
                    self._print_step(self._held, view)
                print_plain(self.console, event_line(event, brief=not self._past))

    def _take_step(self, step: kinds.Step, view: RunView) -> None:
        every = self.plan.observe.log_every
        is_last = step.step == self.plan.train.max_steps
        if every == "auto":
            due, self._held = is_last or self._is_time(step.t), step
        else:
            due = every > 0 and (is_last or step.step % every == 0)
        if due:
            self._print_step(step, view)

    def _print_step(self, step: kinds.Step, view: RunView) -> None:
        self._held, self._printed_at = None, step.t
        print_plain(self.console, step_line(step, view, self.plan))

    def _is_time(self, t: float) -> bool:
        """Whether an event at `t` gets a line: the first does, then one per interval."""
        self._first_at = min(t, self._first_at)
        pause_s = min(max(SHORTEST_LINE_S, LINE_SHARE * (t - self._first_at)), LONGEST_LINE_S)
        if t - self._printed_at < pause_s:
            return False
        self._printed_at = t
        return True


def in_foreground(console: Console) -> bool:
    """Whether this process may draw: a background job must leave the terminal alone."""
    try:
        return os.tcgetpgrp(console.file.fileno()) == os.getpgrp()
    except (OSError, ValueError):  # not a terminal of this session
        return True


@contextlib.contextmanager
def preparation(console: Console) -> Iterator[Prepare]:
    """Yield a callback that shows a long preparation's progress; nothing until it is called."""
    if not is_live(console):
        yield _plain_preparation(console)
        return
    bars = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        console=console,
        refresh_per_second=REFRESH_PER_SECOND,
    )
    tasks: dict[str, Any] = {}

    def report(what: str, done: int, total: int) -> None:
        bars.start()
        if what not in tasks:
            tasks[what] = bars.add_task(clean(what))
        bars.update(tasks[what], completed=done, total=total or None)

    try:
        yield report
    finally:
        bars.stop()


def _plain_preparation(console: Console) -> Prepare:
    """Print lines at the start, at the end, and every few seconds in between."""
    printed_at: dict[str, float] = {}

    def report(what: str, done: int, total: int) -> None:
        now, finished = time.monotonic(), 0 < total <= done
        if now - printed_at.get(what, -math.inf) < (0 if finished else PREPARATION_LINE_S):
            return
        printed_at[what] = math.inf if finished else now
        print_plain(console, f"preparing={quoted(what)} done={done} total={total or '-'}")

    return report


def step_line(step: kinds.Step, view: RunView, plan: RunPlan) -> str:
    """Return `step=10/300 loss=3.2145 val=- tokens_per_s=12345 eta=1m20s mem=512MiB lr=1.0e-03`.

    Where steps were skipped, ` skipped=2` follows, their number so far; such a step has no rate.
    """
    num_skipped = sum(skipped <= step.step for skipped in view.skipped_steps)
    fields = {
        "step": f"{step.step}/{plan.train.max_steps}",
        **({"epoch": epoch(step.step, plan.train)} if plan.train.epoch_steps else {}),
        "loss": shown_loss(step.loss),
        "val": shown_loss(_validation_loss(view, step.step)),
        f"{unit(view, plan)}_per_s": shown(step.tokens_per_s, ".0f"),
        "eta": _eta(view, plan),
        "mem": short_size(max(view.peak_by_rank, default=0)),
        "lr": shown(step.lr, ".1e"),
        **({"skipped": num_skipped} if num_skipped else {}),
    }
    return " ".join(f"{name}={value}" for name, value in fields.items())


def progress_line(progress: kinds.StepProgress, plan: RunPlan) -> str:
    """Return `event=progress what=step step=3/300 micro_batch=2/64 done=2.1% ... eta=20m`."""
    fields = {
        "event": progress.KIND,
        "what": quoted(progress.what),
        "step": f"{progress.step}/{plan.train.max_steps}",
        "micro_batch": f"{progress.micro_batch}/{progress.micro_batches}",
        "done": f"{progress.done:.1%}",
        "elapsed": short_duration(progress.seconds),
        "eta": short_duration(progress.eta_s),
    }
    return " ".join(f"{name}={value}" for name, value in fields.items())


def event_line(event: Event, *, brief: bool = False) -> str:
    """Return `event=checkpoint step=10 seconds=1.2 path=...`; `brief`: without the final cause."""
    values = {"rank": event.rank, "attempt": event.attempt} | event.fields
    names = [name for name in _LINES[event.kind] if values.get(name) not in (None, "")]
    if event.kind == kinds.Evaluation.KIND and (metrics := kinds.Evaluation.of(event).metrics):
        values |= {name: shown(value, ".6g") for name, value in metrics.items()}
        names += metrics
    if brief and event.kind == kinds.LaunchEnded.KIND:
        names = [name for name in names if name != "cause"]
    return " ".join([f"event={event.kind}", *(f"{name}={quoted(values[name])}" for name in names)])


def message_of(event: Event) -> Text | None:
    """Return the message for an event; None for events without one."""
    match event.kind:
        case kinds.WorkerStarted.KIND:
            started = kinds.WorkerStarted.of(event)
            line = f"started: {started.world_size} ranks on {started.device}"
            line += f", {started.step} steps done"
        case kinds.Resumed.KIND:
            resumed = kinds.Resumed.of(event)
            where = "the copy in memory" if resumed.in_memory else resumed.path
            line = f"resumed from step {resumed.step}: {where}"
        case kinds.Evaluation.KIND:
            found = kinds.Evaluation.of(event)
            line = f"step {found.step}: validation loss {shown_loss(found.loss)}"
            line += "".join(f", {name} {v:.4g}" for name, v in (found.metrics or {}).items())
        case kinds.Checkpoint.KIND:
            saved = kinds.Checkpoint.of(event)
            line = f"step {saved.step}: checkpoint saved in {short_duration(saved.seconds)}"
        case kinds.CheckpointFailed.KIND:
            failed = kinds.CheckpointFailed.of(event)
            line = f"warning: step {failed.step}: no checkpoint: {failed.error}; training goes on"
            return Text(clean(line), style="yellow")
        case kinds.Restart.KIND:
            return Text(clean(f"restart: {kinds.Restart.of(event).cause}"), style="yellow")
        case kinds.WorkerStopped.KIND:
            stopped = kinds.WorkerStopped.of(event)
            line = f"stopped after step {stopped.step}: {stopped.reason}"
        case kinds.Note.KIND:
            line = kinds.Note.of(event).text
        case _:  # launch, failed, finished, done: the restart's cause or the summary says it
            return None
    return Text(clean(line))


def print_summary(
    console: Console, summary: dict[str, Any], plan: RunPlan, *, view: RunView
) -> None:
    """Print the table at the end of a run."""
    rows = summary_rows(summary, plan, view)
    if not is_live(console):
        for name, value in rows:
            print_plain(console, f"{name + ':':<19} {clean(value)}")
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text(clean(value)))
    console.print(table)


def summary_rows(summary: dict[str, Any], plan: RunPlan, view: RunView) -> list[tuple[str, str]]:
    loss, peaks = summary["loss"], summary["memory"]["peak_by_rank"]
    failed = summary["status"] == "failed"  # the command's last line gives the reason
    status = summary["status"] + (f" ({view.cause})" if view.cause and not failed else "")
    restarts = str(summary["restarts"])
    if view.goodput.recoveries:
        restarts += f": {view.goodput.cost}"
    if view.restart_causes and not failed:
        restarts += f" (last: {view.restart_causes[-1]})"
    return [
        ("status", status),
        ("steps", _steps(summary["steps"], plan.train)),
        *_skipped(view),
        *_rolled_back(view),
        ("loss", f"{shown_loss(loss['first'])} → {shown_loss(loss['last'])}"),
        ("validation loss", shown_loss(_validation_loss(view))),
        *((f"validation {name}", f"{value:.4g}") for name, value in view.metrics.items()),
        (f"{unit(view, plan)}/s", shown(summary["tokens_per_s"] or None, ",.0f")),
        ("MFU", _mfu(summary["mfu"], view)),
        ("peak memory", _peaks(peaks) + _foreseen(summary["memory"])),
        *((f"stage {stage.stage}", describe_stage(stage)) for stage in stages(view, plan)),
        ("time to first step", short_duration(summary["time_to_first_step_s"])),
        ("restarts", restarts),
        ("run directory", summary["run_dir"]),
    ]


def describe_stage(stage: StageView) -> str:
    """Return text like `ranks 2-3, blocks 4-7: waited for 12% of a step, predicted 11%`."""
    waited = "" if stage.wait is None else f"waited for {stage.wait:.0%} of a step, "
    return f"{stage.place}: {waited}predicted {stage.planned_wait:.0%}"


def _steps(steps: int, train: TrainPlan) -> str:
    of_all = f"{steps}/{train.max_steps}"
    return of_all + (f", epoch {epoch(steps, train)}" if train.epoch_steps else "")


def _skipped(view: RunView) -> Iterator[tuple[str, str]]:
    """Yield a row that says how many steps made no update, if any."""
    if view.skipped_steps:
        reason = "loss or gradients were not finite, and the weights did not change"
        yield "skipped steps", f"{len(view.skipped_steps)} of {view.steps}: {reason}"


def _rolled_back(view: RunView) -> Iterator[tuple[str, str]]:
    """Yield a row that says how often training went back to a checkpoint, if ever."""
    if view.rollbacks:
        again = view.goodput.rolled_back
        steps = f"{again} finished step{'s' * (again != 1)} made again"
        yield "rollbacks", f"{len(view.rollbacks)}: {steps}; last: {view.rollbacks[-1].route}"


def _mfu(mfu: Any, view: RunView) -> str:
    """Return the model FLOPs utilization, and the peak that it refers to."""
    if not view.peak_flops_per_s:
        return "- (no peak was measured)"
    peak = f"{view.peak_flops_per_s / 1e12:.3g} TFLOP/s per rank"
    what = f", {view.peak_flops_what}" if view.peak_flops_what else ""
    return f"{shown(mfu, '.1%')} of a measured peak of {peak}{what}"


def _peaks(peaks: Sequence[int]) -> str:
    if len(peaks) > RANKS_SHOWN:
        highest = max(range(len(peaks)), key=peaks.__getitem__)
        least, most = short_size(min(peaks)), short_size(peaks[highest])
        return f"{least} to {most} on {len(peaks)} ranks (most on rank {highest})"
    return ", ".join(f"rank {rank}: {short_size(peak)}" for rank, peak in enumerate(peaks)) or "-"


def _foreseen(memory: dict[str, Any]) -> str:
    """Return the predicted peak memory and its relative error."""
    if memory.get("error") is None:
        return ""
    return f"; predicted {short_size(memory['predicted_peak'])} ({memory['error']:+.1%})"


def _validation_loss(view: RunView, step: int | None = None) -> float | None:
    """Return the last validation loss, up to `step` if given."""
    known = [loss for at, loss in view.evals if step is None or at <= step]
    return known[-1] if known else None


def _eta(view: RunView, plan: RunPlan) -> str:
    if view.status in ENDED:
        return "-"
    steps_to_go = plan.train.max_steps - view.steps
    return short_duration(eta_s(view.pace_s, view.lost_s, view.steps, steps_to_go))


def print_plain(console: Console, line: str) -> None:
    """Print one line unchanged: not wrapped, styled or interpreted."""
    encoding = console.encoding
    console.out(line.encode(encoding, "replace").decode(encoding), highlight=False)
