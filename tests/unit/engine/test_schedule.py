"""A resume whose schedule has another learning rate says so, and else is silent."""

from __future__ import annotations

from typing import Any

import pytest

from colotrain.engine.optim.schedule import rate_warning
from colotrain.records import to_plain
from colotrain.spec.plan import OptimPlan


def plan(steps: int, **changes: Any) -> Any:
    optim: dict[str, Any] = {
        "name": "adamw",
        "lr": 1e-3,
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "weight_decay": 0.1,
        "schedule": "cosine",
        "warmup_steps": 2,
        "final_ratio": 0.1,
    }
    return Plan(steps, OptimPlan(**(optim | changes)))


class Plan:
    def __init__(self, steps: int, optim: OptimPlan) -> None:
        self.train, self.optim = Steps(steps), optim


class Steps:
    def __init__(self, max_steps: int) -> None:
        self.max_steps = max_steps


def warned(now: Any, then: Any, step: int) -> str | None:
    plain = {"optim": to_plain(then.optim), "train": {"max_steps": then.train.max_steps}}
    return rate_warning(now, plain, step)


def test_a_longer_run_whose_decayed_rate_rises_says_from_where_to_where() -> None:
    told = warned(plan(100), plan(10), 10)
    assert told is not None
    assert told.startswith("was made with train.max_steps=10: the last learning rate was ")
    # 1e-3 * (0.1 + 0.45 * (1 + cos(8 pi/97)))
    assert "was 0.0001, and the next is 0.000985" in told


@pytest.mark.parametrize(
    ("now", "then", "step"),
    [
        (plan(10), plan(10), 5),
        (plan(100), plan(10), 0),  # nothing was trained
        (plan(100), plan(10), 2),  # within the same warm-up
        (plan(11), plan(10), 10),  # the last rate of both
        (plan(100, schedule="constant"), plan(10, schedule="constant"), 10),
        (plan(10, lr=5e-4), plan(10), 5),  # the peak that was asked for
        (plan(100, schedule="wsd", decay_steps=5), plan(50, schedule="wsd", decay_steps=5), 40),
    ],
)
def test_a_rate_that_goes_on_is_no_warning(now: Any, then: Any, step: int) -> None:
    assert warned(now, then, step) is None


def test_every_setting_that_differs_is_named() -> None:
    told = warned(plan(20, schedule="linear", final_ratio=0.0), plan(20), 10)
    assert told is not None
    assert told.startswith(
        "was made with optim.schedule.name=cosine, optim.schedule.min_lr_ratio=0.1:"
    )
