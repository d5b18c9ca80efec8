"""Bytes of a rank's model states, and of what a step holds beside them. Standard library only."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from colotrain.planner.groups import num_rows, shard_numel
from colotrain.planner.layout import Layout, counter_bytes
from colotrain.spec.memory import MemoryBreakdown
from colotrain.spec.plugins import stays_gathered
from colotrain.spec.survey import ParameterInfo, Survey


@dataclass(frozen=True, slots=True, kw_only=True)
class Transient:
    """Bytes of a rank that are not model data, at the peak of a step."""

    activations: int
    gathered: int | None
    """Gathered parameters and unreduced gradients beside the activations; None on CPU and without a
    trace: then `spec.offload.estimate_non_model` does."""
    beside: int = 0
    """Most bytes of CUDA's libraries and of torch's allocator."""
    staged: Callable[[Collection[str]], int] = lambda below: 0
    """Names of the groups whose parameters are below the GPU → bytes of copies on the GPU."""


def model_state_bytes(layout: Layout, survey: Survey) -> MemoryBreakdown:
    """Parameters, gradients, optimizer state and gathered parameters on the largest rank.

    Frozen parameters have no gradient and no optimizer state. Activations and buffers are not
    included. Gradients are counted as they are while accumulating.
    """
    parameters, shard = survey.parameters, layout.shard
    trainable = [p for p in parameters if p.frozen_by is None]
    gradients_over = 1 if layout.gradients == "whole" else shard
    return MemoryBreakdown(
        parameters=sum(shard_numel(p, shard) * p.itemsize for p in parameters),
        gradients=sum(shard_numel(p, gradients_over) * p.itemsize for p in trainable),
        optimizer=optimizer_bytes(layout, trainable),
        gathered=_gathered_bytes(layout, parameters),
    )


def optimizer_bytes(layout: Layout, trainable: Sequence[ParameterInfo]) -> int:
    """Bytes of the optimizer's state on the largest rank, step counts included."""
    optim, shard = layout.optim, layout.shard
    rows = (num_rows(p, shard) * optim.state_bytes_per_row(p.shape, p.itemsize) for p in trainable)
    return sum(rows) + len(trainable) * counter_bytes(optim)


def _gathered_bytes(layout: Layout, parameters: Iterable[ParameterInfo]) -> int:
    """Bytes of gathered parameters that live beside the shards.

    All but those of blocks that are freed after use, of which the two largest count: the one in use
    and the one being prefetched.
    """
    if layout.shares_parameters:
        return 0
    groups: dict[str, int] = {}
    for p in parameters:
        groups[p.group] = groups.get(p.group, 0) + p.numel * p.itemsize
    freed = [n for name, n in groups.items() if name and not stays_gathered(name, layout)]
    return sum(groups.values()) - sum(sorted(freed)[:-2])
