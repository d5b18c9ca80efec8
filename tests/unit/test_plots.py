"""`colotrain plot`: what is in the pictures, and what is said where there can be none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from generated import STATUSES, rich_run
from test_runs import new_run
from test_view import write_files

from colotrain.cli.main import guarded
from colotrain.observe.plots import draw, read_curves
from colotrain.rundir import RunDir

pytest.importorskip("matplotlib")


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[RunDir]:
    monkeypatch.chdir(tmp_path)
    found = []
    for name, steps in (("one", 40), ("two", 20)):
        rundir = new_run(tmp_path / "runs", name)
        events = rich_run(num_steps=steps)
        writers = {(event.rank, event.attempt) for event in events}
        write_files(rundir, [[e for e in events if (e.rank, e.attempt) == w] for w in writers])
        found.append(rundir)
    return found


def labels(axes: object) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]  # type: ignore[attr-defined]


def test_a_run_is_drawn_with_every_layer_that_has_a_norm(runs: list[RunDir]) -> None:
    curves = read_curves(runs[0])
    loss, norms, memory, speed = draw([curves]).axes
    (training, validation) = loss.lines
    assert tuple(zip(*training.get_data(), strict=True)) == curves.loss
    assert tuple(zip(*validation.get_data(), strict=True)) == curves.evals
    trained = {"blocks.0"}  # the others are frozen, unused, zero or not finite
    assert set(labels(norms)) == trained
    (layer,) = norms.lines
    assert list(layer.get_xdata()) == list(curves.heat.steps)
    assert layer.get_ydata()[-1] < layer.get_ydata()[0]
    assert list(speed.lines[0].get_xdata()) == [step for step, _ in curves.throughput]
    assert "process: 330MiB" in memory.get_xticklabels()[0].get_text()
    assert len(STATUSES) == 7


def test_several_runs_lie_over_one_another(runs: list[RunDir]) -> None:
    loss, norms, memory, speed = draw([read_curves(rundir) for rundir in runs]).axes
    assert [text for text in labels(loss) if text != "validation"] == ["one", "two"]
    assert labels(norms) == ["one, step 40", "two, step 20"]
    assert labels(speed) == ["one", "two"]
    assert [t.get_text().split("\n")[0] for t in memory.get_xticklabels()] == ["one", "two"]


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_the_picture_is_written(runs: list[RunDir], ending: str) -> None:
    assert guarded(["plot", "one", "two", "--out", f"pictures/a.{ending}"]) == 0
    head = Path(f"pictures/a.{ending}").read_bytes()[:60]
    assert head.startswith(b"\x89PNG" if ending == "png" else b"<?xml")


def test_what_cannot_be_drawn_is_one_line(
    runs: list[RunDir], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert guarded(["plot", "--out", "a.txt"]) == 2
    assert "expected a name that ends in .png" in capsys.readouterr().err
    new_run(runs[0].path.parent, "three")
    assert guarded(["plot", "three"]) == 1
    assert "three: has done no step yet" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert guarded(["plot", "one"]) == 1
    assert "pip install 'colotrain[plot]'" in capsys.readouterr().err
