"""The memory of one group's tensors on this rank, and moving the tensors between tiers.

Parameters and gradients belong to `fully_shard`: its sharded tensors get other memory. In the state
of torch's optimizer, tensors are replaced by those of `GroupStorage.offloaded_state`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from colotrain.engine.offload.blocks import Block, Window, allocate, num_bytes_of
from colotrain.engine.offload.disk import DiskStore, Region
from colotrain.engine.sharding.fsdp_internals import (
    gather_from,
    gathered_dtype_of,
    local_of,
    put_shard,
)
from colotrain.engine.sharding.sharded_model import Group
from colotrain.spec.offload import Kind, Tier
from colotrain.torch_internals import copy_together

State = Mapping[str, Mapping[str, Tensor]]
"""Parameter name → key of its optimizer state → tensor."""


@dataclass(slots=True, kw_only=True)
class StateBlock:
    """Memory below a GPU for optimizer state that was made in the same update."""

    block: Block
    keys: list[tuple[str, str]]
    """Parameter name and key of the state of each of the block's tensors."""
    on_device: Tensor | None = None
    """Copy of the block during its group's update."""


@dataclass(slots=True, kw_only=True)
class GroupStorage:
    """The memory of one group's tensors on this rank."""

    index: int
    group: Group
    names: dict[str, Any]
    """Parameter name → torch's record of the parameter (FSDPParam)."""
    parameters: Tier
    """Tier in which the parameters are now; on CPU this is "host" or "disk"."""
    on_gpu: bool
    """Whether training computes on a GPU: what rests below it is then copied block by block."""
    regions: dict[Kind, list[Region]] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Parameter name → mapped memory for its sharded gradient."""
    offloaded_state: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """Parameter name → key → tensor of optimizer state in a tier below the device."""
    state_blocks: list[StateBlock] = field(default_factory=list)
    """The memory of `offloaded_state` below a GPU."""
    shards: Block | None = None
    """The memory of parameters below a GPU."""
    gathered: list[Tensor] = field(default_factory=list)
    """Copies of `shards` on the GPU that an all-gather has not taken yet, the first one last."""
    last_trained: str = ""
    """Name of the group's last parameter whose gradient is reduced."""

    def pages(self, *kinds: Kind) -> list[Region]:
        return [region for kind in kinds for region in self.regions.get(kind, [])]

    def holds(self, parameter: Tensor) -> bool:
        return any(param.sharded_param is parameter for param in self.names.values())

    def move_parameters(
        self, tier: Tier, store: DiskStore | None, window: Window, *, fresh: bool
    ) -> None:
        """Give the sharded parameters memory in `tier`; `fresh` ones have no values to copy."""
        params = list(self.names.values())
        sizes = [param.padded_sharded_param_size.numel() for param in params]
        dtypes = [param.sharded_param.dtype for param in params]
        if tier == "disk" and "parameters" not in self.regions:
            self.regions["parameters"] = [take(store, sizes, dtypes)]
        if self.on_gpu:
            region = self.regions["parameters"][0] if tier == "disk" else None
            self.shards = allocate(sizes, dtypes, region)
            flats = self.shards.views()
            for index, param in enumerate(params):
                gather_from(param, functools.partial(self._next_shard, window, first=index == 0))
        elif tier == "disk":
            flats = self.regions["parameters"][0].carve(sizes, dtypes)
        else:
            flats = [torch.empty(n, dtype=d) for n, d in zip(sizes, dtypes, strict=True)]
        for param, flat in zip(params, flats, strict=True):
            put_shard(param, flat, fresh=fresh)
        self.parameters = tier

    def _next_shard(self, window: Window, *, first: bool) -> Tensor:
        """Return a parameter's shard on the GPU; torch asks for them in the order of the group."""
        if first:
            assert self.shards is not None
            shards = self.shards.views(window.to_device(self.shards))
            dtypes = [gathered_dtype_of(param) for param in self.names.values()]
            self.gathered = cast_together(shards, dtypes)[::-1]
        return self.gathered.pop()

    def store_gradient(self, name: str, leaf: Tensor, store: DiskStore | None) -> Tensor:
        """Copy the sharded gradient of `leaf` to disk; returns its local part there."""
        local = local_of(leaf.grad)
        if name not in self.gradients:
            self._allocate_gradients(store)
        own = self.gradients[name].view(local.shape)
        if local.data_ptr() != own.data_ptr():
            own.copy_(local)
            leaf.grad = self.names[name].to_sharded_dtensor(own)
        return own

    def _allocate_gradients(self, store: DiskStore | None) -> None:
        missing = {
            name: param.sharded_param
            for name, param in self.names.items()
            if name not in self.gradients and param.sharded_param.requires_grad
        }
        sizes = [local_of(leaf).numel() for leaf in missing.values()]
        dtypes = [leaf.dtype for leaf in missing.values()]
        region = take(store, sizes, dtypes)
        self.regions.setdefault("gradients", []).append(region)
        self.gradients |= dict(zip(missing, region.carve(sizes, dtypes), strict=True))

    def fetch_state(
        self, names: list[str], optimizer: Any, window: Window, *, to_stay: bool
    ) -> None:
        """Copy optimizer state to the shards' device; `to_stay` frees the lower tier's memory."""
        states = optimizer.torch.state
        if self.on_gpu:
            self._fetch_blocks(names, optimizer, window)
        elif to_stay:
            for name in names:
                for key, offloaded in self.offloaded_state.get(name, {}).items():
                    states[optimizer.shards[name]][key] = offloaded.clone()
        if to_stay:
            self.offloaded_state.clear()
            self.state_blocks.clear()

    def _fetch_blocks(self, names: list[str], optimizer: Any, window: Window) -> None:
        if self.parameters != "device":  # the update is on the host
            return
        for each in self.state_blocks:
            each.on_device = window.to_device(each.block)
            copies = each.block.views(each.on_device)
            for (name, key), copy in zip(each.keys, copies, strict=True):
                if name in names and name in self.offloaded_state:
                    shape = self.offloaded_state[name][key].shape
                    optimizer.torch.state[optimizer.shards[name]][key] = copy.view(shape)

    def offload_state(
        self,
        names: list[str],
        optimizer: Any,
        tier: Tier,
        store: DiskStore | None,
        window: Window,
    ) -> None:
        """Copy the optimizer state of `names` to `tier`; tensors that are there already stay."""
        states = {name: _large(optimizer.torch.state[optimizer.shards[name]]) for name in names}
        fresh = {n: s for n, s in states.items() if s and n not in self.offloaded_state}
        if fresh:
            self.offloaded_state |= self._allocate_state(fresh, tier, store)
        whole = self._leave_blocks(states, window)
        for name, state in states.items():
            for key, value in state.items():
                offloaded = self.offloaded_state[name][key]
                if value is not offloaded and (name, key) not in whole:
                    offloaded.copy_(value, non_blocking=self.on_gpu)
                    if value.is_cuda:  # freed here while the copying stream still reads it
                        value.record_stream(torch.cuda.current_stream())
                optimizer.torch.state[optimizer.shards[name]][key] = offloaded

    def _leave_blocks(self, states: State, window: Window) -> set[tuple[str, str]]:
        """Copy down the blocks whose tensors the update left in place; returns their keys."""
        found: set[tuple[str, str]] = set()
        for each in self.state_blocks:
            flat, each.on_device = each.on_device, None
            values = [states.get(name, {}).get(key) for name, key in each.keys]
            if flat is not None and all(v is not None and _is_in(flat, v) for v in values):
                window.to_host(each.block, flat)
                found.update(each.keys)
        return found

    def _allocate_state(
        self, states: State, tier: Tier, store: DiskStore | None
    ) -> dict[str, dict[str, Tensor]]:
        flat = [(n, k, t) for n, state in states.items() for k, t in state.items()]
        sizes, dtypes = [t.numel() for *_, t in flat], [t.dtype for *_, t in flat]
        region = None
        if tier == "disk":
            region = take(store, sizes, dtypes)
            self.regions.setdefault("optimizer", []).append(region)
        if self.on_gpu:
            block = allocate(sizes, dtypes, region)
            self.state_blocks.append(StateBlock(block=block, keys=[(n, k) for n, k, _ in flat]))
            tensors = block.views()
        elif region is not None:
            tensors = region.carve(sizes, dtypes)
        else:
            tensors = [torch.empty(n, dtype=d) for n, d in zip(sizes, dtypes, strict=True)]
        offloaded: dict[str, dict[str, Tensor]] = {}
        for (name, key, value), tensor in zip(flat, tensors, strict=True):
            offloaded.setdefault(name, {})[key] = tensor.view(value.shape)
        return offloaded


def cast_together(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Return flat tensors in their `dtypes`, those that change in one allocation and one call."""
    each = list(zip(tensors, dtypes, strict=True))
    changed = [i for i, (tensor, dtype) in enumerate(each) if tensor.dtype != dtype]
    found = list(tensors)
    if changed:
        sizes = [tensors[i].numel() for i in changed]
        target = torch.empty(sum(sizes), dtype=dtypes[changed[0]], device=tensors[0].device)
        parts = target.split(sizes)
        copy_together(parts, [tensors[i] for i in changed])
        for index, part in zip(changed, parts, strict=True):
            found[index] = part
    return found


def _is_in(flat: Tensor, tensor: Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


def take(store: DiskStore | None, sizes: Sequence[int], dtypes: Sequence[torch.dtype]) -> Region:
    assert store is not None, "a tier on disk without a folder for it"
    return store.take(num_bytes_of(sizes, dtypes))


def _large(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a parameter's state that are worth moving: all but its step count."""
    return {k: v for k, v in state.items() if isinstance(v, Tensor) and v.ndim > 0 and v.numel()}
