"""The memory of one group's tensors on this rank, and moving the tensors between tiers.

Parameters and gradients belong to `fully_shard`: its sharded tensors get other memory. In the state
of torch's optimizer, tensors are replaced by those of `GroupStorage.offloaded_state`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from colotrain.engine.offload.disk import DiskStore, Region, aligned
from colotrain.engine.offload.page_locked import page_locked
from colotrain.engine.sharding.fsdp_internals import local_of, put_shard
from colotrain.engine.sharding.sharded_model import Group
from colotrain.spec.offload import Kind, Tier

State = Mapping[str, Mapping[str, Tensor]]
"""Parameter name → key of its optimizer state → tensor."""


@dataclass(slots=True, kw_only=True)
class GroupStorage:
    """The memory of one group's tensors on this rank."""

    index: int
    group: Group
    names: dict[str, Any]
    """Parameter name → torch's record of the parameter (FSDPParam)."""
    parameters: Tier
    """Tier in which the parameters are now; on CPU this is "host" or "disk"."""
    pinned: bool
    """Memory on the host must be page-locked, for copies to and from a GPU."""
    regions: dict[Kind, list[Region]] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Parameter name → mapped memory for its sharded gradient."""
    offloaded_state: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """Parameter name → key → tensor of optimizer state in a tier below the device."""
    last_trained: str = ""
    """Name of the group's last parameter whose gradient is reduced."""

    def pages(self, *kinds: Kind) -> list[Region]:
        return [region for kind in kinds for region in self.regions.get(kind, [])]

    def holds(self, parameter: Tensor) -> bool:
        return any(param.sharded_param is parameter for param in self.names.values())

    def move_parameters(self, tier: Tier, store: DiskStore | None, *, fresh: bool) -> None:
        """Give the sharded parameters memory in `tier`; `fresh` ones have no values to copy."""
        params = list(self.names.values())
        sizes = [param.padded_sharded_param_size.numel() for param in params]
        dtypes = [param.sharded_param.dtype for param in params]
        if tier == "disk":
            if "parameters" not in self.regions:
                self.regions["parameters"] = [_take(store, sizes, dtypes)]
            flats = self.regions["parameters"][0].carve(sizes, dtypes)
        else:
            flats = self._on_host(sizes, dtypes)
        for param, flat in zip(params, flats, strict=True):
            put_shard(param, flat, fresh=fresh)
        self.parameters = tier

    def _on_host(self, sizes: Sequence[int], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
        if self.pinned:
            return page_locked(sizes, dtypes)
        return [torch.empty(n, dtype=d) for n, d in zip(sizes, dtypes, strict=True)]

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
        region = _take(store, sizes, dtypes)
        self.regions.setdefault("gradients", []).append(region)
        self.gradients |= dict(zip(missing, region.carve(sizes, dtypes), strict=True))

    def fetch_state(self, names: list[str], optimizer: Any, *, to_stay: bool) -> None:
        """Copy optimizer state to the shards' device; `to_stay` frees the lower tier's memory."""
        for name in names:
            shard = optimizer.shards[name]
            for key, offloaded in self.offloaded_state.get(name, {}).items():
                if offloaded.device != shard.device or to_stay:
                    copy = offloaded.to(shard.device, non_blocking=True, copy=True)
                    optimizer.torch.state[shard][key] = copy
        if to_stay:
            self.offloaded_state.clear()

    def offload_state(
        self, names: list[str], optimizer: Any, tier: Tier, store: DiskStore | None
    ) -> None:
        """Copy the optimizer state of `names` to `tier`; tensors that are there already stay."""
        states = {name: _large(optimizer.torch.state[optimizer.shards[name]]) for name in names}
        fresh = {n: s for n, s in states.items() if s and n not in self.offloaded_state}
        if fresh:
            self.offloaded_state |= self._allocate_state(fresh, tier, store)
        for name, state in states.items():
            for key, value in state.items():
                offloaded = self.offloaded_state[name][key]
                if value is not offloaded:
                    offloaded.copy_(value, non_blocking=self.pinned)
                    if value.is_cuda:  # freed here while the copying stream still reads it
                        value.record_stream(torch.cuda.current_stream())
                    optimizer.torch.state[optimizer.shards[name]][key] = offloaded

    def _allocate_state(
        self, states: State, tier: Tier, store: DiskStore | None
    ) -> dict[str, dict[str, Tensor]]:
        flat = [(n, k, t) for n, state in states.items() for k, t in state.items()]
        sizes, dtypes = [t.numel() for *_, t in flat], [t.dtype for *_, t in flat]
        if tier == "disk":
            region = _take(store, sizes, dtypes)
            self.regions.setdefault("optimizer", []).append(region)
            tensors = region.carve(sizes, dtypes)
        else:
            tensors = self._on_host(sizes, dtypes)
        offloaded: dict[str, dict[str, Tensor]] = {}
        for (name, key, value), tensor in zip(flat, tensors, strict=True):
            offloaded.setdefault(name, {})[key] = tensor.view(value.shape)
        return offloaded


def _take(store: DiskStore | None, sizes: Sequence[int], dtypes: Sequence[torch.dtype]) -> Region:
    assert store is not None, "a tier on disk without a folder for it"
    each = zip(sizes, dtypes, strict=True)
    return store.take(max(1, sum(aligned(n * d.itemsize) for n, d in each)))


def _large(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a parameter's state that are worth moving: all but its step count."""
    return {k: v for k, v in state.items() if isinstance(v, Tensor) and v.ndim > 0 and v.numel()}
