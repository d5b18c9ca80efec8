"""Looks, letter by letter: what commands show at 80 and 120 columns, as files in golden/frames.

After a change that is meant, `make frames` writes them anew: read the difference before you commit.
Digits are 9 in the files (but for zero1 to zero3), so that a frame holds the places and widths of
numbers, not their values.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from colotrain.cli.inspect_grads import print_table
from colotrain.cli.main import guarded
from colotrain.events.fold import fold, follow
from colotrain.events.log import EventReader
from colotrain.events.view import summary
from colotrain.planner.machine import Machine
from colotrain.rundir import RunDir
from colotrain.show.console import stdout_console
from colotrain.show.dashboard import KEYS
from colotrain.show.live import LASTING
from colotrain.show.progress import message_of, print_summary
from colotrain.spec.axes import MeshPlan
from colotrain.spec.plan import Prediction
from tests.running import SMALL, Colotrain
from tests.unit.generated import gradients, parameters, rich_run, staged_run
from tests.unit.show.test_dashboard import PLAN, _outside_of_ci, picture, rundir

__all__ = ["PLAN", "_outside_of_ci", "rundir"]

FRAMES = Path(__file__).parents[1] / "golden" / "frames"
GIB = 1 << 30
MACHINE = Machine(
    device="cpu",
    num_devices=0,
    num_cores=2,
    host_memory_bytes=24 * GIB,
    device_memory_bytes=0,
    host_free_bytes=20 * GIB,
)


def compare(name: str, text: str) -> None:
    """With the file, or make it so where UPDATE_FRAMES is set."""
    file = FRAMES / f"{name}.txt"
    masked = re.sub(
        r"(?<!zero)\d", "9", "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
    )
    if os.environ.get("UPDATE_FRAMES"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(masked, "utf-8")
    assert masked == file.read_text("utf-8"), f"{file} differs: `make frames`, and read why"


@pytest.fixture(params=[80, 120])
def columns(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """A terminal of so many columns that knows no colours."""

    def console(file: object) -> Console:
        return Console(
            file=sys.stdout if file is sys.stdout else sys.stderr,
            force_terminal=True,
            color_system=None,
            width=request.param,
            highlight=False,
            markup=False,
            emoji=False,
        )

    monkeypatch.setattr("colotrain.show.console._console", console)
    monkeypatch.setenv("COLUMNS", str(request.param))  # --help is not drawn by ours
    monkeypatch.setenv("LINES", "24")
    monkeypatch.setattr(sys, "argv", ["colotrain"])
    monkeypatch.setattr(sys.modules["__main__"], "__package__", None, raising=False)
    return int(request.param)


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"]], ids=lambda w: w[0].strip("-"))
def test_help(columns: int, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(words) == 0
    compare(f"{'-'.join(w.strip('-') for w in words)}-{columns}", capsys.readouterr().out)


@pytest.mark.parametrize("more", ["", "--advise"])
def test_a_plan(
    columns: int,
    more: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr("colotrain.planner.machine.this_machine", lambda: MACHINE)
    words = [*SMALL, "plugin=zero2", "cluster.memory=11GiB", "name=small"]
    assert guarded(["plan", *words, *more.split()]) == 0
    compare(f"plan{more.replace('--', '-')}-{columns}", capsys.readouterr().out)


@pytest.mark.parametrize("words", [["dashboard", "tiny", "--once"], ["inspect-grads"], ["runs"]])
def test_a_run(
    columns: int,
    words: list[str],
    rundir: RunDir,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("time.time", lambda: 100_000.0)  # runs have an age
    assert guarded(words) == 0
    text = capsys.readouterr().out.replace(str(rundir.path.parent), "RUNS")
    compare(f"{words[0]}-{columns}", text)


@pytest.mark.parametrize("width", [80, 120])
def test_a_dashboard_without_unicode(width: int, rundir: RunDir) -> None:
    """Its bars, charts and frames in the C locale, as the command itself writes them."""
    locale = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "POSIX"}
    done = subprocess.run(
        [sys.executable, "-m", "colotrain", "dashboard", "tiny", "--once"],
        capture_output=True,
        env={**os.environ, **locale, "COLUMNS": str(width), "LINES": "24"},
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    text = done.stdout.decode("ascii")
    assert "?" not in text
    compare(f"dashboard-posix-{width}", text)


def test_a_run_that_is_followed(columns: int) -> None:
    """The live view of `run`, and what stays on the terminal when it is closed."""
    view, footer = fold(rich_run(), max_steps=80), f"{KEYS}  Ctrl-C save and stop"
    compare(f"run-{columns}", picture(view, width=columns, height=24, footer=footer))


STAGED = replace(
    PLAN, mesh=MeshPlan(pp=2, pp_split=(3, 1)), time=Prediction(step_s=1.0, waits=(0.35, 0.18))
)


def test_the_stages_of_a_run(columns: int) -> None:
    frame = picture(fold(staged_run()), width=columns, height=24, focus="ranks", plan=STAGED)
    assert "wait 40% (planned 35%)" in frame
    compare(f"stages-{columns}", frame)


def test_gradients_say_their_stage(columns: int, capsys: pytest.CaptureFixture[str]) -> None:
    record = fold([parameters(staged=True), gradients(3)]).gradients
    assert record is not None
    assert [row.stages for row in record.parameters[:3]] == [(0, 1), (0,), (0,)]
    print_table(record, record.parameters, None)
    compare(f"inspect-grads-stages-{columns}", capsys.readouterr().out)


def test_the_end_of_a_run(columns: int, rundir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    view, console = follow(rundir), stdout_console()
    for event in EventReader(rundir).drain():
        if event.kind in LASTING and (message := message_of(event)):
            console.print(message, soft_wrap=True)
    print_summary(console, summary(view, PLAN, RunDir("x")) | {"run_dir": "X"}, PLAN, view=view)
    compare(f"run-end-{columns}", capsys.readouterr().out)


def test_the_first_lines_of_a_run(colotrain: Colotrain) -> None:
    """Off a terminal, where no line is cut at any width."""
    result = colotrain("run", *SMALL, "plugin=zero2", "train.max_steps=2", "observe.log_every=1")
    assert result.code == 0, result.err
    lines = [x for x in result.err.splitlines() if not x.startswith("preparing=")]  # once
    first = next(n for n, line in enumerate(lines) if line.startswith("step="))
    text = "\n".join([*lines[: first + 1], *lines[-10:]])
    text = re.sub(r"(host|run directory|path)(=|: +)\S+", r"\1\2X", text)
    compare("run", re.sub(r"[\d.,:+-]*\d[\d.,e+-]*", "9", text))
