"""Functions of the user's own, tried before the run: a schedule, a sampler, metrics, a loss."""

from __future__ import annotations

from collections.abc import Iterator

from colotrain.config.schema import Config
from colotrain.errors import ConfigError, Problem
from colotrain.planner.epochs import Steps
from colotrain.planner.model_surveys import ModelSurveys
from colotrain.spec.plan import BatchPlan, DataPlan, ModelPlan
from colotrain.spec.survey import LossStudy, Survey


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


MOST_STUDIED_BYTES = 256 << 20
"""Bytes of parameters up to which a plan runs forwards of the model itself."""


def study_loss(
    settings: Config, model: ModelPlan, data: DataPlan, survey: Survey, surveys: ModelSurveys
) -> LossStudy:
    """What forwards of the model find of its loss; nothing where colotrain's own code sums it.

    Raises `ConfigError` for labels that teach something else than they are meant to. A larger model
    is looked at when its run begins.
    """
    ours = survey.scores_tokens or (model.hf and not survey.other_task)
    of_text = data.source != "target" and (ours or data.masked or data.pairs)
    num_bytes = sum(p.numel * p.itemsize for p in survey.parameters)
    if (of_text and model.loss is None) or (num_bytes > MOST_STUDIED_BYTES and not ours):
        return LossStudy()
    found = surveys.study_loss(model, data, settings.train.seed)
    if found.problem:
        raise ConfigError([Problem(**found.problem)])
    return found


def warn_of_batch_norms(survey: Survey, batch: BatchPlan) -> Iterator[str]:
    """Warning of modules by which the samples of a micro-batch depend on one another."""
    names, size = survey.batch_norms, batch.micro_batch
    if names and batch.global_batch > size:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield (
            f"batch normalization ({names[0]}{more}) sees the samples of one micro-batch on one "
            f"rank, {size}, of the {batch.global_batch} of a step: results depend on "
            "train.micro_batch; GroupNorm and LayerNorm see each sample by itself"
        )
