"""A learning-rate schedule of the user's own, tried before the run."""

from __future__ import annotations

from colotrain.config.schema import Config
from colotrain.errors import ConfigError, Problem
from colotrain.planner.epochs import Steps
from colotrain.planner.model_surveys import ModelSurveys


def check_own_schedule(settings: Config, steps: Steps, surveys: ModelSurveys) -> None:
    """Raise `ConfigError` where the function raises, or a factor is negative or not finite."""
    name = settings.optim.schedule.name
    if ":" not in name:
        return
    if wrong := surveys.check_schedule(name, steps.max_steps):
        expected = f"a function of (step, total) that returns factors of 0 or more ({wrong})"
        fix = "steps count from 0; correct the function"
        key = "optim.schedule.name"
        raise ConfigError([Problem(key=key, value=name, expected=expected, fix=fix)])
