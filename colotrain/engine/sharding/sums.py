"""Sums over ranks that `fully_shard` does not make, once a step: gradients, running statistics."""

from __future__ import annotations

import itertools

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from colotrain import module_tree
from colotrain.engine.parts.part_map import local_part
from colotrain.engine.sharding.sharded_model import ShardedModel, replicated
from colotrain.spec.axes import STAGE, TP
from colotrain.torch_internals import BatchNorms


def reduce_replicated_(sharded: ShardedModel) -> None:
    """Sum replicated parameters' gradients over a stage's ranks, once a step. All must call."""
    named = {n: p for n, p in replicated(sharded).items() if p.requires_grad and p.numel()}
    parameters, comms = list(named.values()), sharded.comms
    if not parameters:
        return
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    is_first, partial = comms.ranks.is_first(comms.rank, TP), sharded.tensor.partial
    counts = [float(is_first or name in partial) for name in named]
    summed = torch.view_as_real(torch.stack([grad.to(torch.complex128) for grad in grads]))
    summed *= torch.tensor(counts, dtype=torch.float64).to(summed.device).unsqueeze(1)
    dist.all_reduce(summed, group=comms[STAGE])
    for parameter, total in zip(parameters, torch.view_as_complex(summed), strict=True):
        parameter.grad = (total if parameter.is_complex() else total.real).to(parameter.dtype)


@torch.no_grad()
def sum_partial_(sharded: ShardedModel) -> None:
    """Sum the gradients of which ranks that divide matrices or experts have parts, once a step.

    All ranks must call.
    """
    partial, found, device = sharded.tensor.partial, [], sharded.comms.device
    if not partial:
        return
    named = {n: p for n, p in sharded.trained().items() if n in partial and isinstance(p, DTensor)}
    used = sharded.tensor.used_by_any([p.grad is not None for p in named.values()], device)
    for name, parameter in itertools.compress(named.items(), used):
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        found.append(local_part(parameter.grad))
        sharded.norms.pop(name, None)
    if any(gradient.device.type != device for gradient in found):  # copies that a GPU has queued
        torch.accelerator.synchronize()
    if found:
        sharded.tensor.sum_(found, device)


@torch.no_grad()
def sum_tied_(sharded: ShardedModel) -> None:
    """Sum the gradients of parameters that two stages hold, once a step. All ranks must call."""
    named = sharded.trained() if sharded.stage.count > 1 else {}
    for name, parameter in named.items():
        if len(sharded.parts[name].stages) > 1:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            sharded.norms.pop(name, None)
            sharded.stage.sum_shared_(name, local_part(parameter.grad))


@torch.no_grad()
def average_statistics_(sharded: ShardedModel) -> None:
    """Give all ranks the mean of their batch normalizations' running statistics, after a step.

    Each rank has seen its own micro-batches, and an evaluation and an export need one model. A
    running statistic is linear in what it has seen, so that it is the same whenever it is averaged.
    All ranks must call.
    """
    running = [
        statistic
        for module in module_tree.modules(sharded.module)
        if isinstance(module, BatchNorms) and module.training
        for statistic in (module.running_mean, module.running_var)
        if statistic is not None
    ]
    if running and dist.get_world_size() > 1:
        total = torch.cat([statistic.double().flatten() for statistic in running])
        dist.all_reduce(total)
        means = (total / dist.get_world_size()).split([s.numel() for s in running])
        for statistic, mean in zip(running, means, strict=True):
            statistic.copy_(mean.view(statistic.shape))
