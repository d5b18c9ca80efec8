"""Parameters in shared memory: the ranks of a host hold one copy, so that no rank gathers them.

Each rank's shards lie in memory that all ranks of the shard group map. The shards of a parameter
lie one after the other in rank order, so together they are the whole parameter. Every rank updates
its own rows and computes with the whole. A barrier before the first forward of a step waits for all
updates. No second barrier is needed: ranks agree that a step is over before they update.

This works on CPU only, and only where parameters are computed with in their own dtype, because a
cast makes a copy. A rank alone in its shard group holds whole parameters anyway, in its own memory:
there, on any device, nothing is copied but what is cast (`OneRankUnshard`).
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from colotrain import host
from colotrain.engine.comms import exchange
from colotrain.engine.comms.shared_memory import PAGE, SharedMemory, Unavailable, round_up
from colotrain.engine.model.probes import exclude_bytes
from colotrain.engine.sharding.fsdp_internals import (
    fill_unsharded,
    flat_shard,
    free_storage,
    gathered_dtype_of,
    is_being_gathered,
    put_shard,
    register_unsharded,
    rests_below,
    set_unsharded,
    unsharded_of,
    view_unsharded,
)
from colotrain.engine.sharding.sharded_model import Group, ShardedModel, numel_of

MADV_POPULATE_WRITE = 23
"""Flag of madvise (mman.h) since Linux 5.14; on older ones every page is read instead."""
ALIGNMENT = 64
"""Largest part of free memory that may be used: each rank's own shards would need it, too."""
BARRIER = 0  # index of the only semaphore


class SharedParameters:
    """The parameters that the ranks of a shard group share.

    All ranks must create it together, after `shard_`, and then call `allocate` together. Raises
    `Unavailable` on all ranks of the group or on none.
    """

    def __init__(self, sharded: ShardedModel) -> None:
        self.sharded = sharded
        group = sharded.shard_group
        self.rank, self.size = group.rank(), group.size()
        self.ranges: dict[str, tuple[int, int]] = {}
        """Group → start and bytes of its memory: whole pages, which can be freed separately."""
        end = 0
        for part in sharded.groups:
            self.ranges[part.name] = end, round_up(sum(self._sizes(part)), PAGE)
            end += self.ranges[part.name][1]
        self.memory = None
        if self.size > 1 and end:
            self.memory = SharedMemory(
                group, end, num_semaphores=1, share_of_free=host.SHARE_OF_FREE_MEMORY
            )
        self.parts = sharded.in_common

    def _sizes(self, part: Group) -> list[int]:
        """Return the bytes of each parameter of `part`, whole and padded."""
        return [
            round_up(self.size * numel_of(param) * param.sharded_param.dtype.itemsize, ALIGNMENT)
            for param in part.params
        ]

    def allocate(self, fresh: bool) -> None:
        """Move the sharded parameters to shared memory; `fresh` ones have no values to copy."""
        for part in self.sharded.groups:
            memory: dict[Any, Tensor] = {}
            at, _ = self.ranges[part.name]
            for param, num_bytes in zip(part.params, self._sizes(part), strict=True):
                numel, whole = numel_of(param), flat_shard(param).detach()
                if self.memory is not None:
                    whole = self.memory.bytes(at, num_bytes).view(param.sharded_param.dtype)
                    own = whole[self.rank * numel : (self.rank + 1) * numel]
                    put_shard(param, own, fresh=fresh)
                memory[param] = whole
                at += num_bytes
            for params in part.fsdp_groups:
                SharedUnshard(params, memory).replace_gathers()
            self.parts[part.name] = part
        root = self.sharded.module
        root.register_forward_pre_hook(lambda *_: self._wait_for_updates(), prepend=True)

    def _wait_for_updates(self) -> None:
        """Wait for the other ranks' updates, before a forward that finds the parameters not in use.

        The root group shows whether they are in use: every rank runs the root module in every
        forward.
        """
        root = self.sharded.groups[-1].fsdp_groups
        in_use = root and all(params.is_unsharded for params in root)
        if self.memory is not None and not in_use:
            self.memory.barrier(BARRIER, "the parameters' update")

    def populate(self) -> None:
        """Touch all shared pages, so that this rank's part of them counts as used memory."""
        if self.memory is None:
            return
        for name in self.parts:
            try:
                self.memory.advise(MADV_POPULATE_WRITE, *self.ranges[name])
            except OSError:
                self.memory.bytes(*self.ranges[name])[::PAGE].sum()
        self._count()

    def _count(self) -> None:
        held = sum(self.ranges[name][1] for name in self.parts)
        exclude_bytes(held * (self.size - 1) // self.size)

    def gather_bytes(self, groups: Iterable[Group]) -> int:
        """Return the bytes needed to gather the shared ones of `groups`, two of them at a time."""
        sizes = sorted(self.ranges[part.name][1] for part in groups if part.name in self.parts)
        return sum(sizes[-2:])

    def unshare(self, groups: Iterable[Group]) -> None:
        """Gather groups again whose parameters lie elsewhere now, and free their shared memory.

        All ranks of the shard group must call with the same groups, between two steps.
        """
        gone = [part for part in groups if self.parts.pop(part.name, None)]
        if not gone:
            return
        for part in gone:
            for params in part.fsdp_groups:
                SharedUnshard.restore_gathers(params, self.size)
        if self.memory is None:
            return
        self.memory.barrier(BARRIER, "unsharing parameters")
        if self.rank == 0:
            for part in gone:
                with suppress(OSError):  # pages that cannot be freed stay
                    self.memory.advise(mmap.MADV_REMOVE, *self.ranges[part.name])
        self.memory.barrier(BARRIER, "unsharing parameters")  # counted until it is freed
        self._count()


class SharedUnshard:
    """Replaces the all-gathers of one of `fully_shard`'s groups whose parameters are shared."""

    def __init__(self, params: Any, memory: dict[Any, Tensor]) -> None:
        self.params, self.asked = params, False
        self.memory = memory
        """Record of a parameter → the whole parameter, flat and padded."""

    def replace_gathers(self) -> None:
        self.params.unshard, self.params.wait_for_unshard = self.unshard, self.wait_for_unshard

    @staticmethod
    def restore_gathers(params: Any, size: int) -> None:
        """Let the whole parameters, which others refer to, be gathered from `size` ranks again."""
        del params.unshard, params.wait_for_unshard
        for param in params.fsdp_params:
            if (whole := unsharded_of(param)) is None:
                continue
            param.init_all_gather_outputs([numel_of(param)], [whole.dtype], size, params.device)
            flat = param.all_gather_outputs[0]
            whole.data = view_unsharded(param, flat)
            free_storage(flat)

    def unshard(self, async_op: bool = False) -> None:
        self.asked = not self.params.is_unsharded

    def wait_for_unshard(self) -> None:
        if not self.asked:
            return
        self.asked = False
        for param in self.params.fsdp_params:
            _use(param, self.memory[param])
        register_unsharded(self.params)


def _use(param: Any, flat: Tensor) -> None:
    """Let the whole parameter of `param`, unless it exists, be the memory of `flat`."""
    if unsharded_of(param) is None:
        trains = param.sharded_param.requires_grad
        whole = nn.Parameter(view_unsharded(param, flat), requires_grad=trains)
        set_unsharded(param, whole)


class OneRankUnshard:
    """Replaces the all-gathers of one of `fully_shard`'s groups on a rank that has all of it.

    A parameter that is computed with in its own dtype is its shard, unless shards move between
    tiers (`move`). The others are cast together, straight into the whole parameters. Of a group
    that stays gathered (`stays`), frozen ones are cast once: a step takes their memory anyway.
    """

    def __init__(self, params: Any, *, move: bool, stays: bool) -> None:
        self.params, self.move, self.stays = params, move, stays
        self.versions: dict[Any, int] = {}
        """Record of a parameter → version of the shard that the whole parameter was cast from."""

    def install(self) -> None:
        self.params.wait_for_unshard = self.wait_for_unshard
        if self.stays and not self.move:
            for param in self.params.fsdp_params:
                param.free_unsharded_param = partial(_free_unless_frozen, param)

    def wait_for_unshard(self) -> None:
        if not is_being_gathered(self.params):
            return
        copied = []
        for param in self.params.fsdp_params:
            if rests_below(param):
                type(self.params).wait_for_unshard(self.params)
                return
            if self._keeps(param):
                continue
            if self.move or gathered_dtype_of(param) != param.sharded_param.dtype:
                copied.append(param)
            else:
                _use(param, flat_shard(param).detach())
        fill_unsharded(self.params, copied)
        self.versions |= {param: flat_shard(param)._version for param in copied}
        register_unsharded(self.params)

    def _keeps(self, param: Any) -> bool:
        """Whether the whole parameter is in memory from an earlier use, its shard unchanged."""
        trains = param.sharded_param.requires_grad
        return (
            not trains
            and self.versions.get(param) == flat_shard(param)._version
            and param.all_gather_outputs[0].untyped_storage().size() > 0
        )


def _free_unless_frozen(param: Any) -> None:
    """Free a whole parameter after use; `sharded_model.reshard` frees frozen ones as well."""
    if param.sharded_param.requires_grad:
        type(param).free_unsharded_param(param)


def share_parameters(sharded: ShardedModel) -> SharedParameters | None:
    """Make shared memory for the parameters of `sharded`; None where ranks cannot share them.

    All ranks must call. Parameters cannot be shared where they are cast or on another device, where
    a shard group spans hosts, and where there is not enough memory.
    """
    exclude_bytes(0)
    cast = any(p.mp_policy.param_dtype is not None for p in sharded.fsdp_params())
    if sharded.comms.device != "cpu" or cast:
        return None
    shared_params, problem = None, ""
    try:
        shared_params = SharedParameters(sharded)
    except Unavailable as error:
        problem = str(error)
    problems = exchange.all_gather(problem)
    if not any(problems):
        return shared_params
    if dist.get_rank() == 0:
        print(f"parameters are not in shared memory: {max(problems)}", file=sys.stderr)
    return None
