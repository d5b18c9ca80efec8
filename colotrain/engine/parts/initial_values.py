"""Storing and loading this rank's parts of parameters while they get their initial values."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from colotrain import module_tree
from colotrain.engine.comms.groups import Groups
from colotrain.engine.parts.gathering import gather_whole
from colotrain.engine.parts.part_map import Part, PartMap, local_part, own_part
from colotrain.models.filling import Shards


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
    names = {id(parameter): name for name, parameter in module_tree.named_parameters(model)}

    def part_of(parameter: Tensor) -> Part:
        return parts[names[id(parameter)]]

    def write(parameter: Tensor, whole: Tensor) -> None:
        part = part_of(parameter)
        if part.is_here:
            local_part(parameter).copy_(own_part(part, whole))

    def read(parameter: Tensor) -> Tensor:
        part = part_of(parameter)
        if part.is_here:
            local = local_part(parameter).detach().cpu()
        else:
            local = torch.empty(part.sizes, dtype=parameter.dtype)
        return gather_whole(part, local, comms)

    def slices(tensor: Tensor) -> tuple[slice, ...]:
        part = parts.get(names.get(id(tensor), ""))
        return part.slices or () if part is not None and part.is_sharded else ()

    return Shards(
        write=write,
        read=read,
        release=lambda p: release(p) if part_of(p).is_here else None,
        shape=lambda p: part_of(p).whole,
        slices=slices,
        ahead_bytes=ahead_bytes,
    )
