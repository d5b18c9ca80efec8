"""Copies of a few elements of each tensor, which show later whether the tensor was changed."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from colotrain.audit import model

MOST = 32
"""Approximate number of elements per tensor."""
Sample = dict[tuple[int, torch.Size], Tensor]
"""Id and local shape of a tensor → some of its elements."""


def sample(tensors: Iterable[Tensor | None]) -> Sample:
    """Return copies of elements of this rank's part of each tensor, spread evenly over it."""
    found = {}
    for tensor in tensors:
        if tensor is not None:
            own = model.local(tensor.detach())
            flat = (own.coalesce().values() if own.is_sparse else own).reshape(-1)
            key = id(tensor), own.shape  # a shard and the whole may be one tensor in turns
            found[key] = flat[:: max(1, flat.numel() // MOST)].clone()
    return found


def are_same(one: Sample, other: Sample) -> bool:
    """Whether all tensors of both samples are the same ones, unchanged."""
    return one.keys() == other.keys() and not has_changed(one, other)


def has_changed(one: Sample, other: Sample) -> bool:
    """Whether a tensor of both samples is not the same in them."""
    return any(key in other and not value.equal(other[key]) for key, value in one.items())
