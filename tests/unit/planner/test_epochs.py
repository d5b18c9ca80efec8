"""Epochs: what is said in passes over the data becomes steps, or is refused."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from colotrain.cli.main import guarded
from colotrain.cli.plan_table import _checkpoints, _evaluations, _rows
from colotrain.config.compose import gather
from colotrain.data.read.loader import SampleOrder
from colotrain.spec.batch import is_due
from colotrain.spec.plan import RunPlan
from tests.unit.known_surveys import resolve
from tests.unit.planner.test_resolve import LAPTOP, lines, survey, with_values

OF_64 = ("train.global_batch", 64)


def counts(samples: int, held: int | None) -> dict[str, Any]:
    """What counts the training samples, and those held for validation."""
    return {
        "samples": lambda data, seed: samples,
        "validation": lambda data, seed, *, prepare: held,
    }


def planned(samples: int, *pairs: tuple[str, Any], held: int | None = None) -> RunPlan:
    config = with_values(OF_64, *pairs)
    return resolve(config, survey=survey, machine=LAPTOP, **counts(samples, held))[0]


def refused(samples: int, *pairs: tuple[str, Any], held: int | None = None) -> list[str]:
    return lines(with_values(OF_64, *pairs), **counts(samples, held))


@pytest.mark.parametrize(
    ("samples", "epochs", "last_batch", "steps"),
    [
        (640, 3, "fill", 30),
        (650, 1, "fill", 11),
        (650, 3, "fill", 31),
        (650, 3, "drop", 30),
        (650, 0.5, "fill", 6),
        (10, 2, "fill", 1),
        (64, 0.01, "fill", 1),
    ],
)
def test_epochs_become_the_steps_that_complete_them(
    samples: int, epochs: float, last_batch: str, steps: int
) -> None:
    plan = planned(samples, ("train.epochs", epochs), ("train.last_batch", last_batch))
    assert (plan.train.max_steps, plan.train.epochs) == (steps, epochs)
    assert plan.train.epoch_steps == (samples // 64 if last_batch == "drop" else samples / 64)


def test_without_epochs_nothing_is_counted() -> None:
    def never(data: object, seed: int) -> int:
        raise AssertionError

    plan, _ = resolve(with_values(OF_64), survey=survey, machine=LAPTOP, samples=never)
    assert (plan.train.max_steps, plan.train.epoch_steps) == (100, 0)


def test_evaluations_saves_and_the_warm_up_are_shares_of_the_run() -> None:
    plan = planned(
        640,
        ("train.epochs", 4),
        ("train.eval_every", "0.25ep"),
        ("checkpoint.every", "1ep"),
        ("optim.schedule.warmup_ratio", 0.1),
    )
    assert (plan.train.eval_every, plan.checkpoint.every, plan.optim.warmup_steps) == (2.5, 10, 4)
    steps = planned(640, ("train.max_steps", 25), ("train.eval_every", "1ep"))
    assert (steps.train.max_steps, steps.train.eval_every) == (25, 10)


def test_a_plan_shows_the_interval_of_checkpoints_in_epochs_where_steps_are_broken() -> None:
    broken = planned(650, ("train.epochs", 4), ("checkpoint.every", "0.25ep"))
    shown = _checkpoints(broken.checkpoint, broken.train)
    assert shown.startswith("every 0.25 epochs (2.539 steps), when asked")
    whole = planned(640, ("train.epochs", 4), ("checkpoint.every", "1ep"))
    assert _checkpoints(whole.checkpoint, whole.train).startswith("every 10 steps, when asked")


def test_a_plan_shows_when_it_evaluates_and_how_long_it_warms_up() -> None:
    plan = planned(640, ("train.max_steps", 40), ("optim.schedule.warmup_steps", 4))
    sent = {"reductions": 0, "gathers": 0, "reduced": "once", "bytes_per_step": 0}
    document = {"communication": sent, "batch": {"unit": "tokens"}, "data": []}
    assert dict(_rows(plan, document))["steps"] == "40; the first 4 are warm-up"
    shown = (
        "before the first step and after the last; at most 8 global batches of validation samples"
    )
    assert dict(_rows(plan, document))["evaluations"] == shown
    changed = (("train.eval_every", "0.25ep"), ("train.eval_steps", "all"))
    broken = planned(640, ("train.epochs", 4), *changed)
    shown = (
        "every 0.25 epochs (2.5 steps), before the first step and after the last; all validation"
    )
    later = ": how many, and so how long, is known once the data is prepared"
    assert _evaluations(broken, document) == f"{shown} samples{later}"
    never = planned(640, ("train.eval_steps", 0))
    assert _evaluations(never, document) == "none (train.eval_steps=0)"
    unsplit = {"validation": {"files": 0}, "validation_share": 0.0}
    shown = _evaluations(broken, {**document, "data": [unsplit, unsplit]})
    assert shown == "none: the data has no validation samples"


def test_a_plan_shows_how_many_samples_all_are_and_how_long_they_take() -> None:
    counted = planned(640, ("train.eval_steps", "all"), held=1280)
    assert _evaluations(counted, {"data": []}).endswith(
        "; all validation samples: 1,280"
    )  # untimed
    timed = replace(counted, time=replace(counted.time, step_s=3.0))
    assert _evaluations(timed, {"data": []}).endswith("samples: 1,280, predicted to take 20 s")
    nothing = planned(640, ("train.eval_steps", "all"), held=0)
    assert _evaluations(nothing, {"data": []}) == "none: the data has no validation samples"


BEST = ("checkpoint.best.metric", "validation_loss")


def test_a_best_checkpoint_without_validation_samples_is_refused() -> None:
    said = "checkpoint.best.metric=validation_loss: expected null: "
    none = f"{said}there are no validation samples (data.validation_fraction="
    (line,) = refused(640, BEST, ("data.validation_fraction", 0.0), held=0)
    assert line.startswith(f"{none}0, or validation files are empty)")
    (line,) = refused(640, BEST, held=0)  # too few samples for the share
    assert line.startswith(f"{none}0.05, or validation files are empty)")
    (line,) = refused(640, BEST, ("data.validation_path", __file__), held=0)
    assert line.startswith(f"{said}the files of data.validation_path have no sample (")
    assert f"{__file__}); give others, or remove checkpoint.best" in line
    own = ("data", {"target": "a.b:c"})
    (line,) = refused(640, BEST, own, held=0)  # a stream, or a dataset that has splits of its own
    assert "expected null: the dataset of data.target has no validation samples; return" in line
    assert "raise" not in line
    (line,) = refused(640, BEST, ("train.eval_steps", 0), held=0)
    assert "expected null with train.eval_steps=0" in line
    assert planned(640, BEST, held=7).train.num_validation == 7
    assert planned(640, BEST, held=None).train.num_validation is None


def test_data_is_prepared_to_count_validation_samples_only_where_there_may_be_none() -> None:
    asked: list[bool] = []

    def count(data: object, seed: int, *, prepare: bool) -> int:
        asked.append(prepare)
        return 9

    none, whole = ("data.validation_fraction", 0.0), ("train.eval_steps", "all")
    for pairs in ((), (none,), (BEST,), (whole,), (whole, none), (BEST, none)):
        resolve(with_values(OF_64, *pairs), survey=survey, machine=LAPTOP, validation=count)
    assert asked == [False, False, False, True]


def test_all_samples_of_a_stream_are_refused() -> None:
    (line,) = refused(640, ("train.eval_steps", "all"), held=sys.maxsize)
    assert line.startswith("train.eval_steps=all: expected a number: the length of a stream is")
    assert planned(640, BEST, held=sys.maxsize).train.num_validation == sys.maxsize


def test_what_is_every_fraction_of_an_epoch_does_not_drift() -> None:
    for _ in range(200):
        every = Fraction(random.randint(10, 400), random.randint(1, 10))
        if every < 1:
            continue
        due = [step for step in range(1, 400) if is_due(step, float(every))]
        wanted = [-(-n * every // 1) for n in range(1, 400) if n * every <= 399]
        assert due == wanted
    assert not any(is_due(step, 0) for step in range(1, 9))


@pytest.mark.parametrize("count", [64, 65, 127, 640, 1000])
def test_an_epoch_that_drops_its_rest_uses_every_other_sample_once(count: int) -> None:
    order = SampleOrder(count, seed=random.randint(0, 2**40), shuffle=True, whole=64)
    used = count // 64 * 64
    for epoch in range(3):
        found = order.samples_at(range(epoch * used, (epoch + 1) * used))
        assert len(set(found)) == used
        assert set(found) <= set(range(count))
    plain = SampleOrder(count, seed=order.seed, shuffle=True)
    assert order.samples_at(range(used)) == plain.samples_at(range(used))


@pytest.mark.parametrize(
    ("samples", "given", "key", "says"),
    [
        (640, {"train.epochs": 2, "train.max_steps": 9}, "train.epochs=2.0", "one of train.epochs"),
        (640, {"train.epochs": 0}, "train.epochs=0.0", "a number above 0"),
        (640, {"train.eval_every": "often"}, "train.eval_every=often", "as in 0.5ep"),
        (640, {"checkpoint.every": "0ep"}, "checkpoint.every=0ep", "auto, a number of steps"),
        (60, {"train.epochs": 2, "train.last_batch": "drop"}, "train.global_batch", "at most 60"),
        (sys.maxsize, {"train.epochs": 1}, "train.epochs", "the length of a stream is not known"),
        (
            640,
            {"optim.schedule.warmup_ratio": 0.1, "optim.schedule.warmup_steps": 5},
            "optim.schedule.warmup_ratio=0.1",
            "one of warmup_ratio and warmup_steps",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(
    samples: int, given: dict[str, Any], key: str, says: str
) -> None:
    (line,) = refused(samples, *given.items())
    assert line.startswith(key)
    assert says in line


def test_a_mixture_has_no_epochs() -> None:
    mixture = [{"path": "a", "weight": 1}, {"path": "b", "weight": 2}]
    data = {"mixture": mixture, "seq_len": 128}
    for key, value in (("train.epochs", 1), ("train.last_batch", "drop")):
        found = refused(640, ("data", data), (key, value))
        assert any(line.startswith(f"{key}: expected no epochs") for line in found)
    found = refused(640, ("data", data), ("train.eval_steps", "all"))
    assert any(line.startswith("train.eval_steps=all: expected a number with") for line in found)


def test_epochs_that_an_argument_names_take_the_place_of_the_recipes_steps() -> None:
    notices: list[str] = []
    config, problems = gather(["recipe=llm-tiny", "train.epochs=2"], notices=notices)
    assert problems == []
    assert (config["train"]["max_steps"], config["train"]["epochs"]) == (None, 2)
    assert notices == ["train.epochs takes the place of train.max_steps=200"]


STREAM = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, x):
        return self.linear(x).square().mean()


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, split):
        pass

    def __iter__(self):
        while True:
            yield {"x": torch.randn(4)}

    def state_dict(self):
        return {}
"""


@pytest.mark.parametrize("verb", [["plan"], ["submit", "cluster=slurm", "--dry-run"]])
def test_all_samples_of_a_users_stream_are_refused_before_anything_starts(
    verb: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("endless.py").write_text(STREAM)
    named = ("model.target=endless:Model", "data.target=endless:Stream", "train.eval_steps=all")
    assert guarded([*verb, *named, "train.global_batch=8", "cluster.procs_per_node=1"]) == 2
    printed = capsys.readouterr()
    (line,) = [line for line in printed.err.splitlines() if line.startswith("error")]
    said = "error: train.eval_steps=all: expected a number: the length of a stream is not known"
    assert line == f"{said}; for example 8"
    assert (printed.out, Path("runs").exists()) == ("", False)
