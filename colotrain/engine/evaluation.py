"""Evaluation: the loss on the validation split, between two steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from colotrain.data.read.loader import BatchLoader
from colotrain.engine.accumulation import Batch, to_device, weighted_output
from colotrain.engine.early_stopping import note_evaluation
from colotrain.engine.monitor import interruptible
from colotrain.engine.run_state import Run
from colotrain.engine.sharding.sharded_model import reshard
from colotrain.errors import ColotrainError
from colotrain.events.kinds import Evaluation, Note
from colotrain.models.objective import inputs_of, outputs_alone
from colotrain.models.outputs import metrics_in
from colotrain.torch_internals import is_persistent


@torch.no_grad()
def evaluate(run: Run) -> None:
    """Compute the mean loss over the validation samples that `train.eval_steps` selects.

    Sets `run.best` if this evaluation is the best so far. All ranks must call.
    """
    run.at("evaluation")
    plan, model, data = run.plan, run.sharded.module, run.validation_data
    if plan.train.eval_steps == 0 or data is None:
        return
    training = {module: module.training for module in model.modules()}
    model.eval()
    with interruptible(run, "evaluation"), exported_buffers(run):
        sums, metrics = sum_losses(run, data)
        if not run.sharded.parts.is_first:  # another rank of the group has the same
            sums, metrics = torch.zeros_like(sums), {}
        reshard(run.sharded)
        run.progress.begin_agreement()
        dist.all_reduce(sums)
        means = _over_all_ranks(metrics)
    for module, mode in training.items():  # modules that the user set to evaluation mode stay in it
        module.training = mode
    loss_sum, count = sums.tolist()
    loss = loss_sum / (count or 1.0)
    note_evaluation(run, {RESERVED: loss, **means} | {RESERVED: loss})
    best = _is_best(run, loss, means) or None
    if run.rank == 0:
        found = Evaluation(step=run.step, loss=loss, tokens=count, metrics=means or None, best=best)
        run.events.write(found)


@contextmanager
def exported_buffers(run: Run) -> Iterator[None]:
    """Context in which all ranks have rank 0's persistent buffers, which an export has.

    Ranks may have other ones where a forward changes them by what it sees. All ranks must call.
    """
    if run.plan.world_size == 1 or run.plan.mesh.together > 1:
        yield
        return
    owners = run.sharded.module.modules()
    kept = [m._buffers[name] for m in owners for name in m._buffers if is_persistent(m, name)]
    own = [buffer for buffer in kept if buffer is not None and buffer.is_floating_point()]
    before = [buffer.clone() for buffer in own]
    for buffer in own:
        dist.broadcast(buffer, src=0)
    try:
        yield
    finally:
        for buffer, value in zip(own, before, strict=True):
            buffer.copy_(value)


def _is_best(run: Run, loss: float, means: dict[str, float]) -> bool:
    """Whether this evaluation is the best so far, by the metric that the plan names."""
    found = {RESERVED: loss, **means} | {RESERVED: loss}
    metric, lowest = run.plan.checkpoint.best_metric, run.plan.checkpoint.best_mode == "min"
    if metric is None:
        return False
    if metric not in found:
        raise ColotrainError(
            f"checkpoint.best.metric={metric}: the evaluation has no such value",
            f"name one of {', '.join(found)}",
        )
    value, before = found[metric], run.best[1] if run.best else None
    if not math.isfinite(value) and run.rank == 0:
        text = f"checkpoint.best.metric={metric} is {value}: this evaluation is never the best"
        run.events.write(Note(step=run.step, text=text))
    if not math.isfinite(value) or run.step == 0:
        return False
    if before is None or (value < before if lowest else value > before):
        run.best = run.step, value
        return True
    return False


RESERVED = "validation_loss"
"""Name of the loss itself among the values of an evaluation."""
Metrics = dict[str, tuple[float, float]]
"""Name → sum and count."""


def sum_losses(run: Run, data: BatchLoader) -> tuple[Tensor, Metrics]:
    """Return summed loss and number of targets of this rank's micro-batches, and their metrics."""
    sums = torch.zeros(2, dtype=torch.float64, device=run.device)
    metrics: Metrics = {}
    num = run.plan.batch.accumulation_steps
    total = data.num_micro_batches
    assert total is not None
    for index in range(total):
        run.at("evaluation")
        run.sharded.calls.clear()
        run.progress.at_micro_batch(index, of=total, calls=0)
        at = divmod(index, num)
        batch, num_samples = to_device(data.micro_batch(*at), run.device), len(data.positions(*at))
        with uncompiled(run, num_samples < run.plan.batch.micro_batch):
            found = _with_metrics(run, batch)
        if not num_samples or found is None:  # the forward ran because other ranks wait for it
            continue
        loss, count, output, own = found
        sums += torch.stack([loss.double(), count.double()])
        for name, value, weight in (*metrics_in(output, count), *metrics_in(own, count)):
            if not weight.item():  # a rank's part of a sample may have no target
                continue
            before = metrics.get(name, (0.0, 0.0))
            metrics[name] = before[0] + value.item(), before[1] + weight.item()
    return sums, metrics


def _with_metrics(run: Run, batch: Batch) -> tuple[Tensor, Tensor, Any, Any] | None:
    """Return `weighted_output`, and what `train.metrics` returns; all ranks run as many forwards.

    None on a pipeline stage that is not the last.

    A Hugging Face model that computes its loss runs once more, without labels, for its outputs.
    """
    model, function, stage = run.sharded.module, run.metrics, run.sharded.stage
    if stage.count > 1:
        stage.forward_until_loss(model, inputs_of(model, batch))
        stage.end_step()
    if not stage.is_last:
        return None
    seen: list[Any] = []
    loss, count, output = weighted_output(model, batch, seen=seen)
    if function is None:
        return loss, count, output, None
    outputs = seen[0]
    if run.plan.model.hf and run.plan.model.loss is None:
        outputs = outputs_alone(model, batch)
    if output is None:
        return loss, count, None, None
    return loss, count, output, _checked(function(batch, outputs), run.plan.train.metrics)


def _checked(found: Any, dotted: str | None) -> dict[str, Any]:
    """Return what `train.metrics` returned, but the loss's name; `ColotrainError` for no dict."""
    numbers = metrics_in(found, torch.ones(()))
    if not isinstance(found, Mapping) or {n for n, *_ in numbers} != {*found} or RESERVED in found:
        shown = ", ".join(map(str, found)) if isinstance(found, Mapping) else type(found).__name__
        raise ColotrainError(
            f"train.metrics={dotted} returned {shown}",
            "return a dict of names and numbers, each (sum, count) or a mean over the targets, "
            f"none of them called loss or {RESERVED}",
        )
    return dict(found)


def uncompiled(run: Run, is_short: bool) -> AbstractContextManager[Any]:
    """Run a short micro-batch as it is: a second shape would make compiled blocks dynamic."""
    short = run.plan.train.compile and is_short
    return torch.compiler.set_stance("force_eager") if short else nullcontext()


def _over_all_ranks(metrics: Metrics) -> dict[str, float]:
    """Return name → mean over the ranks that have the metric. All ranks must call."""
    everyone: list[Metrics] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, metrics)
    found = {}
    for name in dict.fromkeys(name for one in everyone for name in one):
        own = [one.get(name, (0.0, 0.0)) for one in everyone]
        count = sum(part[1] for part in own)
        found[name] = sum(part[0] for part in own) / count if count else float("nan")
    return found
