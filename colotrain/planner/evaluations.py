"""Number of validation samples, which `train.eval_steps=all` and `checkpoint.best` depend on."""

from __future__ import annotations

import sys
from typing import Protocol

from colotrain.config.schema import Config
from colotrain.errors import ConfigError
from colotrain.spec.batch import endless_evaluation, no_best
from colotrain.spec.plan import DataPlan


class CountValidation(Protocol):
    """Counts the validation samples; None if data has to be prepared first, without `prepare`."""

    def __call__(self, data: DataPlan, seed: int, *, prepare: bool) -> int | None: ...


def num_validation(
    settings: Config, data: DataPlan, *, count: CountValidation | None
) -> int | None:
    """Return the number of validation samples; None if nothing needs it or it is not known yet.

    Raises `ConfigError` for all samples of a stream, and for a best checkpoint without evaluations.
    The data is prepared only where these are likely, because no share of it is kept for validation.
    """
    train, metric = settings.train, settings.checkpoint.best.metric
    if count is None or not train.eval_steps or (train.eval_steps != "all" and metric is None):
        return None
    fraction = data.validation_fraction
    found = count(data, train.seed, prepare=metric is not None and fraction == 0)
    if found == sys.maxsize and train.eval_steps == "all":
        raise ConfigError([endless_evaluation()])
    if found == 0 and metric is not None:
        raise ConfigError([no_best(metric, fraction, own_dataset=data.source == "target")])
    return found
