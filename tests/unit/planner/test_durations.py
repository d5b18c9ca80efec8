"""Steps and evaluations that take minutes or hours are told beforehand, with what shortens them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from colotrain.planner.durations import evaluates_first, evaluation_s, warn_of_durations
from colotrain.spec.plan import Prediction
from colotrain.spec.quantities import format_seconds
from tests.unit.events.test_view import plan_of

PLAN = plan_of()  # an evaluation of one global batch
BATCH = dataclasses.replace(
    PLAN.batch, global_batch=128, micro_batch=2, accumulation_steps=32, data_parallel=2
)


def warnings(step_s: float, **batch: int) -> list[str]:
    changed = dataclasses.replace(BATCH, **batch)
    return list(warn_of_durations(PLAN.train, changed, Prediction(step_s=step_s)))


@pytest.mark.parametrize("step_s", [0.0, 0.3, 59.0])
def test_a_short_step_is_no_news(step_s: float) -> None:
    assert warnings(step_s) == []
    assert evaluates_first(PLAN.train, BATCH, Prediction(step_s=step_s))


def test_a_long_step_says_how_short_it_can_be() -> None:
    assert warnings(640.0) == [
        "a step is predicted to take 10.7 min (32 micro-batches of 20 s); "
        "train.global_batch=2 train.micro_batch=1 makes it 10 s, and shorter samples "
        "(data.seq_len), a smaller model or more ranks shorten it further"
    ]
    [least] = warnings(640.0, global_batch=2, micro_batch=1, accumulation_steps=1)
    assert "train.global_batch" not in least


def test_an_evaluation_of_many_minutes_is_left_out_before_the_first_step() -> None:
    assert not evaluates_first(PLAN.train, BATCH, Prediction(step_s=1000.0))
    _, evaluation = warnings(1000.0)
    assert "an evaluation is predicted to take 5.56 min, and is left out before" in evaluation
    never = dataclasses.replace(PLAN.train, eval_steps=0)
    assert evaluates_first(never, BATCH, Prediction(step_s=1e6))
    everything = dataclasses.replace(PLAN.train, eval_steps="all")  # nobody knows how many
    assert evaluates_first(everything, BATCH, Prediction(step_s=1e6))


@pytest.mark.parametrize(
    ("eval_steps", "num", "seconds"),
    [
        (2, None, 20.0),
        ("all", None, 0.0),
        ("all", 0, 0.0),
        ("all", 128, 10.0),
        ("all", 640, 50.0),
        ("all", 641, 50.3125),  # one more micro-batch of two samples on each of two ranks
        (8, 64, 5.0),  # one pass at most
        (8, 10_000, 80.0),
    ],
)
def test_an_evaluation_takes_a_third_of_as_many_steps_and_one_pass_at_most(
    eval_steps: Any, num: int | None, seconds: float
) -> None:
    train = dataclasses.replace(PLAN.train, eval_steps=eval_steps, num_validation=num)
    assert evaluation_s(train, BATCH, Prediction(step_s=30.0)) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.085, "85 ms"),
        (1.25, "1.25 s"),
        (1181.0, "19.7 min"),
        (37800, "10.5 h"),
        (3996000, "46.2 days"),  # 1.11e+03 h
        (1e8, "1,157 days"),
    ],
)
def test_seconds_are_told_in_the_unit_that_people_use(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
