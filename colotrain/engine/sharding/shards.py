"""This rank's part of each parameter: its rows, of its part of the matrix."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from colotrain import module_tree
from colotrain.engine.pipeline.stage import Stage
from colotrain.engine.tensor_parallel import TensorParts
from colotrain.models.filling import Shards
from colotrain.spec.axes import DP_SHARD


def shard_range(parameter: DTensor) -> tuple[int, int]:
    """Return first row and number of rows of dimension 0 of `parameter` that this rank holds.

    `fully_shard` cuts dimension 0 as `torch.chunk` does: later ranks may hold fewer rows or none.
    """
    group = parameter.device_mesh.get_group(DP_SHARD)
    rows = parameter.shape[0] if parameter.ndim else 1
    step = -(-rows // group.size())
    start = min(group.rank() * step, rows)
    return start, min(step, rows - start)


def begin_of(name: str, tensor: Tensor, parts: TensorParts) -> tuple[int, ...]:
    """Return the index, in the whole tensor, of the first element that this rank holds.

    `tensor` is a parameter, or laid out like one, with this `name`.
    """
    first, *rest = parts.begin(name, tensor.ndim) or (0,)
    row = shard_range(tensor)[0] if isinstance(tensor, DTensor) else 0
    return (first + row, *rest) if tensor.ndim else ()


def local_shard(parameter: Tensor) -> Tensor:
    """Return this rank's rows of `parameter`, sharing its memory."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def shards_of(
    model: nn.Module, parts: TensorParts, stage: Stage, release: Callable[[Tensor], None]
) -> Shards:
    """Return the functions that store and load this rank's part of each parameter.

    What another stage holds is not stored, and is loaded from there.
    """
    names = {id(p): name for name, p in module_tree.named_parameters(model)}

    def write(parameter: Tensor, whole: Tensor) -> None:
        name = names[id(parameter)]
        if stage.holds(name):
            write_shard(parameter, parts.own(name, whole))

    def read(parameter: Tensor) -> Tensor:
        name = names[id(parameter)]
        if stage.holds(name):
            return stage.from_holder(name, parts.join(name, gather_rows(parameter)))
        shape = parts.whole_shape(name, parameter.shape)
        return stage.from_holder(name, torch.empty(shape, dtype=parameter.dtype))

    return Shards(
        write=write,
        read=read,
        release=lambda p: release(p) if stage.holds(names[id(p)]) else None,
        shape=lambda p: parts.whole_shape(names[id(p)], p.shape),
    )


def slices_of(model: nn.Module, parts: TensorParts) -> Callable[[Tensor], tuple[slice, ...]]:
    """Return a function from a parameter or buffer to the slices of the whole that are here."""
    names = {id(p): name for name, p in module_tree.named_parameters(model)}

    def slices(tensor: Tensor) -> tuple[slice, ...]:
        name = names.get(id(tensor), "")
        if not isinstance(tensor, DTensor):
            return ()
        first, local = begin_of(name, tensor, parts), tensor.to_local()
        return tuple(slice(n, n + size) for n, size in zip(first, local.shape, strict=True))

    return slices


def write_shard(parameter: Tensor, whole: Tensor) -> None:
    """Copy this rank's rows of `whole` into `parameter` (a DTensor, or not sharded at all)."""
    if isinstance(parameter, DTensor):
        start, rows = shard_range(parameter)
        parameter.to_local().copy_(whole[start : start + rows])
    else:
        parameter.copy_(whole)


def gather_rows(parameter: Tensor) -> Tensor:
    """Return all of `parameter` on the CPU. All ranks of its shard group must call."""
    if not isinstance(parameter, DTensor):
        return parameter.detach().cpu()
    group = parameter.device_mesh.get_group(DP_SHARD)
    size, rows = group.size(), parameter.shape[0]
    own = parameter.to_local().detach().cpu()
    padded = own.new_zeros((-(-rows // size), *parameter.shape[1:]))
    padded[: own.shape[0]] = own
    parts = [torch.empty_like(padded).view(torch.uint8) for _ in range(size)]
    dist.all_gather(parts, padded.view(torch.uint8), group=group)
    return torch.cat([part.view(padded.dtype) for part in parts])[:rows]
