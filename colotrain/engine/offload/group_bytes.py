"""Bytes of each parameter group, and of everything else a rank needs: the input of placement."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from colotrain import module_tree
from colotrain.engine.model.freezing import names_of
from colotrain.engine.model.probes import memory_now
from colotrain.engine.pipeline.stage import Stage
from colotrain.spec.offload import (
    Declared,
    GroupBytes,
    NonModelBytes,
    StatePerRow,
    estimate_non_model,
    group_bytes,
    with_margin,
)
from colotrain.spec.plan import RunPlan

Modules = list[tuple[str, list[nn.Module]]]


def measure_bytes(
    model: nn.Module,
    groups: Modules,
    plan: RunPlan,
    state_per_row: StatePerRow,
    *,
    stage: Stage | None = None,
) -> list[GroupBytes]:
    """Return the bytes of each group per rank of a pipeline stage, the root group's last.

    Gradients and optimizer state count for every parameter that trains now or is unfrozen later.
    The result is the same on every rank of the stage, because shards are counted with the padding
    that makes them equal.
    """
    names, stage = names_of(model), stage or Stage()
    sizes = []
    for name, modules in [*groups, ("", [model])]:
        declared = []
        for parameter in (p for module in modules for p in module_tree.parameters(module)):
            known_as = names.pop(parameter, None)
            if known_as is None:  # counted with a group inside this one already
                continue
            if not stage.holds(known_as[0]):
                continue
            trains = parameter.requires_grad or plan.freeze.unfreezes(known_as)
            shape, itemsize = tuple(parameter.shape), parameter.itemsize
            declared.append(Declared(shape=shape, itemsize=itemsize, trains=trains))
        ranks = plan.plugin.dp_shard
        sizes.append(group_bytes(name, declared, ranks=ranks, state_per_row=state_per_row))
    return sizes


def estimate_non_model_bytes(
    plan: RunPlan, sizes: Sequence[GroupBytes], stage: Stage
) -> NonModelBytes:
    """Estimate what else a rank needs, before any step was measured. All ranks must call.

    On CUDA the plan has it, unless the model could not be traced. Parameters are not moved after
    this first estimate there, so that it must be neither too small nor much too large.
    """
    planned = plan.stage_memory[stage.index] if plan.stage_memory else plan.memory
    is_traced = any(memory.activations for memory in plan.stage_memory or (plan.memory,))
    if plan.cluster.device != "cpu" and is_traced:  # alike on all stages: others sum below
        compute = planned.activations + planned.gathered
        return with_margin(NonModelBytes(compute=compute, update=0))
    now = memory_now()[0] if plan.cluster.device == "cpu" else 0
    base = torch.tensor(now, dtype=torch.int64, device=plan.cluster.device)
    dist.all_reduce(base, op=dist.ReduceOp.MAX)
    ranks, activations = plan.plugin.dp_shard, planned.activations
    return estimate_non_model(sizes, ranks=ranks, process=int(base), activations=activations)
