"""Gradient accumulation, and the only code that divides what gradients come from.

Each micro-batch's loss is weighted by the number of its targets. So the gradient of a step is that
of the mean over all targets of the global batch, however the batch is divided into micro-batches
and ranks. The number of targets of a whole step is known only after its last forward, so backward
uses a fixed nominal number, and `StepTotals.gradient_factor` corrects for it once.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from colotrain import module_tree
from colotrain.engine.gradients.gradients import GradientState, note_use
from colotrain.engine.pipeline.stage import Passed
from colotrain.engine.sharding.sharded_model import begin_backward, begin_forward, reshard
from colotrain.engine.sharding.sums import reduce_replicated_, sum_partial_, sum_tied_
from colotrain.errors import ColotrainError
from colotrain.models.context_parallel import ATTRIBUTE
from colotrain.models.documents import DOCUMENT_IDS, ON_HOST
from colotrain.models.facts import facts_of
from colotrain.models.objective import inputs_of, is_of_whole, objective_of, output_of
from colotrain.models.outputs import TargetRule, count_in, loss_in, pair_in
from colotrain.spec.pipeline_schedule import in_turn
from colotrain.torch_internals import BatchNorms

Batch = dict[str, Tensor]


@dataclass(slots=True, kw_only=True)
class StepTotals:
    """Sums over the micro-batches of this rank in one step."""

    nominal: float
    """Targets of a step if none is masked, the same on all ranks; backward divides by it.

    With a far smaller number, half-precision gradients would overflow.
    """
    loss_scale: float = 1.0
    loss_sum: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    count: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    micro_batches: int = 0
    odd: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    """Number of micro-batches whose count of targets is fractional, or 0 although the loss is not.

    They are counted only with `asks_odd`.
    """
    asks_odd: bool = False

    def add(self, loss_sum: Tensor, count: Tensor) -> None:
        if self.asks_odd:
            odd = (count != count.round()) | ((count == 0) & (loss_sum.detach() != 0))
            self.odd = self.odd.to(odd.device) + odd
        self.loss_sum = self.loss_sum.to(loss_sum.device) + loss_sum.detach().double()
        self.count = self.count.to(count.device) + count.double()
        self.micro_batches += 1

    def sums(self) -> Tensor:
        """Return loss, targets and odd micro-batches, float64 [3]."""
        return torch.stack((self.loss_sum, self.count, self.odd))

    def gradient_factor(self, global_count: float) -> float:
        """Return the factor from summed gradients to the mean over `global_count` targets."""
        return self.nominal / ((global_count or 1.0) * self.loss_scale)


def accumulate(
    state: GradientState,
    batches: Iterable[Batch],
    *,
    num: int,
    totals: StepTotals,
    one_by_one: bool = False,
) -> StepTotals:
    """Run forward and backward of the `num` micro-batches of a step. All ranks must call.

    A pipeline stage runs some forwards ahead of its backwards, unless `one_by_one`.
    """
    sharded, stage = state.sharded, state.sharded.stage
    stage.begin_step(sharded.parts.frozen)
    order = in_turn(chunks=stage.chunks, micro_batches=num) if one_by_one else stage.order(num)
    backwards = [a for a in order if not a.is_forward and stage.trains[a.chunk]]
    taken, source = dict[int, Batch](), iter(batches)
    begun: dict[tuple[int, int], Passed] = {}
    for action in order:
        chunk, index = action.chunk, action.micro_batch
        if action.is_forward:
            batch = taken.pop(index) if chunk else next(source)
            if chunk < stage.chunks - 1:
                taken[index] = batch
            begin_forward(sharded)
            begun[chunk, index] = _forward(state, batch, totals, chunk)
            note_use(state)
        else:
            is_end, last = bool(backwards) and action == backwards[-1], index == num - 1
            begin_backward(sharded, last=last, chunk=chunk, ends_step=is_end)
            stage.backward(begun.pop((chunk, index)), chunk)
    left = next(source, None)  # what counts micro-batches goes on after the last one, too
    assert left is None, f"there are more than {num} micro-batches"
    stage.end_step()
    if stage.chunks > 1 or not stage.trains[0]:
        reshard(sharded)  # not every chunk's last backward has freed all whole parameters
    reduce_replicated_(sharded)
    sum_partial_(sharded)
    sum_tied_(sharded)
    return totals


def _forward(state: GradientState, batch: Batch, totals: StepTotals, chunk: int) -> Passed:
    """Run a micro-batch's forward on a chunk of this rank; the model's last one gives the loss."""
    model, stage = state.sharded.module, state.sharded.stage
    if not stage.gives_loss(chunk):
        totals.micro_batches += not stage.is_last and chunk == stage.chunks - 1
        return Passed(stage.forward(model, inputs_of(model, batch), chunk), stage.received)
    stage.begin_forward(chunk)
    loss_sum, count = weighted_loss(model, batch)
    totals.add(loss_sum, count)
    return Passed(loss_sum * (totals.loss_scale / totals.nominal), stage.received)


class OnDevice(dict[str, Tensor]):
    """A micro-batch on a GPU, with its copy on the host to count targets without waiting."""

    on_host: Batch


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Copy the batch to `device`; to a GPU from page-locked memory, without waiting for it."""
    if device.type == "cpu":
        return batch
    moved = OnDevice({n: t.pin_memory().to(device, non_blocking=True) for n, t in batch.items()})
    moved.on_host = batch
    if DOCUMENT_IDS in moved:
        setattr(moved[DOCUMENT_IDS], ON_HOST, batch[DOCUMENT_IDS])
    return moved


def weighted_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the summed loss of a micro-batch and its number of targets."""
    return weighted_output(model, batch)[:2]


def weighted_output(
    model: nn.Module, batch: Batch, *, seen: list[Any] | None = None
) -> tuple[Tensor, Tensor, Any]:
    """Return the summed loss of a micro-batch, its number of targets, and the output.

    The output is None if all labels are masked: it was computed with made-up ones.
    `model(**batch)`, or the function `train.loss`, returns the first two as a pair, or the mean
    loss (either alone, as `.loss` or `["loss"]`). A mean is multiplied by the number of targets:
    the output's `num_targets` if it has that, otherwise the labels that the model's `TargetRule`
    counts (by default those that are not -100), or the samples of a batch without labels. The sum
    is at least in float32: a half-precision mean times a number of tokens would be rounded again,
    or would overflow. What forward itself returned is appended to `seen`.
    """
    counted = batch.on_host if isinstance(batch, OnDevice) else batch
    rule = facts_of(model).rule
    count = rule.count(counted)
    no_targets = count == 0
    try:
        output = output_of(model, _with_targets(batch, rule) if no_targets else batch, seen=seen)
    except (ValueError, RuntimeError) as error:
        if (problem := _of_batch_norm(model, error) or _of_gradients(error)) is None:
            raise
        raise problem from error
    pair = pair_in(output)
    if pair is not None and _is_scalar(pair[0]):
        loss_sum, own_count = _exact(pair[0]), torch.as_tensor(pair[1])
        if own_count.numel() != 1 or not _may_be_count(own_count):
            raise _wrong_output(model, output)
        own_count = own_count.to(loss_sum.device).reshape(())
        if no_targets:
            return _nothing(loss_sum), own_count * 0, None
        return loss_sum, own_count, output
    loss = loss_in(output)
    if not _is_scalar(loss):
        raise _wrong_output(model, output)
    if getattr(model, ATTRIBUTE, None) is not None and not is_of_whole(model):
        raise ColotrainError(
            "mesh.cp: forward returned a mean loss, and the ranks' parts have different weights",
            "return (loss_sum, count) of this rank's tokens",
        )
    if no_targets:
        return _nothing(_exact(loss)), torch.zeros((), device=loss.device), None
    if (own := count_in(output)) is not None:
        weight = torch.as_tensor(own).reshape(()).float().to(loss.device)
    else:
        targets = float(_num_samples(batch) if count is None else count)
        weight = torch.full((), targets, dtype=torch.float32, device=loss.device)
    return _exact(loss) * weight, weight, output


def _of_gradients(error: Exception) -> ColotrainError | None:
    """The error of a forward that computes gradients where there are none; None for others."""
    if torch.is_grad_enabled() or "does not require grad" not in str(error):
        return None
    return ColotrainError(
        "the model's forward computes gradients, and runs without them here, as in any evaluation",
        "put what computes them into `with torch.enable_grad():`, leave it out where "
        "self.training is false, or set train.eval_steps=0",
    )


def _of_batch_norm(model: nn.Module, error: Exception) -> ColotrainError | None:
    """The error of a batch normalization that has one value per channel; None for another one."""
    names = {module: name for name, module in module_tree.named_modules(model)}
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if isinstance(module, BatchNorms) and module in names and "per channel" in str(error):
            return ColotrainError(
                f"{names[module]} ({type(module).__name__}) has one value per channel in a "
                "micro-batch, and cannot normalize it",
                "raise train.micro_batch to 2 or more, or use GroupNorm or LayerNorm, which see "
                "each sample by itself",
            )
    return None


def _nothing(loss: Tensor) -> Tensor:
    """Return zero with zero gradients, even if the loss is not finite (0 · inf is nan)."""
    return loss.masked_fill(torch.ones_like(loss, dtype=torch.bool), 0.0)


def _exact(loss: Tensor) -> Tensor:
    """Return a scalar, in float32 where the model computed it in half precision."""
    return loss.reshape(()).to(torch.promote_types(loss.dtype, torch.float32))


def _may_be_count(value: Tensor) -> bool:
    """Whether the second of a pair can be a count of targets; a prediction requires grad.

    Only a value on the CPU is read, so that the host need not wait for a device.
    """
    if value.requires_grad:
        return False
    return value.device.type != "cpu" or 0 <= value.item() < float("inf")


def _wrong_output(model: nn.Module, output: Any) -> ColotrainError:
    objective = objective_of(model)
    what = "model: forward" if objective is None else objective.setting
    pair = pair_in(output)
    loss = loss_in(output) if pair is None else pair[0]
    if isinstance(loss, Tensor) and loss.numel() == 1 and not loss.is_floating_point():
        dtype = str(loss.dtype).removeprefix("torch.")
        problem = f"{what} returned a loss of dtype {dtype}, which has no gradient"
        return ColotrainError(problem, "return a floating-point loss, computed without rounding it")
    return ColotrainError(
        f"{what} returned {_describe(output)}",
        "return the mean loss as a scalar, (loss_sum, count), or one of these as `loss` of a dict",
    )


def _with_targets(batch: Batch, rule: TargetRule) -> Batch:
    """Return a batch with valid labels instead of masked ones: a mean over none would be NaN.

    Its loss is multiplied by zero. It runs because other ranks wait for this rank in collectives.
    """
    return {**batch, rule.entry: torch.full_like(batch[rule.entry], rule.target)}


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point()


def _num_samples(batch: Batch) -> int:
    return next(iter(batch.values())).shape[0]


def _describe(output: Any) -> str:
    if isinstance(output, Tensor):
        return f"a tensor of shape {tuple(output.shape)}"
    if isinstance(output, Mapping):
        return f"a {type(output).__name__} with {', '.join(map(str, output)) or 'nothing'}"
    return f"a {type(output).__name__}"
