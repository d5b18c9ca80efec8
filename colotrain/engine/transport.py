"""Shared memory under the collectives of `fully_shard`, for ranks of one host on CPU.

`fully_shard` asks for the buffers of its collectives (`allocate`), fills them, calls the
collective and reads the result; both take part here, so that most data is never sent at all.
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
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)

from colotrain.engine.channel import Buffer, Channel
from colotrain.engine.sharding import ShardedModel
from colotrain.engine.shared_memory import Unavailable

LARGEST_BUFFER_BYTES = 64 << 20
"""Larger groups go through the window, so that little memory is kept between their uses."""


class SharedAllGather(AllGather):
    """`fully_shard`'s all-gather over a channel."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        shared = device.type == "cpu"
        return _take(self.channel.gather_buffer if shared else None, size, dtype, device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        """All ranks of the channel's group must call; done on return."""
        if output_tensor.device.type != "cpu":
            return DefaultAllGather()(output_tensor, input_tensor, group, async_op)
        assert group == self.channel.group, "an all-gather over another group than its buffer's"
        self.channel.all_gather(output_tensor, input_tensor)
        return Done() if async_op else None


class SharedReduceScatter(ReduceScatter):
    """`fully_shard`'s reduce-scatter over a channel."""

    def __init__(self, channel: Channel) -> None:
        self.channel, self.is_input = channel, True

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """A shared buffer for an input, which is asked for first; the output is kept for long."""
        shared = self.is_input and device.type == "cpu"
        self.is_input = False
        return _take(self.channel.reduce_buffer if shared else None, size, dtype, device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        """All ranks of the channel's group must call; done on return."""
        self.is_input = True
        ours = group == self.channel.group and op == dist.ReduceOp.SUM
        if not ours or input_tensor.device.type != "cpu":
            return DefaultReduceScatter()(output_tensor, input_tensor, group, op, async_op)
        self.channel.reduce_scatter(output_tensor, input_tensor)
        return Done() if async_op else None


def _take(
    buffer: Buffer | None,
    size: Sequence[int | torch.SymInt],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    taken = None if buffer is None else buffer.take(math.prod(int(n) for n in size), dtype)
    return torch.empty(*size, dtype=dtype, device=device) if taken is None else taken


class Done(dist.Work):
    """Work that was finished when it was handed out."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class Transport:
    """The shared memory of a sharded model's collectives."""

    def __init__(self, sharded: ShardedModel, channel: Channel) -> None:
        self.sharded, self.channel = sharded, channel

    @property
    def num_bytes(self) -> int:
        """Shared memory on the host, for all ranks of the shard group together."""
        return self.channel.num_bytes

    def close(self) -> None:
        """Go back to the process group. All ranks must call, between two steps."""
        _use(self.sharded, DefaultAllGather(), DefaultReduceScatter())
        self.channel.memory.close()


def install(sharded: ShardedModel) -> Transport | None:
    """Let the collectives of `sharded` go through shared memory where its shard group is one host.

    All ranks must call, after `shard_`. Returns None on all ranks, and rank 0 says why on stderr,
    where the process group is to be used: several hosts in a shard group, or no memory for it.
    """
    group = sharded.mesh.get_group(sharded.mesh.ndim - 1)
    if sharded.mesh.device_type != "cpu" or group.size() == 1:
        return None
    gather_bytes, reduce_bytes = buffer_bytes(sharded)
    channel, problem = None, None
    try:
        channel = Channel(group, gather_bytes=gather_bytes, reduce_bytes=reduce_bytes)
    except Unavailable as error:
        problem = str(error)
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    known = [text for text in problems if text]
    if channel is None or known:
        if dist.get_rank() == 0:
            print(f"shared memory is not used between ranks: {known[0]}", file=sys.stderr)
        return None
    _use(sharded, SharedAllGather(channel), SharedReduceScatter(channel))
    for sharded_group in sharded.groups:
        state = sharded_group.handle._get_fsdp_state()
        for module in state._modules:
            module.register_forward_pre_hook(partial(_let_go, state))
    return Transport(sharded, channel)


def _let_go(state: Any, *_: object) -> None:
    """Drop what a group was gathered in; `fully_shard` holds it until the next group is there.

    A GPU's stream may still copy from it; a CPU has done so when the group's forward begins.
    """
    state._comm_ctx.all_gather_state = None


def buffer_bytes(sharded: ShardedModel) -> tuple[int, int]:
    """The largest buffers worth sharing: of an all-gather, and of a reduce-scatter."""
    size = sharded.mesh.size(sharded.mesh.ndim - 1)
    largest = [0, 0]
    for group in sharded.groups:
        sums = [0, 0]
        for param in group.params:
            policy = param.mp_policy
            numel = param.padded_sharded_param_size.numel() * size
            dtypes = (policy.param_dtype, policy.reduce_dtype or policy.param_dtype)
            for kind, dtype in enumerate(dtypes):
                sums[kind] += numel * (dtype or param.sharded_param.dtype).itemsize
        fits = [n if n <= LARGEST_BUFFER_BYTES else 0 for n in sums]
        largest = [max(pair) for pair in zip(largest, fits, strict=True)]
    return largest[0], largest[1]


def _use(sharded: ShardedModel, gather: AllGather, reduce: ReduceScatter) -> None:
    for group in sharded.groups:
        group.handle.set_custom_all_gather(gather)
        group.handle.set_custom_reduce_scatter(reduce)
