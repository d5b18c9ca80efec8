"""A rank's part of a tensor that is sharded while it is used: as tensor parallelism has it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from colotrain.audit import model


def in_its_place(tensor: Any) -> Tensor:
    """Return this rank's part of a DTensor among zeros: the sum over ranks is the whole tensor.

    Of what is replicated each rank has the whole. Any other tensor is returned as it is.
    """
    if not model.is_dtensor(tensor):
        return tensor
    own, mesh = tensor.to_local(), tensor.device_mesh
    where = [torch.arange(size, device=own.device) for size in tensor.shape]
    axes = zip(tensor.placements, mesh.get_coordinate(), strict=True)
    for axis, (placement, place) in enumerate(axes):
        num, dim = mesh.size(axis), getattr(placement, "dim", None)
        if dim is not None:
            pieces = where[dim].chunk(getattr(placement, "split_factor", 1))
            where[dim] = torch.cat(
                [torch.tensor_split(p, bounds(len(p), num))[place] for p in pieces]
            )
        elif getattr(placement, "reduce_op", "sum") == "avg":
            own = own / num
    found = torch.zeros(tensor.shape, dtype=own.dtype, device=own.device)
    found[torch.meshgrid(*where, indexing="ij")] = own
    return found


def bounds(length: int, num: int) -> list[int]:
    """Return where `num` ranks' parts of a dimension end, as `Shard` cuts it; but the last one."""
    size = -(-length // num)
    return [min(length, size * place) for place in range(1, num)]


def peers(tensor: Any) -> frozenset[int]:
    """Return the ranks that have the parts of a DTensor; empty for any other tensor."""
    if not model.is_dtensor(tensor):
        return frozenset()
    mesh = tensor.device_mesh
    axes = zip(tensor.placements, mesh.get_coordinate(), strict=True)
    index = tuple(slice(None) if placement.is_shard() else place for placement, place in axes)
    ranks = mesh.mesh[index].flatten().tolist()
    return frozenset(ranks if len(ranks) > 1 else ())
