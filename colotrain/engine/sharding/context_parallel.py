"""Dividing the tokens of samples among ranks (`mesh.cp`), and their collectives."""

from __future__ import annotations

from functools import partial

import torch.distributed as dist
from torch import nn

from colotrain.engine.comms.all_gather import Channel
from colotrain.engine.comms.groups import Groups
from colotrain.engine.comms.shared_memory import Unavailable
from colotrain.errors import UsageError
from colotrain.models.context_parallel import (
    ATTRIBUTE,
    Collective,
    SequenceShard,
    divide_sequences_,
)
from colotrain.spec.axes import CP
from colotrain.spec.plan import RunPlan
from colotrain.torch_internals import all_gather, reduce_scatter


def divide_among_ranks_(model: nn.Module, plan: RunPlan, comms: Groups) -> None:
    """Let each rank compute its part of every sample, as `mesh.cp` says. All ranks must call.

    No forward may run on a single rank afterwards: it waits for the other ranks of its group.
    """
    if not hasattr(model, ATTRIBUTE):
        raise UsageError(
            f"mesh.cp={plan.mesh.cp}: {plan.model.value} cannot divide the tokens of a sample "
            "among ranks",
            "set mesh.cp=1",
        )
    divide_sequences_(model, make_shard(comms[CP], comms.device))


def collectives_of(group: dist.ProcessGroup, device: str) -> tuple[Collective, Collective]:
    """Return all-gather and reduce-scatter, in shared memory on CPU where that is possible."""
    if device == "cpu":
        try:
            channel = Channel(group, buffer_bytes=0)
            return channel.all_gather, channel.reduce_scatter
        except Unavailable:
            pass
    return partial(all_gather, group=group), partial(reduce_scatter, group=group)


def make_shard(group: dist.ProcessGroup, device: str) -> SequenceShard:
    """Return this rank's part, with the collectives of `group`."""
    shard = SequenceShard(rank=group.rank(), size=group.size(), device=device)
    shard.all_gather, shard.reduce_scatter = collectives_of(group, device)
    return shard
