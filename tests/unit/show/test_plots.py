"""`colotrain plot`: what is in the pictures, and what is said where there can be none."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest

from colotrain.cli.main import guarded
from colotrain.events.log import EventWriter
from colotrain.rundir import RunDir
from colotrain.show.plots import draw, read_curves
from tests.unit.events.test_view import MIB, write_files
from tests.unit.generated import STATUSES, rich_run
from tests.unit.runs.test_listing import new_run

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
    loss, norms, _, speed = draw([curves]).axes
    (training, validation) = loss.lines
    assert tuple(zip(*training.get_data(), strict=True)) == curves.loss
    assert tuple(zip(*validation.get_data(), strict=True)) == curves.evals
    trained = {"blocks.0"}  # the others are frozen, unused, zero or not finite
    assert set(labels(norms)) == trained
    (layer,) = norms.lines
    assert list(layer.get_xdata()) == list(curves.heat.steps)
    assert layer.get_ydata()[-1] < layer.get_ydata()[0]
    assert list(speed.lines[0].get_xdata()) == [step for step, _ in curves.throughput]
    assert len(STATUSES) == 7


def test_the_loss_of_tokens_is_in_nats_per_token(runs: list[RunDir]) -> None:
    """That samples are not called tokens is a statement of the tests of `runs`."""
    drawn = draw([read_curves(runs[0])])
    assert drawn.axes[0].get_ylabel() == "nats per token"
    plan = runs[1].plan()
    counted = dataclasses.replace(plan.data, source="target")
    runs[1].write_plan(dataclasses.replace(plan, data=counted))
    others = draw([read_curves(runs[1])]).axes[0].get_ylabel()
    assert others.startswith("loss per ")
    assert "token" not in others


def bars(memory: Any) -> dict[str, list[float]]:
    """Category → the heights of its part of each bar, in MiB."""
    return {found.get_label(): [part.get_height() for part in found] for found in memory.containers}


def test_memory_that_was_measured_stands_beside_what_was_predicted(runs: list[RunDir]) -> None:
    first = runs[0]
    parts = {"parameters": 20 * MIB, "optimizer": 40 * MIB, "activations": 70 * MIB}
    with EventWriter(first.event_file(rank=3, attempt=0)) as writer:  # the rank with 330 MiB
        writer.write_record("memory", step=1, **parts, baseline=200 * MIB)
    with EventWriter(first.event_file(rank=0, attempt=0)) as writer:
        writer.write_record("memory", step=1, parameters=20 * MIB, baseline=280 * MIB)
    curves = [read_curves(rundir) for rundir in runs]
    memory = draw(curves).axes[2]
    found = bars(memory)
    predicted = first.plan().memory.parameters / MIB
    assert found["parameters"] == [predicted, 20, predicted, 0]
    assert found["optimizer"][1] == 40
    assert found["activations"][1] == 70
    assert found["baseline"][1] == 200
    assert found["process"] == [0, 0, 0, 330], "of a run that did not tell the parts"
    told = [label.get_text().split("\n") for label in memory.get_xticklabels()]
    assert [name for name, *_ in told] == ["one", "one", "two", "two"]
    assert [rest for _, *rest in told][1::2] == [["measured", "330MiB"]] * 2


def test_several_runs_lie_over_one_another(runs: list[RunDir]) -> None:
    loss, norms, memory, speed = draw([read_curves(rundir) for rundir in runs]).axes
    assert [text for text in labels(loss) if text != "validation"] == ["one", "two"]
    assert labels(norms) == ["one, step 40", "two, step 20"]
    assert labels(speed) == ["one", "two"]
    assert len(memory.get_xticklabels()) == 4


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_the_picture_is_written(runs: list[RunDir], ending: str) -> None:
    assert guarded(["plot", "one", "two", "--out", f"pictures/a.{ending}"]) == 0
    head = Path(f"pictures/a.{ending}").read_bytes()[:60]
    assert head.startswith(b"\x89PNG" if ending == "png" else b"<?xml")


def test_what_cannot_be_drawn_is_one_line(
    runs: list[RunDir], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert guarded(["plot", "--to", "a.txt"]) == 2
    assert "expected a name that ends in .png" in capsys.readouterr().err
    new_run(runs[0].path.parent, "three")
    assert guarded(["plot", "three"]) == 1
    assert "three (starting): has made no step" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert guarded(["plot", "one"]) == 1
    assert "pip install 'colotrain[plot]'" in capsys.readouterr().err


def test_what_is_too_large_for_ticks_is_a_gap(runs: list[RunDir]) -> None:
    curves = dataclasses.replace(read_curves(runs[0]), loss=((1, 1.0), (2, 1e308), (3, -1e308)))
    figure = draw([curves])
    figure.canvas.draw()
    assert figure.axes[0].lines[0].get_ydata()[0] == 1.0
