"""Names and places of a checkpoint's tensors where ranks hold parts of whole parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from colotrain.engine.checkpoint.plain_state import PLAIN
from colotrain.engine.sharding.shards import begin_of, local_shard
from colotrain.engine.tensor_parallel import TensorParts


def named_in(name: str) -> str:
    """Return the parameter (or buffer) that the tensor `name` is, or is the optimizer state of."""
    kind, _, rest = name.removeprefix(PLAIN).partition(".")
    return rest.rpartition(".")[0] if kind == "optim" else rest


def parameter_of(name: str, parts: TensorParts) -> str | None:
    """Return the divided parameter that the tensor `name` is, or is the optimizer state of."""
    kind, found = name.partition(".")[0], named_in(name)
    return found if kind in ("model", "optim") and found in parts.splits else None


class Part(Tensor):
    """A part of a tensor, which torch's loading fills from files that hold other parts.

    It has the methods by which DTensor takes part in loading; torch takes only tensors.
    """

    local: Tensor
    whole: torch.Size
    begin: torch.Size

    @staticmethod
    def of(local: Tensor, whole: tuple[int, ...], begin: tuple[int, ...]) -> Part:
        part = local.detach().as_subclass(Part)
        part.local, part.whole, part.begin = local, torch.Size(whole), torch.Size(begin)
        return part

    def size(self, dim: int | None = None) -> Any:
        return self.whole if dim is None else self.whole[dim]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets=self.begin, sizes=self.local.shape)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.local


def as_parts(wanted: Mapping[str, Tensor], parts: TensorParts) -> dict[str, Any]:
    """Return `wanted` with parts of parameters, and of their state, as parts of whole tensors."""
    return {name: as_part(name, tensor, parts) for name, tensor in wanted.items()}


def as_part(name: str, tensor: Tensor, parts: TensorParts) -> Tensor:
    owner = parameter_of(name, parts)
    if owner is None or not tensor.ndim:
        return tensor
    whole = parts.whole_shape(owner, tensor.shape)
    return Part.of(local_shard(tensor), whole, begin_of(owner, tensor, parts))
