"""The dashboard: a function of a view to a picture, on any terminal and on none."""

from __future__ import annotations

import io
import json
import math
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from colotrain.cli.main import guarded
from colotrain.events.event import Event
from colotrain.events.fold import Fold, fold
from colotrain.events.gradients import Cell, Heat
from colotrain.events.log import EventReader
from colotrain.events.view import RunView
from colotrain.rundir import RunDir
from colotrain.show.charts import SYMBOLS, bar, chart, heat_lines, spark, stacked
from colotrain.show.dashboard import render
from colotrain.show.frame import FOCI, Focus, FrameState, stragglers, worst_parameters
from colotrain.show.live import LiveDashboard, Screen, progress_for, replay
from colotrain.show.progress import PlainProgress
from colotrain.show.worker_output import last_lines
from colotrain.spec.plan import RunPlan
from tests.unit.events.test_view import MIB, launcher, plan_of, step, view_of, worker, write_files
from tests.unit.generated import gradients, parameters, rich_run

CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")
EVIL = "\x1b[31mred\x1b[0m\r\nsecond [bold]line[/bold] \udcff"
PLAN = plan_of(max_steps=80, world_size=4)


@pytest.fixture(autouse=True)
def _outside_of_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CI", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS", "LINES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def at_last_event(view: RunView, plan: RunPlan) -> FrameState:
    """The run as of its last event, a function of the view alone."""
    return FrameState(view=view, plan=plan, now=view.last_event_at or 0.0, state=view.status)


def picture(
    view: RunView,
    *,
    width: int,
    height: int,
    focus: Focus = "overview",
    footer: str = "",
    plan: RunPlan = PLAN,
    **changes: Any,
) -> str:
    """The frame as text."""
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None)
    frame = replace(at_last_event(view, plan), **changes)
    rendered = render(frame, width=width, height=height, focus=focus, footer=footer)
    console.print(rendered)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


SIZES = [(80, 24), (80, 50), (100, 30), (140, 40), (200, 50), (60, 30)]


@pytest.mark.parametrize(("width", "height"), SIZES)
@pytest.mark.parametrize("focus", FOCI)
@pytest.mark.parametrize("events", [[], rich_run()], ids=["empty", "full"])
def test_a_frame_has_exactly_the_size_that_is_there(
    width: int, height: int, focus: Focus, events: Sequence[Event]
) -> None:
    text = picture(fold(events), width=width, height=height, focus=focus, footer="keys")
    lines = text.splitlines()
    assert len(lines) == height
    assert max(map(len, lines)) <= width
    assert not CONTROL.search(text)


def test_the_narrow_overview_has_what_matters_most() -> None:
    text = picture(fold(rich_run(), max_steps=80), width=80, height=24)
    for part in (
        "tiny  zero2, 4 ranks on cpu  running",
        "step 40/80  elapsed 41s  ETA 40s",
        "train 0.0250  ◆ validation 0.0275",
        "100 tokens/s",
        "MFU 1.5% of 1e-06 TFLOP/s per rank",
        "predicted 1.3KiB of 1GiB",
        "peak 330MiB",
        "checkpoint of step 20, 20s ago",
        "1: rank 1 was killed by SIGKILL",
        "frozen",
    ):
        assert part in text, part


def test_the_wide_overview_has_every_pane() -> None:
    text = picture(fold(rich_run(), max_steps=80), width=200, height=50, output=("0 stdout: hi",))
    for part in (
        "checkpoint of step 20, 20s ago, took 0.4s; 20 steps since",
        "(fp32 matmul)",
        "d data 5%",
        "c compute 60%",
        "w wait 10%",
        "o optimizer 5%",
        "b between 20%",
        "rank 2 holds the others up",
        "1.9× the median",
        "step 40: norm 2.5, clipped to 1",
        "blocks.1.attention.weight",
        "its norm",
        "f frozen  u unused  0 zero  ! not finite",
        "0 stdout: hi",
        "predicted 1.3KiB of 1GiB optimizer 640B parameters 400B",
    ):
        assert part in text, part


@pytest.mark.parametrize("width", [80, 200])
def test_heat_tells_states_apart_without_colour(width: int) -> None:
    text = picture(fold(rich_run()), width=width, height=40, focus="gradients")
    rows = {line.split()[1]: line.split()[2] for line in text.splitlines() if "blocks." in line}
    assert set(rows["blocks.1"]) == {SYMBOLS["nonfinite"]}
    assert set(rows["blocks.2"]) == {SYMBOLS["zero"]}
    assert set(rows["blocks.0"]) <= set("▁▂▃▄▅▆▇█")
    assert re.search(r"embed +f+ ", text)
    assert re.search(r"head +u+ ", text)
    assert "no path from the loss" in text


def test_heat_of_more_layers_and_records_than_there_is_room_for() -> None:
    bad = Cell(status="nonfinite", norm=None)
    good = Cell(status="trained", norm=1.0)
    cells = [tuple(bad if (i, n) == (70, 350) else good for i in range(100)) for n in range(400)]
    layers = tuple(f"blocks.{i}" for i in range(100))
    lines = heat_lines(
        Heat(layers=layers, steps=tuple(range(400)), cells=tuple(cells)), width=60, height=9
    )
    assert len(lines) == 9
    assert max(len(line) for line in lines) <= 60
    assert sum(line.plain.count("!") for line in lines) == 1  # it is not averaged away


def test_a_chart_is_logarithmic_where_it_can_be() -> None:
    halving = [(n, 2.0**-n) for n in range(8)]
    tops = [line.plain.count("█") for line in chart(halving, width=16, height=8, log=True)]
    assert tops == sorted(tops)
    assert tops[-1] - tops[0] >= 6  # a straight slope
    assert chart([(1, 1.0), (2, -1.0)], width=16, height=3, log=True)[0].plain.startswith("      1")


def test_a_chart_marks_validation_at_its_step_and_value() -> None:
    falling = [(n, 10.0 - n) for n in range(10)]
    lines = [line.plain for line in chart(falling, [(9, 9.0), (0, 1.0)], width=18, height=5)]
    assert lines[0].endswith("◆")
    assert lines[-1][8] == "◆"


def test_a_loss_that_is_not_finite_is_a_sign_of_its_own() -> None:
    lines = [line.plain for line in chart([(1, 1.0), (2, math.nan), (3, 2.0)], width=11, height=2)]
    assert lines[-1][9] == "!"
    assert chart([(1, math.nan)], width=20, height=2)[0].plain == "nothing yet"
    assert spark([(1, math.nan)], width=9).plain == ""


def test_the_parts_of_a_bar_fill_it() -> None:
    assert stacked([("a", 1.0), ("b", 1.0), ("c", 2.0)], width=8).plain == "aabbcccc"
    assert stacked([], width=8).plain == ""


def frame(view: RunView, *, now: float, state: str = "running") -> FrameState:
    return FrameState(view=view, plan=PLAN, now=now, state=state)


def test_stragglers_are_named_with_the_reason() -> None:
    events = [step(n, rank=r, t=100.0 + n) for n in range(1, 10) for r in range(4)]
    events += [step(n, rank=4, t=100.0 + n) for n in range(1, 5)]
    slow = [step(n, rank=5, t=100.0 + n, compute_s=2.0) for n in range(1, 10)]
    found = {rank.rank: why for rank, why in stragglers(frame(fold(events + slow), now=110.0))}
    assert found == {4: "5 steps behind", 5: "4.2× the median"}
    late = {rank.rank: why for rank, why in stragglers(frame(fold(events), now=155.0))}
    assert late[4] == "silent for 51s"
    assert stragglers(frame(fold(events[:1]), now=0.0)) == []


def test_waiting_for_others_does_not_make_a_straggler() -> None:
    ranks = [step(n, rank=r, step_s=1.0, compute_s=0.5) for n in (1, 2, 3) for r in range(4)]
    waits = [step(n, rank=4, step_s=9.0, compute_s=0.5) for n in (1, 2, 3)]
    assert stragglers(frame(fold(ranks + waits), now=104.0)) == []


def test_parameters_to_look_at_begin_with_those_that_are_not_finite() -> None:
    found = worst_parameters(view_of(parameters(), gradients(10)))
    assert next(row.name for row, _ in found) == "blocks.1.attention.weight"
    assert {row.name for row, _ in found[:4]} >= {"blocks.1.mlp.weight"}
    assert "embed.weight" not in {row.name for row, _ in found}  # frozen, as wanted


def test_many_ranks_are_summed_up() -> None:
    events = [step(1, rank=rank, peak=(100 + rank) * MIB) for rank in range(500)]
    text = picture(fold(events), width=100, height=30, focus="ranks")
    assert "more ranks: 100MiB to" in text
    assert "(500 ranks, median 500ms)" in text
    assert re.search(r"^│ +499 ", text, re.MULTILINE)


def test_where_numbers_stopped_being_finite_is_said() -> None:
    where = {"module": "blocks.1.mlp", "step": 5, "rank": 1, "micro_batch": 3, "phase": "backward"}
    event = Event(kind="nonfinite", t=9.0, rank=0, attempt=0, fields=where)
    text = picture(view_of(event), width=120, height=36)
    assert "blocks.1.mlp in backward of step 5, rank 1" in text


def test_a_run_that_has_ended_shows_its_end_and_no_eta() -> None:
    done = launcher("done", 200.0, status="failed", exit_code=1, cause="rank 0 was killed")
    text = picture(fold([*rich_run(), done], max_steps=80), width=120, height=36, now=9e9)
    assert "failed: rank 0 was killed" in text
    assert "elapsed 1m41s" in text
    assert "ETA" not in text
    dead = picture(fold(rich_run()), width=120, height=36, now=9e9, state="dead")
    assert "cpu  dead" in dead


def test_a_frame_of_a_view_alone_is_always_the_same() -> None:
    frames = {picture(fold(rich_run()), width=120, height=36) for _ in range(3)}
    assert len(frames) == 1


def test_what_workers_say_cannot_steer_the_terminal() -> None:
    events = [
        *rich_run(),
        worker("failed", 1.0, phase=EVIL, step=1, error=EVIL),
        launcher("restart", 2.0, cause=EVIL),
        worker("parameters", 3.0, names=[EVIL], shapes=[], dtypes=[], aliases={}),
        gradients(41, status=["trained"], norm=[1.0]),
        launcher("done", 6.0, status="failed", exit_code=1, cause=EVIL),
    ]
    for focus in FOCI:
        text = picture(fold(events), width=120, height=36, focus=focus)
        assert not CONTROL.search(text)


@pytest.mark.parametrize("variable", [None, "NO_COLOR"])
def test_no_color_means_none(monkeypatch: pytest.MonkeyPatch, variable: str | None) -> None:
    if variable:
        monkeypatch.setenv(variable, "1")
    console = Console(file=io.StringIO(), force_terminal=True, width=100, height=30)
    console.print(render(at_last_event(fold(rich_run()), PLAN), width=100, height=30))
    assert isinstance(console.file, io.StringIO)
    assert bool(re.search(r"\x1b\[[0-9;]*38;", console.file.getvalue())) == (variable is None)


def test_an_output_without_unicode_gets_ascii() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii", errors="strict", write_through=True)
    Console(file=stream, width=100, height=30).print(
        render(at_last_event(fold(rich_run()), PLAN), width=100, height=30)
    )
    assert b"blocks.0" in raw.getvalue()


@pytest.fixture
def rundir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run under ./runs that has ended."""
    monkeypatch.chdir(tmp_path)
    run = RunDir(tmp_path / "runs" / "tiny")
    run.create()
    run.write_plan(PLAN)
    done = launcher("done", 200.0, status="finished", exit_code=0, cause="")
    ranks = sorted({event.rank for event in rich_run() if event.rank is not None})
    events = [*rich_run(), done]
    write_files(run, [[e for e in events if e.rank == rank] for rank in (None, *ranks)])
    return run


def test_once_prints_one_frame_without_control_characters(
    rundir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    log = rundir.logs / "20260101-000000" / "x" / "attempt_0" / "1" / "stderr.log"
    log.parent.mkdir(parents=True)
    log.write_text("first\nlast \x1b[31mwords\n")
    assert guarded(["dashboard", "tiny", "--once"]) == 0
    text = capsys.readouterr().out
    assert not CONTROL.search(text)
    assert "finished" in text
    assert "1 stderr: last [31mwords" in text
    assert len(text.splitlines()) == 40


def test_without_a_terminal_a_run_that_has_ended_is_one_frame(
    rundir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    assert guarded(["dashboard"]) == 0
    assert "finished" in capsys.readouterr().out


def test_the_document_is_the_view(rundir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(["dashboard", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["run"], document["state"], document["steps"]) == ("tiny", "finished", 40)
    assert document["ranks"][2]["busy_s"] == pytest.approx(0.65)
    assert document["gradients"]["parameters"][3]["status"] == "nonfinite"


def test_pictures_are_exported_in_colour_whatever_the_terminal(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    assert guarded(["dashboard", "--svg", "a.svg", "--html", "a.html"]) == 0
    svg, html = Path("a.svg").read_text(), Path("a.html").read_text()
    assert svg.startswith("<svg")
    for text in (svg, html):
        assert "#56b4e9" in text.lower()
        assert "blocks.0" in text
    assert capsys.readouterr().out == ""


def test_a_picture_that_cannot_be_written_is_a_usage_error(
    rundir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    assert guarded(["dashboard", "--svg", "missing/a.svg"]) == 2
    assert "missing/a.svg" in capsys.readouterr().err


def test_a_view_can_be_chosen(rundir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(["dashboard", "--once", "--view", "ranks"]) == 0
    text = capsys.readouterr().out
    assert "rank 2 holds the others up" in text
    assert "layer × time" not in text
    assert guarded(["dashboard", "--once", "--view", "rank"]) == 2
    assert "did you mean ranks?" in capsys.readouterr().err


@pytest.mark.parametrize(
    "beside", [["--json", "--svg", "a.svg"], ["--json", "--replay"], ["--replay", "--html", "a"]]
)
def test_what_shows_a_run_in_two_ways_is_refused(
    rundir: RunDir, capsys: pytest.CaptureFixture[str], beside: list[str]
) -> None:
    assert guarded(["dashboard", *beside]) == 2
    captured = capsys.readouterr()
    assert "cannot be had beside --" in captured.err
    assert captured.out == ""


def test_replay_off_a_terminal_is_the_lines_of_the_run(
    rundir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    assert guarded(["dashboard", "--replay"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("step=5/80 loss=0.2000") for line in lines)
    assert lines[-1] == "event=done status=finished exit_code=0"


def test_replay_hands_over_every_event_once_and_in_time() -> None:
    events, seen, times = sorted(rich_run(), key=lambda e: e.t), [], []

    def show(view: RunView, fresh: Sequence[Event], now: float) -> bool:
        seen.extend(fresh)
        times.append(now)
        assert all(event.t <= now for event in fresh)
        return False

    replay(PLAN, events, show, num_frames=7)
    assert seen == events
    assert len(times) == 7
    assert times == sorted(times)


def test_the_last_lines_are_of_the_newest_launch(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for launch, text in (("20250101-000000", "old"), ("20260101-000000", "x" * 9000 + "\nnew")):
        log = run.logs / launch / "a" / "attempt_0" / "0" / "stdout.log"
        log.parent.mkdir(parents=True)
        log.write_text(text)
    assert last_lines(run) == ("0 stdout: new",)
    assert last_lines(RunDir(tmp_path / "none")) == ()


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=100, height=30)


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("end", [None, KeyboardInterrupt, RuntimeError])
def test_the_terminal_is_given_back_however_it_ends(
    tmp_path: Path, end: type[BaseException] | None
) -> None:
    console = terminal()
    before = signal.getsignal(signal.SIGTERM)
    try:
        with progress_for(console, PLAN, RunDir(tmp_path)) as shown:
            assert isinstance(shown, LiveDashboard)
            shown.update(fold(rich_run()), [])
            if end is not None:
                raise end
    except (KeyboardInterrupt, RuntimeError):
        pass
    text = written(console)
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert text.rindex("\x1b[?1049l") > text.rindex("\x1b[?1049h")
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_long_step_is_followed_in_the_header() -> None:
    told = {"micro_batch": 3, "micro_batches": 64, "done": 0.04, "seconds": 60.0}
    events = [worker("progress", 100.0, step=1, what="step", **told)]
    text = picture(fold(events), width=140, height=40, now=160.0, state="running")
    assert "step 1: micro-batch 3/64, 4%, 23m00s left" in text


def test_what_happened_stays_on_the_terminal_afterwards(tmp_path: Path) -> None:
    console = terminal()
    with progress_for(console, PLAN, RunDir(tmp_path)) as shown:
        shown.update(RunView(), [launcher("restart", 1.0, cause=f"rank 1 {EVIL}")])
        print("a library's warning \x1b[2J", file=sys.stderr)
    after = written(console).rpartition("\x1b[?1049l")[2]
    assert "restart: rank 1 [31mred [0m second [bold]line[/bold]" in after.replace("\x1b[33m", "")
    assert "a library's warning [2J" in after


def test_a_stop_gives_the_terminal_back_at_once(tmp_path: Path) -> None:
    run, console = RunDir(tmp_path), terminal()
    run.create()
    with progress_for(console, PLAN, run) as shown:
        shown.update(RunView(), [])
        run.stop_file.touch()
        shown.update(RunView(), [])
        assert "\x1b[?1049l" in written(console)
        shown.update(RunView(), [launcher("note", 1.0, text="SIGINT: stopping")])
        shown.update(RunView(), [worker("checkpoint", 1.0, step=3, seconds=0.1)])
    after = written(console).rpartition("\x1b[?1049l")[2]
    assert "SIGINT: stopping" in after
    assert "step 3: checkpoint saved" in after


def test_a_signal_that_the_launch_handles_gives_the_terminal_back_first(tmp_path: Path) -> None:
    console, seen = terminal(), []

    def ask(number: int, _: object) -> None:
        seen.append("\x1b[?1049l" in written(console))

    before = signal.signal(signal.SIGINT, ask)
    try:
        with progress_for(console, PLAN, RunDir(tmp_path)) as shown:
            shown.update(RunView(), [])
            signal.raise_signal(signal.SIGINT)
            shown.update(RunView(), [launcher("note", 1.0, text="SIGINT: stopping")])
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [True]
    assert written(console).count("\x1b[?1049l") == 1
    assert "SIGINT: stopping" in written(console)


def test_keys_choose_the_view_and_q_is_told(tmp_path: Path) -> None:
    screen = Screen(terminal(), PLAN, RunDir(tmp_path), footer="")
    assert (screen.press("2"), screen.focus) == (False, "gradients")
    assert (screen.press("\t"), screen.focus) == (False, "ranks")
    assert (screen.press("\t\t"), screen.focus) == (False, "overview")
    assert screen.press("x\x1b[Aq")


def test_a_dumb_terminal_gets_lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(progress_for(terminal(), PLAN, RunDir(tmp_path)), PlainProgress)


def heed_signals() -> None:
    """As from a person's shell, also where the tests run in the background or under nohup."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def on_a_terminal(arguments: list[str], cwd: Path) -> tuple[subprocess.Popen[bytes], int]:
    """colotrain with a pseudo-terminal of its own; its other end."""
    outer, inner = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color"}
    process = subprocess.Popen(
        [sys.executable, "-m", "colotrain", *arguments],
        stdin=inner,
        stdout=inner,
        stderr=inner,
        cwd=cwd,
        env=environment,
        start_new_session=True,
        preexec_fn=heed_signals,
    )
    os.close(inner)
    return process, outer


def read_until(outer: int, mark: bytes, *, timeout_s: float = 30.0) -> bytes:
    deadline, text = time.monotonic() + timeout_s, b""
    while mark not in text and time.monotonic() < deadline:
        if select.select([outer], [], [], 0.1)[0]:
            try:
                text += os.read(outer, 1 << 16)
            except OSError:  # the other end is closed
                break
    return text


@pytest.mark.parametrize(
    ("ending", "code"),
    [("q", 0), (signal.SIGTERM, -15), (signal.SIGHUP, -1), (signal.SIGINT, 130)],
)
def test_an_attached_dashboard_leaves_the_terminal_as_it_was(
    rundir: RunDir, ending: str | signal.Signals, code: int
) -> None:
    process, outer = on_a_terminal(["dashboard", "tiny"], rundir.path.parents[1])
    try:
        text = read_until(outer, b"layer")
        assert b"\x1b[?1049h" in text
        if isinstance(ending, str):
            os.write(outer, ending.encode())
        else:
            process.send_signal(ending)
        text = read_until(outer, b"\x1b[?1049l")
        assert b"\x1b[?25h" in text
        assert process.wait(timeout=30) == code
    finally:
        process.kill()
        os.close(outer)


def test_an_outline_folds_to_the_same_picture_of_the_end(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.create()
    events = rich_run(num_steps=300)
    write_files(run, [[e for e in events if e.rank == rank] for rank in (None, 0, 1, 2, 3)])
    whole = Fold(max_steps=300).add(EventReader(run).drain()).view()
    outline = Fold(max_steps=300).add(EventReader(run, outline=True).drain()).view()
    assert outline.loss == whole.loss
    assert (outline.peak_by_rank, outline.rss_by_rank) == (whole.peak_by_rank, whole.rss_by_rank)
    assert [rank.step for rank in outline.ranks] == [300] * 4
    for ours, theirs in zip(outline.ranks, whole.ranks, strict=True):
        assert ours.busy_s == pytest.approx(theirs.busy_s)


def test_memory_is_shown_by_category_with_the_sizes_of_the_fullest_rank() -> None:
    sizes = {"parameters": 40, "gradients": 40, "optimizer": 80, "baseline": 50, "activations": 90}
    told = [
        worker("memory", 100.7, rank=rank, **{k: v * MIB * (rank + 1) for k, v in sizes.items()})
        for rank in (0, 1)
    ]
    view = fold([*rich_run(num_ranks=2), *told])
    text = picture(view, width=120, height=60, focus="ranks")
    assert "measured (rank 1) step 180MiB optimizer 160MiB torch 100MiB" in text


def test_on_a_gpu_the_mark_is_where_the_peaks_are_compared_with_the_plan() -> None:
    """The allocator's peak has no CUDA context, and what the host holds is no part of it."""
    memory = replace(PLAN.memory, parameters=300 * MIB, optimizer=0, baseline=800 * MIB)
    plan = replace(PLAN, memory=memory, cluster=replace(PLAN.cluster, device="cuda"))
    text = picture(fold(rich_run()), width=120, height=60, focus="ranks", plan=plan)
    assert "predicted 300MiB of" in text
    assert "torch" not in text.partition("predicted")[2].partition("\n")[0]
    assert ", host " in text
    assert ", now " not in text


def test_numbers_at_the_end_of_their_range_are_drawn() -> None:
    far = [(0, 1e308), (1, -1e308), (2, 1.0), (3, math.inf)]
    assert len(chart(far, width=20, height=4)) >= 4
    assert len(spark(far, width=4)) == 4
    assert bar(-1e308, of=1e-3, width=8).plain.count("█") == 0
