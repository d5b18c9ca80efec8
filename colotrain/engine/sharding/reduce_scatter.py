"""Reduce-scatter of gradients between the ranks of one host, through shared memory.

It replaces the reduce-scatters of `fully_shard`'s groups. When backward has the gradients of a
group, a rank copies the rows that its peers hold into shared memory and posts their semaphores. It
sums its own rows only when backward has the next group's gradients: ranks are rarely a whole group
behind, so its peers have posted by then. Sums are in rank order, whichever rank came first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from colotrain.engine.comms.shared_memory import PAGE, SharedMemory, round_up
from colotrain.engine.comms.waiting import waiting
from colotrain.engine.sharding.fsdp_internals import (
    DDPMeshInfo,
    dtype_of,
    local_of,
    reduce_dtype_of,
    replicas_of,
    rests_below,
    unsharded_of,
    zero_gradient,
)
from colotrain.engine.sharding.sharded_model import ShardedModel, numel_of
from colotrain.engine.sharding.spans import span
from colotrain.errors import ColotrainError
from colotrain.spec.cpu_memory import MOST_WRITTEN_BYTES, NUM_SLOTS
from colotrain.torch_internals import (
    call_after_backward,
    copy_together,
    hooks_after_gradient_of,
)

SUM_BYTES = 256 << 10
"""Bytes summed at a time, so that a piece stays in a core's cache."""
WRITTEN, READ, NUM_SEMAPHORES = 0, 1, 2  # what the semaphores count


@dataclass(slots=True)
class Gradient:
    """The gradient of one parameter in one backward."""

    param: Any
    """torch's record of the parameter (FSDPParam)."""
    unsharded: Tensor
    """This rank's gradient of the unsharded parameter, flat."""
    sums: Tensor | None = None
    """This rank's rows of the gradient summed over ranks, flat."""
    onto: bool = False
    """Whether sums are added to what `sums` already holds."""

    def rows(self, rank: int, first: int, last: int) -> Tensor:
        """Return elements `first` to `last` of the shard of `rank`, without padding."""
        start = rank * numel_of(self.param)
        return self.unsharded[start + first : start + last]


@dataclass(slots=True)
class Gradients:
    """The gradients of one group in one backward."""

    index: int
    """Position of the group in `Reduction.groups`."""
    params: Any
    """torch's record of the group (FSDPParamGroup)."""
    each: list[Gradient]
    dtype: torch.dtype
    """Dtype in which ranks exchange the gradients."""
    flat: Tensor | None = None
    """All sums in one tensor, where they are all-reduced between replicas."""

    @property
    def replicated(self) -> bool:
        return isinstance(self.params.mesh_info, DDPMeshInfo)


@dataclass(slots=True)
class Message:
    """The part of a group's gradients that is exchanged at once."""

    gradients: Gradients
    parts: list[tuple[Gradient, int, int]] = field(default_factory=list)
    """Gradient, and the first and last element of each shard that are exchanged."""
    num_bytes: int = 0
    slot: int = 0
    is_last: bool = False


class Reduction:
    """Sums the gradients of a sharded model over its shard group, whose ranks run on one host.

    All ranks must create it together. Raises `Unavailable` on all of them or on none; backward
    raises `PeerLost`, and `ColotrainError` where ranks reduce different groups.
    """

    def __init__(self, sharded: ShardedModel) -> None:
        group = sharded.shard_group
        self.rank, self.size = group.rank(), group.size()
        self.peers = [rank for rank in range(self.size) if rank != self.rank]
        self.groups = [params for part in sharded.groups for params in part.fsdp_groups]
        self.names = [part.name for part in sharded.groups for _ in part.fsdp_groups]
        self.part_bytes = part_bytes(sharded)
        self.header_bytes = round_up(self.size * NUM_SLOTS * 16, PAGE)
        num_parts = NUM_SLOTS * self.size * (self.size - 1)
        num_bytes = self.header_bytes + num_parts * self.part_bytes
        self.memory = SharedMemory(group, num_bytes, num_semaphores=NUM_SEMAPHORES)
        headers = self.memory.bytes(0, self.size * NUM_SLOTS * 16).view(torch.int64)
        self.headers = headers.view(NUM_SLOTS, self.size, 2)
        """int64 [slot, rank, 2], shared: index of the group and bytes that a rank has written."""
        self.written: deque[Message] = deque()
        """Messages that this rank has written and not yet summed."""
        self.count = 0
        self.partial: dict[int, Tensor] = {}
        """Group → sums of the micro-batches so far, not yet all-reduced between replicas."""

    def install(self) -> None:
        """Replace `fully_shard`'s own reduce-scatters. All ranks must call."""
        for index, params in enumerate(self.groups):
            params.post_backward = partial(self._post_backward, index, params)

    def close(self) -> None:
        """Return to `fully_shard`'s own reduce-scatters. All ranks must call, between two steps."""
        for params in self.groups:
            del params.post_backward
        self.memory.close()

    def _post_backward(self, index: int, params: Any, *_: object) -> None:
        if each := take_gradients(params):
            dtype = reduce_dtype_of(params) or each[0].unsharded.dtype
            self.reduce(Gradients(index, params, each, dtype))

    def reduce(self, gradients: Gradients) -> None:
        """Write a group's gradients for the peers; sum those of the group before. Collective."""
        if not self.written:
            call_after_backward(self.finish)
        for message in self._messages(gradients):
            self._write(message)
            if len(self.written) == NUM_SLOTS:
                self._sum(self.written.popleft())

    def finish(self) -> None:
        """Sum every message that is still to be summed, at the end of a backward."""
        with span("reduce"):
            while self.written:
                self._sum(self.written.popleft())

    def _messages(self, gradients: Gradients) -> Iterator[Message]:
        itemsize = gradients.dtype.itemsize
        message = Message(gradients)
        for gradient in gradients.each:
            first, numel = 0, numel_of(gradient.param)
            while first < numel:
                if message.num_bytes + itemsize > self.part_bytes:
                    yield message
                    message = Message(gradients)
                room = (self.part_bytes - message.num_bytes) // itemsize
                last = min(numel, first + room)
                message.parts.append((gradient, first, last))
                message.num_bytes += (last - first) * itemsize
                first = last
        message.is_last = True
        yield message

    def _write(self, message: Message) -> None:
        message.slot = self.count % NUM_SLOTS
        if self.count >= NUM_SLOTS:
            for peer in self.peers:
                self.memory.wait(READ, peer, what="reduce-scatter")
        self.count += 1
        header = torch.tensor((message.gradients.index, message.num_bytes))
        self.headers[message.slot, self.rank] = header
        for peer in self.peers:
            parts = self._parts(message, self.rank, peer)
            for part, (gradient, first, last) in zip(parts, message.parts, strict=True):
                rows = gradient.rows(peer, first, last)
                part[: rows.numel()] = rows
            self.memory.post(WRITTEN, peer)
        self.written.append(message)

    def _parts(self, message: Message, writer: int, reader: int) -> Sequence[Tensor]:
        """Return the memory in which `writer` puts data for `reader`: one flat tensor per part."""
        place = (message.slot * self.size + writer) * (self.size - 1) + reader - (reader > writer)
        at = self.header_bytes + place * self.part_bytes
        flat = self.memory.bytes(at, message.num_bytes).view(message.gradients.dtype)
        return flat.split([last - first for _, first, last in message.parts])

    def _sum(self, message: Message) -> None:
        gradients = message.gradients
        for peer in self.peers:
            self.memory.wait(WRITTEN, peer, what="reduce-scatter")
        headers = self.headers[message.slot].tolist()
        if any(header != headers[self.rank] for header in headers):
            names = ", ".join(self.names[header[0]] or "the rest" for header in headers)
            raise ColotrainError(
                f"model: the ranks reduce different groups of parameters at once ({names})",
                "let forward call its blocks equally often and in one order, whatever the values",
            )
        if gradients.each[0].sums is None:
            self._begin(gradients)
        of_peers = [self._parts(message, peer, self.rank) for peer in self.peers]
        for (gradient, first, last), *others in zip(message.parts, *of_peers, strict=True):
            own = gradient.rows(self.rank, first, last)
            summands = [other[: own.numel()] for other in others]
            summands.insert(self.rank, own)
            assert gradient.sums is not None
            sum_in_order(summands, gradient.sums[first : first + own.numel()], onto=gradient.onto)
        for peer in self.peers:
            self.memory.post(READ, peer)
        if message.is_last:
            self._end(gradients)

    def _begin(self, gradients: Gradients) -> None:
        """Choose where the sums go: onto those of earlier micro-batches, or into new memory."""
        if gradients.replicated:  # sums become gradients only after the step's last micro-batch
            known = self.partial.pop(gradients.index, None)
            gradients.flat = _allocate_sums(gradients.each, gradients.dtype, onto=known)
            return
        new = []
        for gradient in gradients.each:
            if (grad := gradient.param.sharded_param.grad) is None:
                new.append(gradient)
            else:
                gradient.sums, gradient.onto = local_of(grad).view(-1), True
        _allocate_sums(new, dtype_of(gradients.params) or gradients.dtype)

    def _end(self, gradients: Gradients) -> None:
        """Store the sums as gradients, after the all-reduce between replicas if there are any."""
        params = gradients.params
        if gradients.replicated:
            assert gradients.flat is not None
            if not params.all_reduce_grads:
                self.partial[gradients.index] = gradients.flat
                return
            with waiting():
                dist.all_reduce(gradients.flat, group=replicas_of(params))
        for gradient in gradients.each:
            assert gradient.sums is not None
            is_there = gradient.onto and not gradients.replicated
            accumulate_gradient(params, gradient, gradient.sums, is_there=is_there)


class SingleRankGradients:
    """Stores the gradients of a model on a single rank, copying only what is cast.

    `fully_shard` copies each group's gradients three times even then: to reduce them, to divide
    them by one, and out of that. Groups below a GPU keep its way: their gradients move together.
    """

    def __init__(self, sharded: ShardedModel) -> None:
        self.groups = [params for part in sharded.groups for params in part.fsdp_groups]

    def install(self) -> None:
        """Replace `fully_shard`'s own reduce-scatters."""
        for params in self.groups:
            params.post_backward = partial(self._post_backward, params)

    def _post_backward(self, params: Any, *_: object) -> None:
        if any(rests_below(param) for param in params.fsdp_params):
            type(params).post_backward(params)
            return
        each = take_gradients(params)
        _cast_first(each, dtype_of(params))
        for gradient in each:
            accumulate_gradient(params, gradient, gradient.unsharded, is_there=False)


def _cast_first(each: Sequence[Gradient], dtype: torch.dtype | None) -> None:
    """Cast gradients to which later ones will be added, with one call for all of a group."""
    first = [g for g in each if g.param.sharded_param.grad is None and g.unsharded.dtype != dtype]
    if not first or dtype is None:
        return
    cast = [torch.empty_like(gradient.unsharded, dtype=dtype) for gradient in first]
    copy_together(cast, [gradient.unsharded for gradient in first])
    for gradient, whole in zip(first, cast, strict=True):
        gradient.unsharded = whole


def take_gradients(params: Any) -> list[Gradient]:
    """Take a group's gradients when backward has them all, so that `fully_shard` reduces none.

    Its own `post_backward` (torch 2.13) still runs: it frees the parameters.
    """
    original = type(params).post_backward
    if not params.reduce_grads:
        original(params)
        return []
    even = params.reduce_scatter_unused_params
    each = [
        taken for param in params.fsdp_params if (taken := _take_gradient(param, even)) is not None
    ]
    try:
        params.reduce_scatter_unused_params = False
        original(params)
    finally:
        params.reduce_scatter_unused_params = even
    return each


def accumulate_gradient(params: Any, gradient: Gradient, sums: Tensor, *, is_there: bool) -> None:
    """Add `sums` to the sharded parameter's gradient, then run its post-accumulate hooks.

    With `is_there` they were added already.
    """
    param, leaf = gradient.param, gradient.param.sharded_param
    if not is_there:
        shape, stride = param.sharded_size, param.contiguous_sharded_stride
        rows = sums.as_strided(shape, stride, sums.storage_offset())
        if leaf.grad is None:
            leaf.grad = param.to_sharded_dtensor(rows.to(dtype_of(params) or rows.dtype))
        else:
            local_of(leaf.grad).add_(rows)
    for hook in hooks_after_gradient_of(leaf).values():
        hook(leaf)


def _allocate_sums(
    each: Sequence[Gradient], dtype: torch.dtype, *, onto: Tensor | None = None
) -> Tensor:
    """Let the sums of `each` lie one after the other in `onto`, or in new memory."""
    sizes = [numel_of(gradient.param) for gradient in each]
    flat = torch.empty(sum(sizes), dtype=dtype) if onto is None else onto
    for gradient, sums in zip(each, flat.split(sizes), strict=True):
        gradient.sums, gradient.onto = sums, onto is not None
    return flat


def _take_gradient(param: Any, even: bool) -> Gradient | None:
    """Take the gradient from `param`; with `even`, zeros for a trainable one that was not used."""
    if unsharded_of(param) is None:
        return None
    param.accumulate_unsharded_grad_if_needed()
    if param.unsharded_accumulated_grad is not None:
        whole, param.unsharded_accumulated_grad = param.unsharded_accumulated_grad_data, None
    elif param.unsharded_param.grad is not None:
        whole, param.unsharded_param.grad = param.unsharded_grad_data, None
    elif even and param.unsharded_param.requires_grad:
        whole = zero_gradient(param)
    else:
        return None
    return Gradient(param, whole.contiguous().view(-1))


def sum_in_order(parts: Sequence[Tensor], out: Tensor, *, onto: bool = False) -> None:
    """Set `out` to parts[0] + parts[1] + … in this order; with `onto`, add that sum to `out`.

    16-bit floats are summed in fp32.
    """
    narrow = out.is_floating_point() and out.dtype.itemsize < 4
    dtype = torch.float32 if narrow else out.dtype
    step = SUM_BYTES // dtype.itemsize
    scratch = torch.empty(min(step, out.numel()), dtype=dtype)
    for first in range(0, out.numel(), step):
        piece = out[first : first + step]
        total = scratch[: piece.numel()]
        total.copy_(parts[0][first : first + step])
        for part in parts[1:]:
            total += part[first : first + step]
        if onto:
            piece += total
        else:
            piece.copy_(total)


def part_bytes(sharded: ShardedModel) -> int:
    """Return the most bytes that a rank writes for another rank at once."""
    largest = 0
    for group in sharded.groups:
        total = 0
        for param in group.params:
            policy = param.mp_policy
            dtype = policy.reduce_dtype or policy.param_dtype or param.sharded_param.dtype
            total += numel_of(param) * dtype.itemsize
        largest = max(largest, total)
    size = sharded.plugin.dp_shard
    most = MOST_WRITTEN_BYTES // (NUM_SLOTS * (size - 1))
    return round_up(min(largest, most), PAGE)
