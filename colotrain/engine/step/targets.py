"""Targets of a run's loss: how many a step has, and which labels they are."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from colotrain.data.read.loader import BatchLoader, read_batch
from colotrain.data.read.samples import StreamSamples
from colotrain.engine.comms import exchange
from colotrain.engine.model.precision import cast_dtype, cast_inputs
from colotrain.engine.model.unchanged import uncompiled
from colotrain.engine.sharding.sharded_model import reshard
from colotrain.engine.state.run_state import Run
from colotrain.engine.step import loss_trial
from colotrain.engine.step.loss_trial import MOST_SAMPLES
from colotrain.errors import ColotrainError, ConfigError
from colotrain.events.kinds import Note
from colotrain.events.log import EventWriter
from colotrain.models.facts import facts_of
from colotrain.models.objective import inputs_of, is_of_whole
from colotrain.models.outputs import TargetRule
from colotrain.spec.phases import Phase
from colotrain.spec.plan import RunPlan


def agree_on_targets(
    plan: RunPlan,
    model: nn.Module,
    trial: dict[str, Tensor] | None,
    data: BatchLoader,
    events: EventWriter,
) -> tuple[float, dict[str, Tensor]]:
    """Return a step's targets when none is masked, and a few samples for `engine.step.loss_trial`.

    Both come from rank 0, whose micro-batch is `trial`. Raises `ColotrainError` on every rank where
    the compute precision cannot hold its values.
    """
    told: Any = None
    samples: dict[str, Tensor] = {}
    if trial is not None:
        nominal = float(plan.batch.global_batch * TargetRule().per_sample(trial))
        inputs = inputs_of(model, trial)
        cast, problem = cast_inputs(inputs, cast_dtype(plan.train.precision))
        if cast:
            events.write(Note(text=f"train.precision={plan.train.precision} {cast}"))
        told, samples = (nominal, problem), first_samples(plan, trial, data)
    nominal, problem = exchange.broadcast(told)
    if problem:
        raise ColotrainError(*problem)
    return nominal, exchange.broadcast_tensors(samples)


def first_samples(
    plan: RunPlan,
    trial: dict[str, Tensor],
    data: BatchLoader,
    *,
    most: int = MOST_SAMPLES,
    enough: int = 2,
) -> dict[str, Tensor]:
    """Return a few samples of the first micro-batch, or where these are not enough, of the data.

    A stream is not read beyond its first micro-batch; samples of several shapes are left out.
    """
    found = {name: tensor[:most] for name, tensor in trial.items()}
    num = min(most, len(data.samples))
    is_ours = plan.model.objective is not None  # whose loss is known
    if is_ours or data.batch.micro_batch >= enough or isinstance(data.samples, StreamSamples):
        return found
    try:
        return read_batch(
            data.samples, data.order, range(num), draw_seed=data.draw_seed, collate=data.collate
        )
    except ColotrainError:
        return found


def find_targets(run: Run) -> None:
    """Find out what the loss is a mean over; refuse labels that teach something else.

    All ranks must call.
    """
    plan, model = run.plan, run.sharded.module
    is_of_part = plan.mesh.cp > 1 and not is_of_whole(model)
    if is_of_part and not loss_trial.sums_tokens(model):  # it returns (loss_sum, count)
        return
    run.at(Phase.TRIAL_FORWARD)
    samples = {name: tensor.to(run.device) for name, tensor in run.targets.samples.items()}
    with uncompiled(run.plan, True):
        found = loss_trial.examine(
            model,
            samples,
            known=TargetRule(ignored=plan.train.ignore_index),
            stage=run.sharded.stage,
            tolerance=loss_trial.TOLERANCE[plan.train.precision],
        )
    reshard(run.sharded)
    if problem := loss_trial.problem_of(found, plan.model, plan.data):
        raise ConfigError([problem])
    facts_of(model).rule = found.rule
    run.targets.nominal = float(plan.batch.global_batch * found.rule.per_sample(samples))
    for text in loss_trial.notes_of(found) if run.rank == 0 and not run.step else ():
        if text not in plan.warnings:
            run.events.write(Note(text=f"warning: {text}" if found.against else text))
