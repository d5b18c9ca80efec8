"""What an objective is: a loss, and what a model says of each sample before the first step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from colotrain.models.context_parallel import whole_output
from colotrain.spec.phases import Phase

Forward = Callable[..., Any]
"""A model, or what runs it through pipeline stages; its output is that of whole samples."""


def of_whole_samples(model: nn.Module) -> Forward:
    """Return the forward of a model, of whose output ranks that divide samples gather the parts."""
    return lambda **inputs: whole_output(model, model(**inputs))


@dataclass(frozen=True, slots=True)
class Kept:
    """An entry of samples that a model computes before the first step (`engine.step.precompute`).

    The model is the objective's teacher (`spec.teacher`), or the one that trains, as it begins.
    """

    entry: str
    """Name of it in a batch."""
    shape: Callable[[torch.Size], tuple[int, ...]]
    """Its shape for a sample with labels of this one."""
    unknown: Tensor
    """What fills it where it is not known: then the loss is NaN. Its dtype is the entry's."""
    rows: Callable[[Forward, Mapping[str, Tensor]], Tensor]
    """What a model says of a batch [samples, ...], by one forward."""
    settings: dict[str, Any]
    """The objective's settings that change it."""
    phase: Phase
    what: str
    """`the teacher's {num} {split} samples`."""
    source: str
    """Kind of source under which checkpoints know the model's weights."""
    other: str
    """What other weights of it mean for a run that goes on before step `{step}`."""

    def empty(self, labels: Tensor, *, device: str = "cpu") -> Tensor:
        """The entry of a sample with these labels of which nothing is known."""
        return torch.full(
            self.shape(labels.shape), self.unknown.item(), dtype=self.unknown.dtype, device=device
        )


POSITIONS = "positions_in_global_batch"
"""Entry of a batch with the number of each sample in its global batch, where rows are shared."""


@dataclass(frozen=True, slots=True)
class GlobalRows:
    """What the loss of a sample needs to know of all samples of its global batch.

    A pass without gradients before each step (`engine.step.global_rows`) computes it of all
    micro-batches on all ranks, so that a step is the same however its batch is divided.
    """

    rows: Callable[[Forward, Mapping[str, Tensor]], Tensor]
    """What a model says of the samples of a micro-batch, by one forward: [samples, ...]."""
    entries: Callable[[Tensor], dict[str, Tensor]]
    """Entries of every micro-batch, from the rows of all samples in their order."""

    def alone(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A batch that is a whole global batch by itself, with its entries."""
        with torch.no_grad():
            found = self.rows(of_whole_samples(model), batch)
        return {**batch, **self.entries(found), POSITIONS: _numbers_of(found)}


def _numbers_of(rows: Tensor) -> Tensor:
    return torch.arange(len(rows), device=rows.device)


@dataclass(frozen=True, slots=True)
class Objective:
    """A loss, and what the model's forward gets of a batch for it."""

    setting: str
    loss: Callable[[Mapping[str, Tensor], Any], Any]
    inputs: Callable[[Mapping[str, Tensor]], dict[str, Any]]
    context: Callable[[nn.Module, Mapping[str, Tensor]], AbstractContextManager[None]] = (
        lambda model, batch: nullcontext()
    )
    """Context of forward, of a batch."""
    kept: Kept | None = None
    """What the loss needs that another model, or the model before, says of a sample."""
    global_rows: GlobalRows | None = None
    """What the loss of a sample needs to know of the other samples of a step."""
    of_whole: bool = True
    """Whether the loss is of the outputs of whole samples. Where ranks divide samples, they gather
    their outputs, and all of them compute the same loss; otherwise each has the loss of its part.
    """
    is_users: bool = False
    """Whether the user's own function computes the loss."""
