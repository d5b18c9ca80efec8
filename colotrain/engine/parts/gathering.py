"""Joining the parts of a tensor that ranks have."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from colotrain.engine.comms.groups import Groups
from colotrain.engine.parts.part_map import Part
from colotrain.spec.axes import PP


def gather_whole(part: Part, local: Tensor, comms: Groups) -> Tensor:
    """Return the whole tensor, where `local` are this rank's numbers. All ranks must call.

    The result is on the device of `local`.
    """
    if part.slices is None:
        whole = local.new_empty(part.whole)
    else:
        whole = local
        for axis, dim in reversed([*part.divided.items()]):
            length = part.whole[dim]
            for outer, other in part.divided.items():
                if outer == axis:
                    break
                length //= comms[outer].size() if other == dim else 1
            whole = _join(whole, dim, length, comms[axis])
    if comms.ranks.size(PP) > 1:
        whole = whole.contiguous()
        dist.broadcast(whole, group=comms[PP], group_src=part.stages[0])
    return whole


def _join(own: Tensor, dim: int, length: int, group: dist.ProcessGroup) -> Tensor:
    """Join the parts of a dimension of `length`, of which later ranks may have less, or nothing."""
    size = group.size()
    if size == 1:
        return own
    shape = list(own.shape)
    shape[dim] = -(-length // size)
    padded = own.new_zeros(shape)
    padded.narrow(dim, 0, own.shape[dim]).copy_(own)
    parts = [torch.empty_like(padded).view(torch.uint8) for _ in range(size)]
    dist.all_gather(parts, padded.view(torch.uint8), group=group)
    return torch.cat([part.view(padded.dtype) for part in parts], dim).narrow(dim, 0, length)
