"""Trackers get what the events say, and nothing they do can reach the run."""

from __future__ import annotations

import dataclasses
import math
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from colotrain.events.event import Event
from colotrain.rundir import RunDir
from colotrain.show import trackers as module
from colotrain.show.trackers import MADE_BY, Trackers
from colotrain.spec.plan import RunPlan
from tests.unit.events.test_view import launcher, plan_of, step, worker
from tests.unit.generated import gradients, parameters


class Notebook:
    """A tracker that remembers."""

    def __init__(self, plan: RunPlan, rundir: RunDir) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.rewound: list[int] = []
        self.closed = False
        NOTEBOOKS.append(self)

    def log(self, step: int, t: float, values: dict[str, float]) -> None:
        self.logged.append((step, values))

    def rewind(self, step: int, t: float) -> None:
        self.rewound.append(step)

    def close(self) -> None:
        self.closed = True


NOTEBOOKS: list[Notebook] = []


def plan_with(*names: str) -> RunPlan:
    plan = plan_of()
    return dataclasses.replace(plan, observe=dataclasses.replace(plan.observe, trackers=names))


def track(rundir: RunDir, events: Sequence[Event], *names: str) -> list[str]:
    """Feed the trackers and return their warnings."""
    with Trackers(plan_with(*names), rundir) as running:
        notes = running.take(events)
        notes += running.close()
    return [note.fields["text"] for note in notes]


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> list[Notebook]:
    monkeypatch.setitem(MADE_BY, "notebook", Notebook)
    NOTEBOOKS.clear()
    return NOTEBOOKS


EVENTS = [
    launcher("launch", 1.0),
    worker("started", 2.0, step=0),
    parameters(),
    step(1),
    step(1, rank=1),
    worker("eval", 3.0, step=1, loss=2.5),
    gradients(1),
    worker("started", 9.0, attempt=1, step=0),
    step(1, attempt=1, loss=math.nan),
]


def test_a_tracker_gets_what_rank_0_records(tmp_path: Path, notebook: list[Notebook]) -> None:
    assert track(RunDir(tmp_path), EVENTS, "notebook") == []
    (found,) = notebook
    first, evaluation, record, again = found.logged
    assert first[0] == 1
    assert (first[1]["train/loss"], first[1]["speed/tokens_per_s"]) == (1.0, 100.0)
    assert evaluation == (1, {"validation/loss": 2.5})
    assert record[1]["gradient_norm/blocks.0.mlp.weight"] == 3.0
    assert record[1]["update_ratio/blocks.0.mlp.weight"] == pytest.approx(0.03)
    assert not [tag for tag in record[1] if "embed" in tag]  # frozen
    assert math.isnan(again[1]["train/loss"])
    assert (found.rewound, found.closed) == ([0], True)


def test_a_tracker_is_told_samples_of_samples(tmp_path: Path, notebook: list[Notebook]) -> None:
    plan = plan_with("notebook")
    plan = dataclasses.replace(plan, data=dataclasses.replace(plan.data, source="target"))
    with Trackers(plan, RunDir(tmp_path)) as running:
        running.take([step(1, tokens=plan.batch.global_batch)])
        running.close()
    ((_, values),) = notebook[0].logged
    assert values["speed/samples_per_s"] == 100.0
    assert not [tag for tag in values if "token" in tag]


def test_no_tracker_is_no_work(tmp_path: Path) -> None:
    threads = threading.active_count()
    with Trackers(plan_with(), RunDir(tmp_path)) as running:
        assert running.take(EVENTS) == []
        assert threading.active_count() == threads


def test_a_tracker_that_is_not_installed_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notebook: list[Notebook]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    (warning,) = track(RunDir(tmp_path), EVENTS, "wandb", "notebook")
    assert "wandb is not installed" in warning
    assert "pip install 'colotrain[wandb]'" in warning
    assert len(notebook[0].logged) == 4


def test_a_tracker_that_fails_is_left_out_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notebook: list[Notebook]
) -> None:
    class Broken(Notebook):
        def log(self, step: int, t: float, values: dict[str, float]) -> None:
            raise OSError("disk full")

    monkeypatch.setitem(MADE_BY, "broken", Broken)
    (warning,) = track(RunDir(tmp_path), EVENTS, "broken", "notebook")
    assert "broken failed and is left out from here on (disk full)" in warning
    assert len(notebook[1].logged) == 4


def test_a_tracker_that_hangs_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()

    class Stuck(Notebook):
        def log(self, step: int, t: float, values: dict[str, float]) -> None:
            release.wait(60)

    monkeypatch.setitem(MADE_BY, "stuck", Stuck)
    monkeypatch.setattr(module, "CLOSE_S", 0.2)
    monkeypatch.setattr(module, "MOST_WAITING", 3)
    with Trackers(plan_with("stuck"), RunDir(tmp_path)) as running:
        told = [note.fields["text"] for _ in range(20) for note in running.take(EVENTS)]
        told += [note.fields["text"] for note in running.close()]
    release.set()
    assert [text for text in told if "cannot keep up" in text] == [told[0]]
    assert "left behind" in told[1]


def test_wandb_is_used_offline_and_quietly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, Any]] = []
    run = SimpleNamespace(
        log=lambda values: calls.append(("log", values)),
        define_metric=lambda *names, **options: None,
        finish=lambda: calls.append(("finish", None)),
    )

    def init(**options: Any) -> SimpleNamespace:
        calls.append(("init", options))
        return run

    fake = SimpleNamespace(init=init, Settings=lambda **options: options)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    assert track(RunDir(tmp_path), EVENTS, "wandb") == []
    (_, options), *logged, (last, _) = calls
    assert (options["mode"], options["settings"]["silent"]) == ("offline", True)
    assert Path(options["dir"]) == tmp_path / "trackers" / "wandb"
    assert logged[0][1]["step"] == 1
    assert last == "finish"


def test_wandb_is_online_where_the_environment_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    run = SimpleNamespace(
        log=lambda values: None, define_metric=lambda *_, **__: None, finish=lambda: None
    )

    def init(**options: Any) -> SimpleNamespace:
        given.update(options)
        return run

    fake = SimpleNamespace(init=init, Settings=lambda **options: options)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    assert track(RunDir(tmp_path), EVENTS, "wandb") == []
    assert (given["mode"], given["project"]) == ("online", "mine")


class FakeClient:
    """What `MLflow` calls of MLflow's client."""

    made: ClassVar[list[FakeClient]] = []

    def __init__(self, tracking_uri: str) -> None:
        self.uri, self.params, self.metrics, self.over = tracking_uri, {}, [], False
        FakeClient.made.append(self)

    def get_experiment_by_name(self, name: str) -> None:
        return None

    def create_experiment(self, name: str) -> str:
        return name

    def create_run(self, experiment: str, run_name: str) -> SimpleNamespace:
        return SimpleNamespace(info=SimpleNamespace(run_id=f"{experiment}/{run_name}"))

    def log_batch(self, run: str, metrics: Sequence[Any] = (), params: Sequence[Any] = ()) -> None:
        assert len(metrics) + len(params) <= 100
        self.params |= dict(params)
        self.metrics += [(key, value, step) for key, value, _, step in metrics]

    def set_terminated(self, run: str) -> None:
        self.over = run.startswith("colotrain/")


def test_mlflow_gets_settings_and_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entities = SimpleNamespace(Param=lambda *x: x, Metric=lambda *x: x)
    fake = SimpleNamespace(MlflowClient=FakeClient, entities=entities)
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert track(RunDir(tmp_path), EVENTS, "mlflow") == []
    client = FakeClient.made[-1]
    assert client.uri.startswith(f"sqlite:///{tmp_path}")
    assert client.params["plugin.name"] == plan_of().plugin.name
    assert ("train/loss", 1.0, 1) in client.metrics
    assert ("validation/loss", 2.5, 1) in client.metrics
    assert client.over
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    track(RunDir(tmp_path), EVENTS, "mlflow")
    assert FakeClient.made[-1].uri == "http://127.0.0.1:9"


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
@pytest.mark.parametrize("place", ["", "wandb", "mlflow.db"])
def test_nothing_is_written_through_a_link_of_somebody_elses_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, place: str
) -> None:
    places = list[str]()
    fakes = {name: SimpleNamespace() for name in ("tensorboard", "tensorboard.compat")}
    fakes |= {"wandb": SimpleNamespace(init=lambda dir, **_: places.append(dir), Settings=dict)}
    fakes |= {"mlflow": SimpleNamespace(MlflowClient=lambda tracking_uri: places.append(""))}
    fakes["tensorboard.compat.proto"] = SimpleNamespace(event_pb2=None, summary_pb2=None)
    fakes["tensorboard.summary.writer.event_file_writer"] = SimpleNamespace(
        EventFileWriter=places.append
    )
    for module_name, fake in fakes.items():
        monkeypatch.setitem(sys.modules, module_name, fake)
    rundir, elsewhere = RunDir(tmp_path / "run"), tmp_path / "elsewhere"
    elsewhere.mkdir()
    link = rundir.tracker(name) / place
    link.parent.mkdir(parents=True)
    link.symlink_to(elsewhere)
    (warning,) = track(rundir, EVENTS, name)
    assert f"observe.trackers: {name} failed and is left out from here on" in warning
    assert places == []


def test_links_that_wandb_makes_in_its_folder_stay(tmp_path: Path) -> None:
    folder = RunDir(tmp_path).tracker("wandb") / "wandb"
    (folder / "run-1").mkdir(parents=True)
    (folder / "latest-run").symlink_to("run-1")
    assert module.made_folder(RunDir(tmp_path), "wandb") == folder.parent
    os.mkfifo(folder / "run-1" / "log")
    with pytest.raises(OSError, match="run-1/log: is a link to a place outside the run, a FIFO"):
        module.made_folder(RunDir(tmp_path), "wandb")


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = [*EVENTS[:-1], step(1, attempt=1, loss=7.0), step(2, attempt=1, loss=6.0)]
    assert track(RunDir(tmp_path), events, "tensorboard") == []
    found = EventAccumulator(str(tmp_path / "trackers" / "tensorboard")).Reload()
    losses = [(point.step, point.value) for point in found.Scalars("train/loss")]
    assert losses == [(1, 7.0), (2, 6.0)]  # the restart's
    assert "gradient_norm/blocks.0.mlp.weight" in found.Tags()["scalars"]
