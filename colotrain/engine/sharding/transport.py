"""Connects the collectives of `fully_shard` to shared memory, for ranks of one host on CPU.

`fully_shard` asks for the buffer of an all-gather (`allocate`), fills it, calls the collective and
reads the result. Buffer and collective come from this module, so most data is never sent.
Reduce-scatters are replaced as a whole (`engine.sharding.reduce_scatter`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from colotrain.engine.comms import exchange
from colotrain.engine.comms.all_gather import Channel
from colotrain.engine.comms.shared_memory import Unavailable
from colotrain.engine.sharding.fsdp_internals import (
    AllGather,
    DefaultAllGather,
    forget_gathered,
    modules_of,
    state_of,
)
from colotrain.engine.sharding.reduce_scatter import Reduction, SingleRankGradients
from colotrain.engine.sharding.sharded_model import ShardedModel, numel_of
from colotrain.engine.sharding.shared_parameters import OneRankUnshard
from colotrain.spec.cpu_memory import LARGEST_BUFFER_BYTES


class SharedAllGather(AllGather):
    """`fully_shard`'s all-gather, carried out by a `Channel`."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        numel = math.prod(int(n) for n in size)
        taken = self.channel.buffer.take(numel, dtype) if device.type == "cpu" else None
        return torch.empty(*size, dtype=dtype, device=device) if taken is None else taken

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gather. All ranks of the channel's group must call; the result is there on return."""
        if output_tensor.device.type != "cpu":
            return DefaultAllGather()(output_tensor, input_tensor, group, async_op)
        assert group == self.channel.group, "an all-gather over another group than its buffer's"
        self.channel.all_gather(output_tensor, input_tensor)
        return Done() if async_op else None


class Done(dist.Work):
    """Work that was complete before it was returned."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class Transport:
    """The shared memory of a sharded model's collectives."""

    def __init__(self, sharded: ShardedModel, channel: Channel, reduction: Reduction) -> None:
        self.sharded, self.channel, self.reduction = sharded, channel, reduction

    @property
    def num_bytes(self) -> int:
        """Bytes of shared memory on the host, for all ranks of the shard group together."""
        return self.channel.memory.num_bytes + self.reduction.memory.num_bytes

    def close(self) -> None:
        """Return to the process group's collectives. All ranks must call, between two steps."""
        _set_all_gather(self.sharded, DefaultAllGather())
        self.reduction.close()
        self.channel.memory.close()


def install(sharded: ShardedModel) -> Transport | None:
    """Make the collectives of `sharded` use shared memory where its shard group is on one host.

    All ranks must call, after `shard_`. Returns None on all ranks where the process group is used:
    a shard group spans several hosts, or memory is short. Rank 0 then prints the reason to stderr.
    Where there is a single rank, `fully_shard`'s copies are left out on any device.
    """
    group = sharded.shard_group
    if sharded.comms.data_mesh.size() == 1:
        SingleRankGradients(sharded).install()
    if group.size() == 1:
        move = sharded.plugin.budget is not None
        for part in sharded.groups:
            for params in part.fsdp_groups:
                OneRankUnshard(params, move=move, stays=part.stays_gathered).install()
    if group.size() == 1 or sharded.comms.device != "cpu":
        return None
    channel, reduction, problem = None, None, None
    try:
        channel = Channel(group, buffer_bytes=buffer_bytes(sharded))
        reduction = Reduction(sharded)
    except Unavailable as error:
        problem = str(error)
    known = [text for text in exchange.all_gather(problem) if text]
    if channel is None or reduction is None or known:
        if dist.get_rank() == 0:
            print(f"shared memory is not used between ranks: {known[0]}", file=sys.stderr)
        return None
    _set_all_gather(sharded, SharedAllGather(channel))
    reduction.install()
    for sharded_group in sharded.groups:
        state = state_of(sharded_group.handle)
        for module in modules_of(state):
            module.register_forward_pre_hook(partial(_drop_buffer, state))
    return Transport(sharded, channel, reduction)


def _drop_buffer(state: Any, *_: object) -> None:
    """Drop the buffer of a group's all-gather, which `fully_shard` keeps until the next one.

    A GPU's stream may still copy from it; on CPU the copy is done when the group's forward begins.
    """
    forget_gathered(state)


def buffer_bytes(sharded: ShardedModel) -> int:
    """Return the bytes of the largest all-gather whose output should be in shared memory."""
    size, largest = sharded.plugin.dp_shard, 0
    for group in sharded.groups:
        num_bytes = sum(
            numel_of(p) * size * (p.mp_policy.param_dtype or p.sharded_param.dtype).itemsize
            for p in group.params
        )
        if num_bytes <= LARGEST_BUFFER_BYTES:
            largest = max(largest, num_bytes)
    return largest


def _set_all_gather(sharded: ShardedModel, gather: AllGather) -> None:
    for group in sharded.groups:
        group.handle.set_custom_all_gather(gather)
