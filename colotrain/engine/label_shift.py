"""Finds out whether a model shifts labels itself, as transformers' losses do.

Its mean loss is then over all labels but the first of each row. Weighting that mean by all labels
would make the result depend on how a batch is divided. A few forwards with one sample show it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from colotrain.data.read.packing import IGNORE_INDEX
from colotrain.engine import generators
from colotrain.engine.accumulation import SHIFTS, Batch
from colotrain.engine.pipeline.stage import Stage
from colotrain.engine.run_state import Run
from colotrain.engine.sharding.sharded_model import reshard
from colotrain.errors import ColotrainError
from colotrain.events.kinds import Note
from colotrain.models.objective import inputs_of, output_of
from colotrain.models.outputs import count_in, loss_in, pair_in

MIN_LABELS = 3


def is_in_question(batch: Batch) -> bool:
    """Whether the samples have a sequence of labels with at least one target."""
    labels = batch.get("labels")
    if labels is None or labels.ndim != 2 or labels.is_floating_point():
        return False
    return labels.shape[1] >= MIN_LABELS and bool((labels != IGNORE_INDEX).any())


def find(run: Run) -> None:
    """Find out whether the model shifts labels; an error if they are shifted already.

    All ranks must call.
    """
    if run.sample is None or run.plan.mesh.cp > 1:  # such a model returns (loss_sum, count)
        return
    run.at("trial forward")
    model = run.sharded.module
    sample = {name: tensor.to(run.device) for name, tensor in run.sample.items()}
    shifts = shifts_labels(model, sample, run.sharded.stage)
    reshard(run.sharded)
    if shifts and run.plan.data.source != "target":
        raise ColotrainError(
            f"{run.plan.model.key}={run.plan.model.value}: the model shifts labels, which in "
            "colotrain's data are shifted already: it would learn the token after the next",
            "compute the loss from the labels as they are, or use model.hf",
        )
    setattr(model, SHIFTS, shifts)
    if shifts and run.rank == 0:
        text = (
            "the model shifts labels itself: its mean loss is weighted by all but each row's first"
        )
        run.events.write(Note(text=text))


@torch.no_grad()
def shifts_labels(model: nn.Module, sample: Batch, stage: Stage | None = None) -> bool:
    """Whether the first label of a row does not count. All ranks must call with the same sample.

    False for a model that returns its number of targets. The model's buffers and the generators do
    not change. With pipeline stages the last one decides, and every forward runs.
    """
    stage = stage or Stage()
    labels = sample["labels"]
    target = labels[labels != IGNORE_INDEX][0]

    def loss(*chosen: int) -> Tensor | None:
        masked = torch.full_like(labels, IGNORE_INDEX)
        masked[:, list(chosen)] = target
        batch = {**sample, "labels": masked}
        if stage.count > 1:
            stage.forward_until_loss(model, inputs_of(model, batch))
        if not stage.is_last:
            return None
        output = output_of(model, batch)
        if isinstance(output, tuple) or pair_in(output) or count_in(output) is not None:
            return None
        return loss_in(output)

    with unchanged(model, labels.device):
        places: tuple[tuple[int, ...], ...] = ((-1,), (0, -1), (0,), ())
        losses: Iterator[Tensor | None] = (loss(*chosen) for chosen in places)
        shifts = _first_is_left_out(losses if stage.count == 1 else iter([*losses]))
    stage.end_step()
    return stage.from_last(shifts)


def _first_is_left_out(losses: Iterator[Tensor | None]) -> bool:
    """Whether the loss with targets at the end, or both ends, is equal, and at the beginning none.

    `losses` are those with a target at the end, at both ends, at the beginning, and nowhere.
    """
    last, both = next(losses), next(losses)
    if last is None or both is None or not torch.equal(last, both):
        return False
    first, none = next(losses), next(losses)  # else all positions may have the same loss
    return first is not None and none is not None and _same(first, none)


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)


@contextmanager
def unchanged(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Run the context in evaluation mode; restores modes, buffers and generators."""
    modes = {module: module.training for module in model.modules()}
    states = generators.states(device)
    model.eval()
    try:
        with kept_buffers(model):
            yield
    finally:
        generators.set_states(device, states)
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """Restore buffers that forwards in the context change, such as running means."""
    owners = [(m, n, b) for m in model.modules() for n, b in m.named_buffers(recurse=False)]
    before = [buffer.clone() for *_, buffer in owners]
    yield
    for (module, name, buffer), value in zip(owners, before, strict=True):
        buffer.copy_(value)
        module._buffers[name] = buffer  # also where forward assigned another tensor
