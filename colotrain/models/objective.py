"""A loss computed from a batch and what the model's forward returns for it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn

from colotrain.dotted import import_target
from colotrain.models.context_parallel import whole_output
from colotrain.models.facts import facts_of
from colotrain.models.objectives import (
    classify,
    distill,
    dpo,
    embed,
    kto,
    orpo,
    reward,
    simpo,
)
from colotrain.models.objectives.base import Kept, Objective
from colotrain.spec.objectives import (
    DPO,
    KTO,
    ORPO,
    ClassifyPlan,
    DistillPlan,
    EmbedPlan,
    ObjectivePlan,
    RewardPlan,
    SimPO,
)
from colotrain.spec.plan import ModelPlan


def _of(settings: ObjectivePlan) -> Objective:
    match settings:
        case DPO():
            return dpo.objective(settings)
        case ORPO():
            return orpo.objective(settings)
        case SimPO():
            return simpo.objective(settings)
        case RewardPlan():
            return reward.objective(settings)
        case ClassifyPlan():
            return classify.objective(settings)
        case DistillPlan():
            return distill.objective(settings)
        case KTO():
            return kto.objective(settings)
        case EmbedPlan():
            return embed.objective(settings)


def kept_of(plan: ModelPlan) -> Kept | None:
    """What the objective needs to know of each sample before the first step; None: nothing."""
    return None if plan.objective is None else _of(plan.objective).kept


def attach_(model: nn.Module, plan: ModelPlan) -> None:
    """Let `output_of` compute the loss that `train.loss` or `train.objective` names, if any.

    Raises `ConfigError` where the function cannot be imported.
    """
    if plan.loss is not None:
        loss = import_target("train.loss", plan.loss)
        taken = _taken_by(model, is_hf=plan.hf is not None)
        inputs = functools.partial(taken_from, model=model, taken=taken)
        setting = f"train.loss={plan.loss}"
        facts_of(model).objective = Objective(setting, loss, inputs, is_users=True)
    elif plan.objective is not None:
        facts_of(model).objective = _of(plan.objective)


def objective_of(model: nn.Module) -> Objective | None:
    return facts_of(model).objective


def is_of_whole(model: nn.Module) -> bool:
    """Whether each rank computes the loss of whole samples although ranks divide them."""
    objective = objective_of(model)
    return objective is not None and objective.of_whole


def output_of(
    model: nn.Module, batch: Mapping[str, Tensor], *, seen: list[Any] | None = None
) -> Any:
    """What stands for the loss: the output of forward, or what the objective makes of it.

    The output of forward is appended to `seen`.
    """
    objective, output = objective_of(model), forward_of(model, batch)
    if is_of_whole(model):
        output = whole_output(model, output)
    if seen is not None:
        seen.append(output)
    return output if objective is None else objective.loss(batch, output)


def forward_of(model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
    """What the model's forward returns of a batch, from which the objective makes the loss."""
    objective = objective_of(model)
    with nullcontext() if objective is None else objective.context(model, batch):
        return model(**inputs_of(model, batch))


def as_global_batch(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A batch that is a whole global batch, with what the objective's loss needs to know of it.

    Under objectives whose loss of a sample depends on no other sample, the batch itself.
    """
    objective = objective_of(model)
    if objective is None or objective.global_rows is None:
        return dict(batch)
    return objective.global_rows.alone(model, batch)


def inputs_of(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """What forward gets of a batch: with `train.loss`, the entries that it takes."""
    objective = objective_of(model)
    return dict(batch) if objective is None else objective.inputs(batch)


def outputs_alone(model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
    """The output of a Hugging Face model's forward that computes no loss."""
    return model(**taken_from(batch, model, _taken_by(model, is_hf=True)))


def taken_from(
    batch: Mapping[str, Tensor], model: nn.Module, taken: frozenset[str] | None
) -> dict[str, Any]:
    """The entries of a batch whose names are `taken`.

    A transformers encoder-decoder without decoder inputs gets the shifted labels, as in its own
    forward.
    """
    inputs: dict[str, Any] = {n: t for n, t in batch.items() if taken is None or n in taken}
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False) and "labels" not in inputs:
        shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
        if shift is not None and "labels" in batch and "decoder_input_ids" not in inputs:
            inputs["decoder_input_ids"] = shift(labels=batch["labels"])
        inputs["use_cache"] = False
    return inputs


def _taken_by(model: nn.Module, *, is_hf: bool) -> frozenset[str] | None:
    """Names that forward takes; a Hugging Face model does not get labels, for it has a loss."""
    forward: Any = type(model).forward if is_hf else model.forward
    parameters = inspect.signature(forward).parameters
    if is_hf:
        return frozenset({*parameters, "document_ids"} - {"self", "labels"})
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return None
    return frozenset(parameters)
