"""Whole tensors: joining the parts that ranks have of one, and leaving each rank its part."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from colotrain import module_tree
from colotrain.engine.comms.groups import Groups
from colotrain.engine.parts.part_map import Part, PartMap, local_part
from colotrain.models.filling import Shards
from colotrain.spec.axes import PP


def gather_whole(part: Part, local: Tensor, comms: Groups) -> Tensor:
    """Return the whole tensor, on the device of `local`, this rank's part. All ranks must call."""
    whole = local if part.is_here else local.new_empty(part.whole)
    steps: list[tuple[dist.ProcessGroup, int, int]] = []
    sizes, divided = list(part.whole), part.divided if part.is_here else {}
    for axis, dim in divided.items():
        steps.append((comms[axis], dim, sizes[dim]))
        sizes[dim] //= comms[axis].size()  # only the innermost division may be uneven
    for group, dim, length in reversed(steps):
        whole = _join(whole, dim, length, group)
    if comms.ranks.size(PP) > 1:
        whole = whole.contiguous()
        dist.broadcast(whole, group=comms[PP], group_src=part.stages[0])
    return whole


def _join(own: Tensor, dim: int, length: int, group: dist.ProcessGroup) -> Tensor:
    """Join the parts of a dimension of `length`, of which later ranks may have less, or nothing."""
    if group.size() == 1:
        return own
    shape = list(own.shape)
    shape[dim] = -(-length // group.size())
    padded = own.new_zeros(shape)
    padded.narrow(dim, 0, own.shape[dim]).copy_(own)
    parts = [torch.empty_like(padded).view(torch.uint8) for _ in range(group.size())]
    dist.all_gather(parts, padded.view(torch.uint8), group=group)
    return torch.cat([part.view(padded.dtype) for part in parts], dim).narrow(dim, 0, length)


def own_part(part: Part, whole: Tensor) -> Tensor:
    """Return a view of this rank's part of a whole tensor."""
    return whole[part.slices]


def shards_of(
    model: nn.Module,
    parts: PartMap,
    comms: Groups,
    *,
    release: Callable[[Tensor], None],
    ahead_bytes: int,
) -> Shards:
    """Return the functions that store and load this rank's part of each parameter.

    What only another stage has is not stored, and is loaded from there.
    """
    known = {id(p): parts[name] for name, p in module_tree.named_parameters(model)}

    def write(parameter: Tensor, whole: Tensor) -> None:
        if (part := known[id(parameter)]).is_here:
            local_part(parameter).copy_(own_part(part, whole))

    def read(parameter: Tensor) -> Tensor:
        part = known[id(parameter)]
        if part.is_here:
            return gather_whole(part, local_part(parameter).detach().cpu(), comms)
        return gather_whole(part, torch.empty(part.sizes, dtype=parameter.dtype), comms)

    def slices(tensor: Tensor) -> tuple[slice, ...]:
        part = known.get(id(tensor))
        return part.slices if part is not None and part.is_sharded else ()

    return Shards(
        write=write,
        read=read,
        release=release,
        shape=lambda p: known[id(p)].whole,
        slices=slices,
        ahead_bytes=ahead_bytes,
    )
