"""Forwards without a backward: the last stage has what they give.

`through_stages` is for forwards that all stages know of. Where the last one decides by the losses
how many there are, it asks the others for each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from colotrain.engine.pipeline.stage import Stage
from colotrain.models.objective import inputs_of
from colotrain.models.objectives.base import Forward, of_whole_samples

Result = TypeVar("Result")


def through_stages(
    stage: Stage,
    model: nn.Module,
    compute: Callable[[Forward, Mapping[str, Tensor]], Result],
    batch: Mapping[str, Tensor],
) -> Result | None:
    """Return what `compute` makes of a batch by one forward of the model; None on other stages.

    All ranks must call.
    """

    whole = of_whole_samples(model)

    def forward(**inputs: Any) -> Any:
        if stage.count > 1:
            stage.forward_until_loss(model, inputs)
        if not stage.is_last:
            raise _OnLastStage
        return whole(**inputs)

    try:
        return compute(forward, batch)
    except _OnLastStage:
        return None
    finally:
        stage.end_step()


class _OnLastStage(Exception):
    """Ends on other stages what uses the output of the model."""


def ask(stage: Stage, model: nn.Module, batch: Mapping[str, Tensor]) -> None:
    """Let all stages run a batch up to the chunk that gives the loss, which the caller runs next.

    The last stage calls this, and then `stop_asking`, while the others `answer`.
    """
    if stage.count > 1:
        stage.tensors_from_last(batch)
        stage.forward_until_loss(model, inputs_of(model, batch))


def stop_asking(stage: Stage) -> None:
    stage.tensors_from_last({})
    stage.end_step()


def answer(stage: Stage, model: nn.Module, device: torch.device) -> None:
    """Run what the last stage asks for, until it stops asking."""
    while batch := stage.tensors_from_last({}):
        on_device = {name: tensor.to(device) for name, tensor in batch.items()}
        stage.forward_until_loss(model, inputs_of(model, on_device))
    stage.end_step()
