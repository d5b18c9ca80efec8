"""Functions of the user's own, tried before the run: a schedule, a sampler, metrics."""

from __future__ import annotations

from colotrain.config.schema import Config
from colotrain.errors import ConfigError, Problem
from colotrain.planner.epochs import Steps
from colotrain.planner.model_surveys import ModelSurveys
from colotrain.spec.plan import DataPlan


def check_own_functions(
    settings: Config, data: DataPlan, steps: Steps, surveys: ModelSurveys
) -> None:
    """Raise `ConfigError` where a function is not there, or returns what cannot be used."""
    train = settings.train
    asked = {
        "data.sampler": data.sampler,
        "data.collate": data.collate,
        "train.metrics": train.metrics,
        "train.on_gradients": train.on_gradients,
    }
    if named := {key: dotted for key, dotted in asked.items() if dotted}:
        surveys.check_functions(data, named, train.seed)
    name = settings.optim.schedule.name
    if ":" in name and (wrong := surveys.check_schedule(name, steps.max_steps)):
        expected = f"a function of (step, total) that returns factors of 0 or more ({wrong})"
        fix = "steps count from 0; correct the function"
        key = "optim.schedule.name"
        raise ConfigError([Problem(key=key, value=name, expected=expected, fix=fix)])
