"""Conversion of epochs to optimizer steps."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from colotrain.config.schema import Config
from colotrain.errors import ConfigError, Problem
from colotrain.planner.model_surveys import ModelSurveys
from colotrain.spec.batch import too_few
from colotrain.spec.plan import DataPlan

DEFAULT_STEPS = 100
IN_EPOCHS = re.compile(r"(\d+(?:\.\d+)?|\.\d+)ep")


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Settings given in epochs or as shares of the run, converted to optimizer steps."""

    max_steps: int
    eval_every: float
    save_every: float
    warmup_steps: int
    per_epoch: float = 0.0
    """Steps per epoch; 0 where no setting is in epochs, so samples were not counted."""


def in_steps(
    settings: Config, data: DataPlan, *, global_batch: int, surveys: ModelSurveys
) -> Steps:
    """Convert settings to steps, counting the training samples if any setting is in epochs.

    An epoch has samples ÷ global batch steps, rounded down where `train.last_batch=drop`. A run
    ends with the step that completes its epochs. Raises `ConfigError` for a stream or too few data.
    """
    train, schedule, save = settings.train, settings.optim.schedule, settings.checkpoint.every
    per_epoch = 0.0
    keys = list(said_in_epochs(settings))
    if keys:
        samples = surveys.count(data, train.seed)
        if samples >= 1 << 62:
            raise ConfigError(
                [_wrong(keys[0], "no epochs: the length of a stream is not known", "use steps")]
            )
        per_epoch = samples / global_batch
        if train.last_batch == "drop":
            per_epoch = float(samples // global_batch)
        if per_epoch == 0:
            raise ConfigError([too_few(samples, global_batch)])
    max_steps = train.max_steps or DEFAULT_STEPS
    if train.epochs is not None:
        max_steps = max(1, math.ceil(round(train.epochs * per_epoch, 6)))
    warmup_steps = schedule.warmup_steps
    if schedule.warmup_ratio is not None:
        warmup_steps = round(schedule.warmup_ratio * max_steps)
    return Steps(
        max_steps=max_steps,
        eval_every=_every(train.eval_every, per_epoch),
        save_every=0 if save == "auto" else _every(save, per_epoch),
        warmup_steps=warmup_steps,
        per_epoch=per_epoch,
    )


def said_in_epochs(settings: Config) -> Iterator[str]:
    """The keys whose values are epochs."""
    if settings.train.epochs is not None:
        yield "train.epochs"
    if isinstance(settings.train.eval_every, str):
        yield "train.eval_every"
    every = settings.checkpoint.every
    if isinstance(every, str) and every != "auto":
        yield "checkpoint.every"


def check_epochs(settings: Config) -> Iterator[Problem]:
    """Problems of epochs that show without the data."""
    train, schedule = settings.train, settings.optim.schedule
    if train.epochs is not None and train.max_steps is not None:
        expected, fix = "one of train.epochs and train.max_steps", "set the other to null"
        yield Problem(key="train.epochs", value=train.epochs, expected=expected, fix=fix)
    if schedule.warmup_ratio is not None and schedule.warmup_steps:
        key, expected = "optim.schedule.warmup_ratio", "one of warmup_ratio and warmup_steps"
        fix = "set optim.schedule.warmup_steps=0"
        yield Problem(key=key, value=schedule.warmup_ratio, expected=expected, fix=fix)
    every = {"train.eval_every": train.eval_every, "checkpoint.every": settings.checkpoint.every}
    for key, value in every.items():
        if not isinstance(value, str) or (key, value) == ("checkpoint.every", "auto"):
            continue
        found = IN_EPOCHS.fullmatch(value)
        if found is None or float(found[1]) == 0:
            also = "auto, " if key == "checkpoint.every" else ""
            expected = f"{also}a number of steps, or of epochs as in 0.5ep"
            yield Problem(key=key, value=value, expected=expected, fix="for example 1ep")
    keys = list(said_in_epochs(settings))
    if train.last_batch == "drop":
        keys.append("train.last_batch")
    if settings.data.mixture and keys:
        expected = "no epochs with data.mixture, whose parts are passed over at different paces"
        yield _wrong(keys[0], expected, "use steps, and train.last_batch=fill")
    if settings.data.mixture and train.eval_steps == "all":
        key, expected = "train.eval_steps", "a number with data.mixture, which keeps its shares"
        yield Problem(key=key, value="all", expected=expected, fix="for example 8")


def _every(value: int | str | None, per_epoch: float) -> float:
    """Interval in steps, at least 1, or 0; an int where it is whole."""
    if not isinstance(value, str):
        return value or 0
    steps = round(float(value.removesuffix("ep")) * per_epoch, 6)
    return int(steps) if steps == int(steps) and steps >= 1 else max(1, steps)


def _wrong(key: str, expected: str, fix: str) -> Problem:
    return Problem(key=key, expected=expected, fix=fix)
