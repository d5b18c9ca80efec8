"""What `colotrain run` shows: a live line on a terminal, greppable lines everywhere else."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table
from rich.text import Text

from colotrain.observe.events import Event
from colotrain.observe.view import ENDED, RunView, follow
from colotrain.plan import RunPlan
from colotrain.rundir import RunDir

REFRESH_PER_SECOND = 4
PREPARATION_LINE_S = 5.0
RANKS_SHOWN = 8

Prepare = Callable[[str, int, int], None]
"""(what, done, total) of a long preparation; a total of 0 is not known."""

# Event kind → the fields its plain line shows. Workers' events are shown of rank 0, failures of
# the first rank that fails in an attempt.
_LINES = {
    "launch": ("world_size", "host", "pid"),
    "started": ("attempt", "world_size", "host", "device", "step"),
    "resumed": ("step", "path"),
    "eval": ("step", "loss"),
    "checkpoint": ("step", "seconds", "path"),
    "restart": ("attempt", "cause"),
    "note": ("text",),
    "failed": ("rank", "attempt", "phase", "step", "error"),
    "stopped": ("step", "reason"),
    "finished": ("step",),
    "done": ("status", "exit_code", "cause"),
}


class ProgressView:
    """Shows a run from `with` to its end; `update` takes the view and the events that are new."""

    def __init__(self, console: Console, plan: RunPlan) -> None:
        self.console, self.plan = console, plan
        self._failed: set[int | None] = set()

    def __enter__(self) -> ProgressView:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, view: RunView, new_events: Sequence[Event]) -> None:
        raise NotImplementedError

    def _is_shown(self, event: Event) -> bool:
        if event.kind == "failed":
            first = event.attempt not in self._failed
            self._failed.add(event.attempt)
            return first
        return event.kind in _LINES and (event.rank in (None, 0) or event.kind == "note")


class PlainProgress(ProgressView):
    """One line per log interval and per event, without control characters."""

    def update(self, view: RunView, new_events: Sequence[Event]) -> None:
        for event in new_events:
            if event.kind == "step" and event.rank == 0 and self._is_due(event.count("step")):
                print_plain(self.console, step_line(event, view, self.plan))
            elif self._is_shown(event):
                print_plain(self.console, event_line(event))

    def _is_due(self, step: int) -> bool:
        every = self.plan.observe.log_every
        return every > 0 and (step % every == 0 or step == self.plan.train.max_steps)


class LiveProgress(ProgressView):
    """A bar with the state of the run below its messages, redrawn in place."""

    def __init__(self, console: Console, plan: RunPlan) -> None:
        super().__init__(console, plan)
        self._view = RunView()
        self._bar = Progress(
            SpinnerColumn("line"),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            console=console,
            expand=True,
        )
        self._task = self._bar.add_task(self._title("starting"), total=plan.train.max_steps)
        self._live = Live(
            console=console,
            get_renderable=self._render,
            refresh_per_second=REFRESH_PER_SECOND,
        )

    def __enter__(self) -> LiveProgress:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def update(self, view: RunView, new_events: Sequence[Event]) -> None:
        self._view = view
        self._bar.update(self._task, completed=view.steps, description=self._title(view.status))
        for event in new_events:
            if self._is_shown(event) and (message := message_of(event)):
                self._live.console.print(message, soft_wrap=True)

    def _title(self, status: str) -> str:
        return f"{self.plan.name}: {status}"

    def _render(self) -> RenderableType:
        return Group(self._bar, Text(status_line(self._view, self.plan), no_wrap=True))


def progress_for(console: Console, plan: RunPlan) -> ProgressView:
    """The live view on a terminal, plain lines elsewhere (no terminal, TERM=dumb, CI)."""
    return (LiveProgress if is_live(console) else PlainProgress)(console, plan)


def is_live(console: Console) -> bool:
    """Whether the console may be redrawn."""
    return console.is_terminal and not console.is_dumb_terminal and not os.environ.get("CI")


@contextlib.contextmanager
def preparation(console: Console) -> Iterator[Prepare]:
    """A callback that shows how far a long preparation is; shows nothing until it is called."""
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
    """Lines at the start, at the end, and every few seconds in between."""
    printed_at: dict[str, float] = {}

    def report(what: str, done: int, total: int) -> None:
        now, finished = time.monotonic(), 0 < total <= done
        if now - printed_at.get(what, -math.inf) < (0 if finished else PREPARATION_LINE_S):
            return
        printed_at[what] = math.inf if finished else now
        print_plain(console, f"preparing={quoted(what)} done={done} total={total or '-'}")

    return report


def step_line(event: Event, view: RunView, plan: RunPlan) -> str:
    """`step=10/300 loss=3.2145 val=- tokens_per_s=12345 eta=1m20s mem=512MiB lr=1.0e-03`."""
    step = event.count("step")
    fields = {
        "step": f"{step}/{plan.train.max_steps}",
        "loss": shown(event.number("loss"), ".4f"),
        "val": shown(_validation_loss(view, step), ".4f"),
        "tokens_per_s": shown(event.number("tokens_per_s"), ".0f"),
        "eta": _eta(view, plan),
        "mem": format_bytes(max(view.peak_by_rank, default=0)),
        "lr": shown(event.number("lr"), ".1e"),
    }
    return " ".join(f"{name}={value}" for name, value in fields.items())


def event_line(event: Event) -> str:
    """`event=checkpoint step=10 seconds=1.2 path=...`."""
    values = {"rank": event.rank, "attempt": event.attempt} | event.fields
    names = [name for name in _LINES[event.kind] if values.get(name) not in (None, "")]
    return " ".join([f"event={event.kind}", *(f"{name}={quoted(values[name])}" for name in names)])


def status_line(view: RunView, plan: RunPlan) -> str:
    """What stands below the bar."""
    loss = view.loss[-1][1] if view.loss else None
    parts = [
        f"loss {shown(loss, '.4f')}",
        f"validation {shown(_validation_loss(view), '.4f')}",
        f"{shown(view.tokens_per_s_smooth, ',.0f')} tokens/s",
        f"ETA {_eta(view, plan)}",
        f"memory {format_bytes(max(view.peak_by_rank, default=0))}",
    ]
    return "  ".join(parts)


def message_of(event: Event) -> Text | None:
    """What is printed above the bar when something happens."""
    step, words = event.count("step"), event.text
    match event.kind:
        case "started":
            line = f"started: {words('world_size')} ranks on {words('device')}, {step} steps done"
        case "resumed":
            line = f"resumed from step {step}: {words('path')}"
        case "eval":
            line = f"step {step}: validation loss {shown(event.number('loss'), '.4f')}"
        case "checkpoint":
            line = f"step {step}: checkpoint saved in {format_duration(event.number('seconds'))}"
        case "restart":
            return Text(clean(f"restart: {words('cause')}"), style="yellow")
        case "failed":
            what = f"{words('phase')} of step {step}: {words('error')}"
            return Text(clean(f"rank {event.rank} failed in {what}"), style="red")
        case "stopped":
            line = f"stopped after step {step}: {words('reason')}"
        case "note":
            line = words("text")
        case _:  # launch, finished, done: the bar and the summary say it
            return None
    return Text(clean(line))


def print_summary(
    console: Console, summary: dict[str, Any], plan: RunPlan, *, view: RunView | None = None
) -> None:
    """The table at the end of a run; `view` saves reading the run directory again."""
    view = view or follow(RunDir(summary["run_dir"]))
    rows = summary_rows(summary, plan, view)
    if not is_live(console):
        for name, value in rows:
            print_plain(console, f"{name + ':':<20}{clean(value)}")
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text(clean(value)))
    console.print(table)


def summary_rows(summary: dict[str, Any], plan: RunPlan, view: RunView) -> list[tuple[str, str]]:
    loss, peaks = summary["loss"], summary["memory"]["peak_by_rank"]
    status = summary["status"] + (f" ({view.cause})" if view.cause else "")
    restarts = str(summary["restarts"])
    if view.restart_causes:
        restarts += f" (last: {view.restart_causes[-1]})"
    return [
        ("status", status),
        ("steps", f"{summary['steps']}/{plan.train.max_steps}"),
        ("loss", f"{shown(loss['first'], '.4f')} → {shown(loss['last'], '.4f')}"),
        ("validation loss", shown(_validation_loss(view), ".4f")),
        ("tokens/s", shown(summary["tokens_per_s"], ",.0f")),
        ("MFU", _mfu(summary["mfu"], view)),
        ("peak memory", _peaks(peaks)),
        ("time to first step", format_duration(summary["time_to_first_step_s"])),
        ("restarts", restarts),
        ("run directory", summary["run_dir"]),
    ]


def _mfu(mfu: Any, view: RunView) -> str:
    """The share of the peak that was reached, and which peak that is."""
    if not view.peak_flops_per_s:
        return "- (no peak was measured)"
    peak = f"{view.peak_flops_per_s / 1e12:.3g} TFLOP/s per rank"
    what = f", {view.peak_flops_what}" if view.peak_flops_what else ""
    return f"{shown(mfu, '.1%')} of a measured peak of {peak}{what}"


def _peaks(peaks: Sequence[int]) -> str:
    if len(peaks) > RANKS_SHOWN:
        highest = max(range(len(peaks)), key=peaks.__getitem__)
        least, most = format_bytes(min(peaks)), format_bytes(peaks[highest])
        return f"{least} to {most} on {len(peaks)} ranks (most on rank {highest})"
    return ", ".join(f"rank {rank}: {format_bytes(peak)}" for rank, peak in enumerate(peaks)) or "-"


def _validation_loss(view: RunView, step: int | None = None) -> float | None:
    """The last validation loss, of `step` or before."""
    known = [loss for at, loss in view.evals if step is None or at <= step]
    return known[-1] if known else None


def _eta(view: RunView, plan: RunPlan) -> str:
    if view.pace_s is None or view.status in ENDED:
        return "-"
    return format_duration(view.pace_s * max(0, plan.train.max_steps - view.steps))


def shown(value: Any, form: str) -> str:
    """A number in the format `form`, `-` where there is none; "nan" and "inf" as they are."""
    if isinstance(value, int | float):
        return format(value, form)
    return "-" if value is None else clean(str(value))


def format_bytes(num_bytes: float) -> str:
    """`512MiB`, `1.5GiB`; `-` for nothing."""
    units = ["TiB", "GiB", "MiB", "KiB", "B"]
    while num_bytes >= 1024 and len(units) > 1:
        num_bytes /= 1024
        units.pop()
    number = f"{num_bytes:.0f}" if num_bytes >= 100 else f"{num_bytes:.1f}".removesuffix(".0")
    return number + units[-1] if num_bytes > 0 else "-"


def format_duration(seconds: float | None) -> str:
    """`0.4s`, `12s`, `1m20s`, `3h05m`, `2d04h`; `-` where it is not known."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if seconds < 9.95:
        return f"{max(seconds, 0):.1f}".removesuffix(".0") + "s"
    minutes, rest_s = divmod(round(seconds), 60)
    hours, rest_minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d{hours % 24:02d}h"
    if hours:
        return f"{hours}h{rest_minutes:02d}m"
    return f"{minutes}m{rest_s:02d}s" if minutes else f"{rest_s}s"


def clean(text: str) -> str:
    """`text` as one line without control characters: causes hold whatever a worker raised."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def quoted(value: Any) -> str:
    """A value of a `name=value` pair, in quotes where it would not be one word."""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = clean(str(value))
    return json.dumps(text, ensure_ascii=False) if set(text) & set(' "=') or not text else text


def print_plain(console: Console, line: str) -> None:
    """One line as it is: never wrapped, styled or interpreted."""
    encoding = console.encoding
    console.out(line.encode(encoding, "replace").decode(encoding), highlight=False)
