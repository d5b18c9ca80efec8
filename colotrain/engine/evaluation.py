"""Evaluation: the loss on the validation split, between two steps."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from colotrain.data.read.loader import BatchLoader
from colotrain.engine.accumulation import to_device, weighted_loss
from colotrain.engine.monitor import interruptible
from colotrain.engine.run_state import Run
from colotrain.engine.sharding.sharded_model import reshard


@torch.no_grad()
def evaluate(run: Run) -> None:
    """Mean loss over `train.eval_steps` global batches of the validation split."""
    run.at("evaluation")
    plan, model, data = run.plan, run.sharded.module, run.validation_data
    if plan.train.eval_steps == 0 or data is None:
        return
    training = {module: module.training for module in model.modules()}
    model.eval()
    with interruptible(run, "evaluation"):
        sums = sum_losses(run, data)
        reshard(run.sharded)
        run.progress.begin_agreement()
        dist.all_reduce(sums)
    for module, mode in training.items():  # parts that the user put in evaluation stay there
        module.training = mode
    loss_sum, count = sums.tolist()
    if run.rank == 0:
        run.events.write("eval", step=run.step, loss=loss_sum / max(count, 1.0), tokens=count)


def sum_losses(run: Run, data: BatchLoader) -> Tensor:
    """The summed loss, and the number of targets, of this rank's validation micro-batches."""
    sums = torch.zeros(2, dtype=torch.float64, device=run.device)
    num = run.plan.batch.accumulation_steps
    total = num * run.plan.train.eval_steps
    for index in range(total):
        run.at("evaluation")
        run.progress.at_micro_batch(index, of=total, calls=len(run.sharded.calls))
        batch = to_device(data.micro_batch(*divmod(index, num)), run.device)
        sums += torch.stack([x.double() for x in weighted_loss(run.sharded.module, batch)])
    return sums
