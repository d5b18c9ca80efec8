"""Collectives of plain data: JSON, and tensors whose types and shapes it tells.

Torch's collectives of objects unpickle what they receive, over connections that anybody who reaches
the machine can make: that would run a stranger's code. All tensors are on the CPU, whatever device
the user's code has made torch's default.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

MOST_BYTES = 1 << 32
"""Bytes of JSON that one rank may tell."""


Group = dist.ProcessGroup | None
"""Ranks that exchange; None: all."""


def broadcast(value: Any, group: Group = None, *, src: int = 0) -> Any:
    """Return the value of the group's rank `src` on each of its ranks. All of them must call."""
    is_src = dist.get_rank(group) == src
    data = _encoded(value) if is_src else torch.empty(0, dtype=torch.uint8, device="cpu")
    return json.loads(_broadcast_bytes(data, group, src).numpy().tobytes())


def all_gather(value: Any, group: Group = None) -> list[Any]:
    """Return the values of the group's ranks, in their order. All of them must call."""
    data = _encoded(value)
    world = dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([data.numel()], device="cpu"), group=group)
    counts = [_checked(size) for size in sizes]
    padded = torch.zeros(max(counts), dtype=torch.uint8, device="cpu")
    padded[: data.numel()] = data
    everyone = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(everyone, padded, group=group)
    pairs = zip(everyone, counts, strict=True)
    return [json.loads(one[:count].numpy().tobytes()) for one, count in pairs]


def is_any(found: bool) -> bool:
    """Whether any rank has found it. All ranks must call."""
    number = torch.tensor(float(found), device="cpu")
    dist.all_reduce(number)
    return number.item() != 0


def broadcast_tensors(
    tensors: Mapping[str, Tensor], group: Group = None, *, src: int = 0
) -> dict[str, Tensor]:
    """Return the tensors of the group's rank `src`, on the CPU, on each of its ranks.

    All of them must call.
    """
    about = broadcast(_describe(tensors), group, src=src)
    return _unpacked(about, _broadcast_bytes(_packed(tensors), group, src))


def gather_tensors(tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return each rank's tensors, on the CPU, on rank 0; nothing on others. All must call."""
    abouts = all_gather(_describe(tensors))
    data = _packed(tensors)
    if dist.get_rank() != 0:
        if data.numel():
            dist.send(data, dst=0)
        return []
    found = [_unpacked(abouts[0], data)]
    for rank, about in enumerate(abouts[1:], start=1):
        data = torch.empty(_num_bytes(about), dtype=torch.uint8, device="cpu")
        if data.numel():
            dist.recv(data, src=rank)
        found.append(_unpacked(about, data))
    return found


def _encoded(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _checked(size: Tensor) -> int:
    num_bytes = int(size.item())
    if not 0 <= num_bytes <= MOST_BYTES:
        raise ValueError(f"a rank tells {num_bytes} bytes")
    return num_bytes


def _broadcast_bytes(data: Tensor, group: Group, src: int) -> Tensor:
    """Return the bytes of the group's rank `src`."""
    size = torch.tensor([data.numel()], device="cpu")
    dist.broadcast(size, group=group, group_src=src)
    if dist.get_rank(group) != src:
        data = torch.empty(_checked(size), dtype=torch.uint8, device="cpu")
    if data.numel():
        dist.broadcast(data, group=group, group_src=src)
    return data


def _describe(tensors: Mapping[str, Tensor]) -> list[tuple[str, str, list[int]]]:
    """Return the name, type and shape of each."""
    return [
        (name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in tensors.items()
    ]


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name} is no type of tensors")
    return found


def _num_bytes(about: list[Any]) -> int:
    return sum(torch.Size(shape).numel() * _dtype(dtype).itemsize for _, dtype, shape in about)


def _packed(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the bytes of all, one after another."""
    flat = [t.detach().cpu().reshape(-1).view(torch.uint8) for t in tensors.values()]
    return torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8, device="cpu")


def _unpacked(about: list[Any], data: Tensor) -> dict[str, Tensor]:
    found, at = {}, 0
    for name, dtype, shape in about:
        end = at + _num_bytes([(name, dtype, shape)])
        # a copy, because a view of another type needs an offset that fits
        found[name] = data[at:end].clone().view(_dtype(dtype)).view(shape)
        at = end
    return found
