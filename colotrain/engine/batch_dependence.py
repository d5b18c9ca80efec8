"""Finds out whether a loss is what it is taken for: the mean of its samples' losses.

A sum of losses, weights of samples that are divided out, or losses that compare the samples of a
batch (contrastive ones) make training depend on `train.micro_batch`. A few forwards show it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from colotrain.engine import label_shift
from colotrain.engine.accumulation import Batch, weighted_loss
from colotrain.engine.run_state import Run
from colotrain.engine.sharding.sharded_model import reshard
from colotrain.events.kinds import Note

TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2, "fp16": 5e-2}
"""Relative difference that rounding may make, by `train.precision`."""


def tell(run: Run) -> None:
    """Warn before the first step of a loss that depends on the size of micro-batches.

    All ranks must call. A run without evaluations is left alone: the model of one may have no loss
    in evaluation mode.
    """
    evaluates = run.plan.train.eval_steps and run.validation_data is not None
    if run.two_samples is None or run.step or not evaluates:
        return
    run.at("trial forward")
    model = run.sharded.module
    samples = {name: tensor.to(run.device) for name, tensor in run.two_samples.items()}
    losses = _losses(model, samples)
    reshard(run.sharded)
    if losses is None or run.rank != 0:
        return
    found = _against(*losses, tolerance=TOLERANCE[run.plan.train.precision])
    if found:
        run.events.write(Note(text=f"warning: {found}"))


@torch.no_grad()
def _losses(model: nn.Module, samples: Batch) -> tuple[float, float] | None:
    """Return the mean loss of two samples together, and of each by itself.

    None where forward draws random numbers, has no target, or fails: batches of one sample may be
    none that the model takes.
    """
    attributes = {module: dict(vars(module)) for module in model.modules()}

    def loss(first: int, stop: int) -> Tensor:
        part = {name: tensor[first:stop] for name, tensor in samples.items()}
        return torch.stack([value.double() for value in weighted_loss(model, part)])

    with label_shift.unchanged(model, next(iter(samples.values())).device):
        try:
            both, again = loss(0, 2), loss(0, 2)
            apart = loss(0, 1) + loss(1, 2)
        except Exception:
            return None
        finally:  # such as a state that a recurrent model keeps from one forward to the next
            for module, before in attributes.items():
                vars(module).update(before)
    if not torch.equal(both, again) or not both[1] or not apart[1]:
        return None
    return (both[0] / both[1]).item(), (apart[0] / apart[1]).item()


def _against(together: float, apart: float, *, tolerance: float) -> str:
    """Return what is wrong with a loss that is no mean, or nothing."""

    def differs(a: float, b: float) -> bool:
        return abs(a - b) > tolerance * max(abs(a), abs(b))

    if not differs(together, apart):
        return ""
    if not differs(together, 2 * apart):
        return (
            "the loss of two samples is twice the mean of theirs (a sum, as of reduction='sum'), "
            "but it is taken for a mean: steps depend on train.micro_batch; return a mean, or "
            "(loss_sum, count)"
        )
    return (
        f"the loss of two samples is {together:.4g} together, and {apart:.4g} on average by "
        "themselves: steps depend on train.micro_batch; if samples have weights, or targets that "
        "are not in labels, return (loss_sum, count or sum of weights)"
    )
