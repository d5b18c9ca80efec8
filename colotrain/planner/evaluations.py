"""Number of validation samples, which `train.eval_steps=all` and `checkpoint.best` depend on."""

from __future__ import annotations

import sys

from colotrain.config.schema import Config, StopEarly
from colotrain.errors import ConfigError
from colotrain.planner.model_surveys import ModelSurveys
from colotrain.spec.batch import endless_evaluation, no_best
from colotrain.spec.plan import DataPlan, StopEarlyPlan


def num_validation(settings: Config, data: DataPlan, *, surveys: ModelSurveys) -> int | None:
    """Return the number of validation samples; None if nothing needs it or it is not known yet.

    Raises `ConfigError` for all samples of a stream, and where a best checkpoint or the end of the
    run depends on evaluations and there are none.
    The data is prepared only where these are likely, because no share of it is kept for validation.
    """
    train = settings.train
    key, metric = "checkpoint.best.metric", settings.checkpoint.best.metric
    if metric is None:
        key, metric = "train.stop_early.metric", train.stop_early.metric
    if not train.eval_steps or (train.eval_steps != "all" and metric is None):
        return None
    fraction = data.validation_fraction
    found = surveys.count_validation(data, train.seed, prepare=metric is not None and fraction == 0)
    if found == sys.maxsize and train.eval_steps == "all":
        raise ConfigError([endless_evaluation()])
    if found == 0 and metric is not None:
        raise ConfigError([no_best(key, metric, fraction, own_dataset=data.source == "target")])
    return found


def stop_early_plan(rule: StopEarly) -> StopEarlyPlan | None:
    """Return the rule by which the run ends early; None: it makes all of its steps."""
    if rule.metric is None:
        return None
    return StopEarlyPlan(
        metric=rule.metric, mode=rule.mode, patience=rule.patience, min_delta=rule.min_delta
    )
