"""What a run shows: a live line on a terminal, plain greppable lines everywhere else."""

from __future__ import annotations

import io
import math
import mmap
import re
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from colotrain.engine.model.probes import matmul_peak_flops, memory_now
from colotrain.events.event import Event
from colotrain.events.fold import Fold, fold
from colotrain.events.kinds import Step
from colotrain.events.view import summary
from colotrain.rundir import RunDir
from colotrain.show import progress as module
from colotrain.show.live import progress_for
from colotrain.show.progress import (
    PlainProgress,
    preparation,
    print_summary,
    step_line,
    summary_rows,
)
from colotrain.spec.plan import RunPlan
from colotrain.spec.quantities import short_duration, short_size
from tests.unit.events.test_view import MIB, launcher, plan_of, restarted_run, step, worker

EVIL = "\x1b[31mred\x1b[0m\r\nsecond line [bold]markup[/bold] :smile: \udcff"


@pytest.fixture(autouse=True)
def _outside_of_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CI", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


def terminal(width: int = 100) -> Console:
    return Console(record=True, force_terminal=True, file=io.StringIO(), width=width)


def pipe() -> Console:
    return Console(file=io.StringIO())


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def show(console: Console, events: Sequence[Event], plan: RunPlan) -> str:
    """What the console got when the events came one after the other."""
    live = Fold()
    with progress_for(console, plan, RunDir("runs/none")) as shown:
        for event in events:
            shown.update(live.add([event]).view(), [event])
    return written(console)


def run_events() -> list[Event]:
    return sorted((e for file in restarted_run() for e in file), key=lambda event: event.t)


def test_plain_output_has_a_line_per_log_interval_and_for_the_last_step() -> None:
    lines = show(pipe(), [step(n) for n in range(1, 13)], plan_of(max_steps=12)).splitlines()
    assert [line.split()[0] for line in lines] == ["step=5/12", "step=10/12", "step=12/12"]


def test_the_fields_of_a_plain_line() -> None:
    events = [worker("eval", 1.0, step=3, loss=3.3), *(step(n, t=8.0 * n) for n in range(4, 11))]
    text = show(pipe(), [*events, step(10, rank=1, peak=512 * MIB)], plan_of(max_steps=20))
    assert text.splitlines()[-1] == (
        "step=10/20 loss=0.1000 val=3.3000 tokens_per_s=100 eta=1m20s mem=100MiB lr=1.0e-03"
    )


def test_several_steps_in_one_update_are_shown_with_their_own_values() -> None:
    console, events = pipe(), [step(n) for n in range(1, 11)]
    events.insert(7, worker("eval", 107.5, step=7, loss=9.0))
    with progress_for(console, plan_of(max_steps=20), RunDir("runs/none")) as shown:
        shown.update(fold(events), events)
    first, event, second = written(console).splitlines()
    assert first.startswith("step=5/20 loss=0.2000 val=- ")
    assert event == "event=eval step=7 loss=9"
    assert second.startswith("step=10/20 loss=0.1000 val=9.0000 ")


def test_a_log_interval_of_zero_shows_events_only() -> None:
    events = [worker("checkpoint", 1.0, step=2, seconds=0.25, path="/a b"), step(1), step(2)]
    text = show(pipe(), events, plan_of(max_steps=2, log_every=0))
    assert text == 'event=checkpoint step=2 seconds=0.25 path="/a b"\n'


def test_by_itself_plain_output_has_a_line_every_ten_seconds_the_first_and_the_last_step() -> None:
    steps = [step(n, t=0.3 * n) for n in range(1, 101)]
    lines = show(pipe(), steps, plan_of(max_steps=100, log_every="auto")).splitlines()
    assert [line.split()[0] for line in lines] == [f"step={n}/100" for n in (1, 35, 69, 100)]


def test_the_older_a_run_the_rarer_its_lines() -> None:
    console, steps = pipe(), [step(n, t=5.0 * n) for n in range(1, 2001)]
    plan = plan_of(max_steps=3000, log_every="auto")
    with progress_for(console, plan, RunDir("runs/none")) as shown:
        shown.update(fold(steps), steps)
    lines = written(console).splitlines()
    numbers = [int(line.removeprefix("step=").partition("/")[0]) for line in lines]
    assert numbers[:3] == [1, 3, 5]
    assert numbers[-1] - numbers[-2] == 12


@pytest.mark.parametrize("end", ["stopped", "done"])
def test_the_last_step_of_a_run_that_ends_early_has_a_line(end: str) -> None:
    events = [*(step(n, t=0.3 * n) for n in range(1, 8)), worker(end, 3.0, step=7)]
    lines = show(pipe(), events, plan_of(max_steps=20, log_every="auto")).splitlines()
    assert [line.split()[0] for line in lines] == ["step=1/20", "step=7/20", f"event={end}"]


@pytest.mark.parametrize(("log_every", "shown"), [("auto", [2, 12]), (1, [2, 12]), (0, [])])
def test_a_long_step_has_lines_about_its_micro_batches(
    log_every: int | str, shown: list[int]
) -> None:
    events = [progress(n, t=float(n)) for n in range(2, 20, 2)]
    lines = show(pipe(), events, plan_of(max_steps=20, log_every=log_every)).splitlines()
    assert lines == [
        f"event=progress what=step step=1/20 micro_batch={n}/64 done={n / 64:.1%} "
        f"elapsed={n}s eta={short_duration(64.0 - n)}"
        for n in shown
    ]


def progress(micro_batch: int, *, t: float, **fields: Any) -> Event:
    told = {"micro_batch": micro_batch, "micro_batches": 64, "done": micro_batch / 64, "seconds": t}
    return worker("progress", t, **({"step": 1, "what": "step"} | told | fields))


def test_plain_output_says_everything_that_happened() -> None:
    lines = show(pipe(), run_events(), plan_of(max_steps=8)).splitlines()
    assert 'event=restart attempt=1 cause="rank 1 was killed"' in lines
    assert not any(line.startswith("event=failed") for line in lines)  # the restart says why
    assert "event=resumed step=4 path=/c/4" in lines
    assert lines[-1] == "event=done status=finished exit_code=0"


def test_other_ranks_start_without_a_line_of_their_own() -> None:
    events = [worker("started", 1.0 + rank, rank=rank, step=0) for rank in range(3)]
    lines = show(pipe(), events, plan_of()).splitlines()
    assert [line.split()[0] for line in lines] == ["event=started"]


@pytest.mark.parametrize("past", [True, False])
def test_a_cause_is_said_once(past: bool) -> None:
    """At the end by the command's error; of a run that is past, by its last line."""
    events = [worker("failed", 5.0, rank=rank, step=1, error="E (a.py:3)") for rank in (1, 0)]
    events.append(launcher("done", 6.0, status="failed", exit_code=1, cause="E (a.py:3)"))
    console = pipe()
    PlainProgress(console, plan_of(), past=past).update(fold(events), events)
    assert written(console).count("a.py:3") == past


def test_plain_output_never_has_control_characters() -> None:
    events = [
        launcher("launch", 1.0, world_size=2, host=EVIL, pid=1),
        worker("note", 2.0, text=EVIL),
        worker("failed", 3.0, phase=EVIL, step=1, error=EVIL),
        launcher("restart", 4.0, attempt=1, cause=EVIL),
        step(5, loss=math.nan),
        launcher("done", 6.0, status="failed", exit_code=1, cause=EVIL),
    ]
    console, plan = pipe(), plan_of()
    show(console, events, plan)
    with preparation(console) as report:
        report(EVIL, 1, 2)
    view = fold(events)
    print_summary(console, summary(view, plan, RunDir("runs/x")), plan, view=view)
    text = written(console)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", text)
    assert "loss=nan" in text
    assert "[bold]markup[/bold] :smile:" in text
    assert all(re.match(r"(event|step|preparing)=|[a-zA-Z/ ]+: ", s) for s in text.splitlines())


@pytest.mark.parametrize(("name", "value"), [("TERM", "dumb"), ("TERM", "unknown"), ("CI", "true")])
def test_a_terminal_that_cannot_be_redrawn_gets_plain_lines(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    console = terminal()
    assert isinstance(progress_for(console, plan_of(), RunDir("runs/none")), PlainProgress)
    assert "\x1b" not in show(console, run_events(), plan_of(max_steps=8))


def test_preparation_off_a_terminal_is_throttled(monkeypatch: pytest.MonkeyPatch) -> None:
    now, console = [0], pipe()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with preparation(console) as report:
        for now[0] in range(9):  # seconds
            report("tokenizing", now[0], 8)
        report("tokenizing", 8, 8)
        report("waiting for another process", 3, 0)
    assert written(console).splitlines() == [
        "preparing=tokenizing done=0 total=8",
        "preparing=tokenizing done=5 total=8",
        "preparing=tokenizing done=8 total=8",
        'preparing="waiting for another process" done=3 total=-',
    ]


def test_preparation_on_a_terminal_is_a_bar_per_task() -> None:
    console = terminal()
    with preparation(console) as report:
        report("reading", 10, 10)
        report("tokenizing", 5, 10)
        report("[x]", 0, 0)
    text = console.export_text()
    assert "reading" in text
    assert " 50%" in text
    assert "[x]" in text


@pytest.mark.parametrize("console", [terminal(), pipe()])
def test_preparation_that_is_not_needed_shows_nothing(console: Console) -> None:
    with preparation(console):
        pass
    assert written(console) == ""


def finished(console: Console) -> str:
    flops = worker("peak_flops", 100.6, flops_per_s=2e6, what="float32 matmul on cpu")
    plan, view = plan_of(max_steps=8), fold([*run_events(), flops])
    print_summary(console, summary(view, plan, RunDir("runs/tiny")), plan, view=view)
    return written(console)


def test_the_summary_names_the_peak_its_mfu_assumes() -> None:
    lines = dict(line.split(":", 1) for line in finished(pipe()).splitlines())
    values = {name: value.strip() for name, value in lines.items()}
    assert values["MFU"] == (
        "1.5% of a measured peak of 2e-06 TFLOP/s per rank, float32 matmul on cpu"
    )
    assert values["loss"] == "1.0000 → 0.1250"
    assert values["validation loss"] == "2.0000"
    assert values["peak memory"] == "rank 0: 200MiB, rank 1: 201MiB; predicted 1.3KiB (-100.0%)"
    cost = "2 steps lost, 2.5 s to the next step, 20% of the time useful"
    assert values["restarts"] == f"1: {cost} (last: rank 1 was killed)"
    assert values["time to first step"] == "1s"
    assert values["run directory"].endswith("runs/tiny")


def test_a_long_name_of_a_metric_stands_apart_from_its_value() -> None:
    console, plan = pipe(), plan_of(max_steps=8)
    view = fold([*run_events(), worker("eval", 9.0, step=8, loss=2.0, metrics={"accuracy": 0.5})])
    print_summary(console, summary(view, plan, RunDir("runs/tiny")), plan, view=view)
    assert "validation accuracy: 0.5\n" in written(console)


def test_the_summary_on_a_terminal_says_the_same() -> None:
    text = re.sub(r"\x1b\[[0-9;]*m", "", finished(terminal(120)))
    assert "finished" in text
    assert "1.5% of a measured peak" in text


def test_the_summary_of_a_run_that_never_began_says_what_it_lacks() -> None:
    console, plan, view = pipe(), plan_of(), fold([launcher("done", 1, status="failed")])
    print_summary(console, summary(view, plan, RunDir("runs/x")), plan, view=view)
    assert "status:             failed" in written(console)
    assert "no peak was measured" in written(console)


def test_the_peak_memory_of_many_ranks_is_a_range() -> None:
    peaks = [step(1, rank=rank, peak=(100 + rank) * MIB) for rank in range(64)]
    console, plan, view = pipe(), plan_of(), fold(peaks)
    print_summary(console, summary(view, plan, RunDir("runs/x")), plan, view=view)
    assert "100MiB to 163MiB on 64 ranks (most on rank 63)" in written(console)


def test_an_output_without_unicode_gets_what_it_can_show() -> None:
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, encoding="ascii", write_through=True))
    plan, view = plan_of(), fold([step(1), step(2)])
    print_summary(console, summary(view, plan, RunDir("runs/x")), plan, view=view)
    assert b"1.0000 ? 0.5000" in raw.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (math.nan, "-"),
        (-1.0, "0s"),
        (0.44, "0.4s"),
        (9.99, "10s"),
        (59.6, "1m00s"),
        (80, "1m20s"),
        (3725, "1h02m"),
        (90000, "1d01h"),
    ],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert short_duration(seconds) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "-"),
        (100, "100B"),
        (1536, "1.5KiB"),
        (512 * MIB, "512MiB"),
        (10 << 30, "10GiB"),
        (12.7 * 1024**3, "12.7GiB"),
        (1 << 60, "1048576TiB"),
    ],
)
def test_sizes(num_bytes: float, text: str) -> None:
    assert short_size(num_bytes) == text


def test_memory_now_sees_what_is_allocated() -> None:
    resident, peak = memory_now()
    assert 0 < resident <= peak
    with mmap.mmap(-1, 64 * MIB) as block:  # new pages: a tensor's may be resident from before
        block.write(b"1" * (64 * MIB))
        assert memory_now()[0] >= resident + 48 * MIB
    assert memory_now()[1] >= resident + 48 * MIB


def test_memory_is_measured_without_proc_too(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = memory_now()
    monkeypatch.setattr("colotrain.engine.model.probes._from_status", lambda: None)
    resident, peak = memory_now()
    assert resident == pytest.approx(expected, rel=0.2)
    assert peak >= resident


def test_the_matmul_probe_gives_a_rate_and_leaves_random_numbers_alone() -> None:
    state = torch.random.get_rng_state()
    assert matmul_peak_flops(torch.device("cpu"), torch.float32) > 1e8
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_type_the_device_cannot_multiply_has_no_peak() -> None:
    assert matmul_peak_flops(torch.device("cpu"), torch.bool) == 0.0


def test_skipped_steps_are_counted() -> None:
    plan = plan_of(log_every=1)
    events = [step(1), step(2, skipped=True, lr=None), step(3), step(4, skipped=True, lr=None)]
    lines = [step_line(Step.of(event), fold(events), plan).split(" lr=")[1] for event in events]
    assert lines == ["1.0e-03", "- skipped=1", "1.0e-03 skipped=1", "- skipped=2"]
    for seen, expected in ((events, "2 of 4: "), (events[:1], "")):
        view = fold(seen)
        rows = dict(summary_rows(summary(view, plan, RunDir("runs/x")), plan, view))
        assert rows.get("skipped steps", "").startswith(expected)
        assert ("skipped steps" in rows) == bool(expected)


@pytest.mark.parametrize(
    ("source", "per_step", "name"),
    [("corpus", 999, "tokens"), ("target", None, "samples"), ("target", 999, "targets")],
)
def test_speeds_are_named_by_what_they_are_of(source: Any, per_step: int | None, name: str) -> None:
    """A vision model has no tokens, and losses of its runs are not per token."""
    plan = plan_of(log_every=1)
    plan = replace(plan, data=replace(plan.data, source=source))
    view = replace(fold([step(1)]), tokens_per_step=per_step)
    line = step_line(Step.of(step(1)), view, plan)
    assert f" {name}_per_s=100 " in line
    document = summary(view, plan, RunDir("runs/x"))
    assert f"{name}/s" in dict(summary_rows(document, plan, view))
