"""The process groups of context parallelism, and their collectives."""

from __future__ import annotations

from functools import partial

import torch.distributed as dist
from torch import nn

from colotrain.engine.shm.all_gather import Channel
from colotrain.engine.shm.shared_memory import Unavailable
from colotrain.errors import ColotrainError
from colotrain.models.context_parallel import ATTRIBUTE, SequenceShard, divide_sequences_
from colotrain.spec.plan import RunPlan
from colotrain.torch_internals import all_gather, reduce_scatter, wait_as_long_as_all_


def divide_among_ranks_(model: nn.Module, plan: RunPlan) -> None:
    """Let each rank compute its part of every sample, as `mesh.cp` says. All ranks must call.

    No forward may run on a single rank afterwards: it waits for the other ranks of its group.
    """
    size, rank = plan.mesh.cp, dist.get_rank()
    if size == 1:
        return
    if not hasattr(model, ATTRIBUTE):
        raise ColotrainError(
            f"mesh.cp={size}: {plan.model.value} cannot divide the tokens of a sample among ranks",
            "set mesh.cp=1",
        )
    for first in range(0, dist.get_world_size(), size):
        group = dist.new_group(list(range(first, first + size)))
        if first <= rank < first + size:
            wait_as_long_as_all_(group)
            divide_sequences_(model, make_shard(group, plan.cluster.device))


def make_shard(group: dist.ProcessGroup, device: str) -> SequenceShard:
    """Return this rank's part, with collectives in shared memory on CPU where that is possible."""
    shard = SequenceShard(rank=group.rank(), size=group.size(), device=device)
    shard.all_gather = partial(all_gather, group=group)
    shard.reduce_scatter = partial(reduce_scatter, group=group)
    if device == "cpu":
        try:
            channel = Channel(group, buffer_bytes=0)
        except Unavailable:
            return shard
        shard.all_gather, shard.reduce_scatter = channel.all_gather, channel.reduce_scatter
    return shard
