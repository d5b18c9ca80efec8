"""Moves parameters, gradients and optimizer state between device, host and disk, group by group.

`spec.offload.place` decides, the same on every rank; this module carries the decision out. Tensors
on disk lie in mapped memory (`disk.Region`) and training works on these very tensors, so no other
module has to know. Pages are read before they are used, then written back and dropped.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from colotrain.engine.gradients.gradients import norms
from colotrain.engine.offload.disk import (
    ALIGNMENT,
    DiskStore,
    fetch,
    return_free_memory,
    whole_pages,
    write,
)
from colotrain.engine.offload.group_storage import GroupStorage
from colotrain.engine.probes import held_now, memory_now, reset_peak
from colotrain.engine.sharding.fsdp_internals import is_being_gathered, is_on_one_rank, local_of
from colotrain.engine.sharding.sharded_model import ShardedModel
from colotrain.engine.shm.shared_parameters import SharedParameters
from colotrain.errors import ColotrainError
from colotrain.events.kinds import TierBytes
from colotrain.rundir import RunDir
from colotrain.spec.offload import (
    GroupBytes,
    Kind,
    NonModelBytes,
    Placement,
    Tier,
    bytes_by_tier,
    lower_of,
    moved_bytes,
    place,
    with_parameters_of,
)
from colotrain.spec.plan import RunPlan

TENSORS_OF_STATE = 3
"""Tensors of optimizer state per parameter for which space for alignment is reserved."""
MARGIN = 0.1
"""Fraction added to measured bytes, because the next step's peak differs a little."""


class Tiers:
    """The tiers of a sharded model. Every decision here is the same on all ranks."""

    def __init__(
        self, plan: RunPlan, rundir: RunDir, sizes: list[GroupBytes], estimate: NonModelBytes
    ) -> None:
        assert plan.plugin.budget is not None
        self.plan, self.budget, self.sizes = plan, plan.plugin.budget, sizes
        self.rundir = rundir
        self.device = plan.cluster.device
        self.top: Tier = "host" if self.device == "cpu" else "device"
        self.non_model = estimate
        self.placement = self._decide(estimate)
        self.storages: list[GroupStorage] = []
        self.shared_params: SharedParameters | None = None
        self.norms: dict[str, Tensor] = {}
        """Parameter name → norm of its local gradient, where the gradient was moved to disk."""
        self.store: DiskStore | None = None
        self.measured, self.cannot_offload_more = False, False
        self.over_limit = self.freed_at_begin = True
        self.reader = ThreadPoolExecutor(1, thread_name_prefix="tiers-read")
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="tiers-write")
        self.writing: Future[None] | None = None
        self.copy_stream = torch.cuda.Stream() if self.device == "cuda" else None
        self.order: dict[tuple[int, int], int] = {}
        """The last two groups gathered → the group that was gathered after them the last time."""
        self.gathered = (-1, -1)

    # -- deciding

    def _decide(self, non_model: NonModelBytes) -> Placement:
        return place(self.sizes, self.budget, non_model, device=self.device)

    def begin_step(self) -> None:
        """Start measuring memory. Freed memory is kept while all fits: new pages cost time."""
        self.trim()
        self.freed_at_begin = self.over_limit or self.placement.streams or held_now() > self._limit
        if self.freed_at_begin:
            return_free_memory()
        reset_peak()

    def offloads(self, index: int) -> bool:
        """Whether a group's parameters start below the device. On CPU they never do."""
        return self.device != "cpu" and self.placement.groups[index].parameters != self.top

    def exceeds_budget(self) -> bool:
        """Whether this rank used more than its budget, not counting freed memory that it kept."""
        if self.cannot_offload_more:
            return False
        self.over_limit = not self.measured or memory_now()[1] > self._limit
        return self.over_limit and self.freed_at_begin

    @property
    def _limit(self) -> int:
        return self.budget.host_bytes if self.device == "cpu" else self.budget.device_bytes

    def update_placement(self, optimizer: Any) -> bool:
        """Place groups anew from what the last forward and backward needed. All ranks must call.

        The first call may move anything up or down, later calls only down. Returns whether the
        placement changed.
        """
        now, peak = held_now(), memory_now()[1]
        model = self._resident(optimizer)
        mine = torch.tensor([peak - model, now - model], dtype=torch.int64)
        mine = mine.to(self.device)
        dist.all_reduce(mine, op=dist.ReduceOp.MAX)
        compute, update = (int(max(n, 0) * (1 + MARGIN)) for n in mine.tolist())
        self.non_model = NonModelBytes(compute=compute, update=update)
        wanted = self._decide(self.non_model)
        if self.shared_params is not None:
            left = [s.group for s in self.storages if wanted.groups[s.index].parameters != self.top]
            compute += self.shared_params.gather_bytes(left)
            self.non_model = NonModelBytes(compute=compute, update=update)
            wanted = self._decide(self.non_model)
        if self.measured:
            wanted = lower_of(wanted, self.placement)
        if self.device != "cpu":  # `fully_shard` must know from the start where parameters are
            wanted = with_parameters_of(wanted, self.placement)
        changed = wanted.groups != self.placement.groups
        self._reserve(wanted)
        self.cannot_offload_more = self.measured and not changed
        self.measured = True
        self._move(optimizer)
        return changed

    def _reserve(self, wanted: Placement) -> None:
        """Adopt `wanted` and reserve its space on disk, on every rank or on none."""
        before, self.placement, problem = self.placement, wanted, None
        try:
            if wanted.uses_disk:
                self._open_store()
        except ColotrainError as error:
            problem = error
        failed = torch.tensor(float(problem is not None), device=self.device)
        dist.all_reduce(failed)
        if failed.item():
            self.placement = before
            raise problem or ColotrainError("another rank finds no space on disk", "see its log")

    def _resident(self, optimizer: Any) -> int:
        """Return the bytes of parameters, gradients and optimizer state now in the top tier."""
        has_state = optimizer.steps > 0
        return sum(
            (size.parameters if placed.parameters == self.top else 0)
            + (size.gradients if placed.gradients == self.top else 0)
            + (size.optimizer if placed.optimizer == self.top and has_state else 0)
            for size, placed in zip(self.sizes, self.placement.groups, strict=True)
        )

    def describe(self, step: int) -> TierBytes:
        """Return where the bytes of this rank are after `step`."""
        num = self.plan.batch.accumulation_steps
        moved = moved_bytes(self.sizes, self.placement, micro_batches=num)
        budget = {k: v for k, v in asdict(self.budget).items() if k.endswith("_bytes")}
        return TierBytes(
            step=step,
            bytes=bytes_by_tier(self.sizes, self.placement),
            need={str(tier): need for tier, need in self.placement.need.items()},
            other=asdict(self.non_model),
            moved_bytes=moved,
            fits=self.placement.fits,
            budget=budget,
        )

    # -- carrying out

    def attach(self, sharded: ShardedModel, shared_params: SharedParameters | None) -> None:
        """Take over the groups of `sharded`, before they have storage, and reserve disk space."""
        self.shared_params = shared_params
        names = {id(p): name for name, p in sharded.module.named_parameters()}
        for index, group in enumerate(sharded.groups):
            own = {names[id(param.sharded_param)]: param for param in group.params}
            storage = GroupStorage(
                index=index,
                group=group,
                names=own,
                parameters=self.top,
                pinned=self.device != "cpu",
            )
            self.storages.append(storage)
        self.norms = sharded.norms
        if self.placement.uses_disk:
            self._open_store()

    def _open_store(self) -> None:
        if self.store is None:
            assert self.budget.disk_path is not None
            folder = self.rundir.tier_folder(self.budget.disk_path)
            self.store = DiskStore(folder=folder, limit=self.budget.disk_bytes)
        need = sum(map(self._on_disk_bytes, self.storages)) - self.store.taken
        self.store.reserve(need)

    def _on_disk_bytes(self, storage: GroupStorage) -> int:
        """Return the bytes that a group's regions take on disk, with room for alignment."""
        size, placed = self.sizes[storage.index], self.placement.groups[storage.index]
        kinds: tuple[Kind, ...] = ("parameters", "gradients", "optimizer")
        found = [getattr(size, k) for k in kinds if getattr(placed, k) == "disk"]
        gaps = ALIGNMENT * len(storage.names) * TENSORS_OF_STATE
        return sum(whole_pages(n + gaps) for n in found if n)

    def move_parameters(self, fresh: bool) -> None:
        """Move each group's parameters to their tier; with `fresh` they have no values to copy."""
        wanted = [placed.parameters for placed in self.placement.groups]
        moving = [s for s in self.storages if s.names and s.parameters != wanted[s.index]]
        for storage in moving:
            storage.move_parameters(wanted[storage.index], self.store, fresh=fresh)
            self._write_back(storage, "parameters")
        if self.shared_params is not None:
            self.shared_params.unshare(storage.group for storage in moving)
        for storage in moving:
            for fsdp_group in storage.group.fsdp_groups:
                self._watch_gathers(storage.index, fsdp_group)

    def release(self, parameter: Tensor) -> None:
        """Write back and drop the pages of a parameter that was just filled."""
        for storage in self.storages:
            if storage.parameters == "disk" and storage.holds(parameter):
                self._write_back(storage, "parameters")

    def trim(self) -> None:
        """Unmap from this process every page that is kept on disk."""
        for storage in self.storages:
            for region in storage.pages("parameters", "gradients", "optimizer"):
                region.drop()

    def _move(self, optimizer: Any) -> None:
        """Move parameters now, optimizer state at its next update, gradients when next reduced."""
        self.move_parameters(fresh=False)
        for storage in self.storages:
            for name, param in storage.names.items():
                if name in optimizer.shards:
                    optimizer.shards[name].data = local_of(param.sharded_param)
        self.watch_gradients()

    def _write_back(self, storage: GroupStorage, *kinds: Kind) -> None:
        """Start writing back a group's pages, once those of the group before it are written."""
        regions = storage.pages(*kinds)
        if not regions:
            return
        if self.writing is not None:
            self.writing.result()
        self.writing = self.writer.submit(write, regions)

    # -- parameters, around each gather

    def _watch_gathers(self, index: int, fsdp_group: Any) -> None:
        """After every all-gather of the group, drop its pages and read those of the next group."""
        if hasattr(fsdp_group, "_colotrain_gather"):
            return
        alone = is_on_one_rank(fsdp_group)  # then `wait_for_unshard` copies out of the shards
        name = "wait_for_unshard" if alone else "unshard"
        gather = fsdp_group._colotrain_gather = getattr(fsdp_group, name)

        @functools.wraps(gather)
        def watched(*args: Any, **kwargs: Any) -> Any:
            pending = is_being_gathered(fsdp_group)
            reads = pending if alone else not (pending or fsdp_group.is_unsharded)
            result = gather(*args, **kwargs)
            if reads:
                self._gathered(index)
            return result

        setattr(fsdp_group, name, watched)

    def _gathered(self, index: int) -> None:
        self.order[self.gathered], self.gathered = index, (self.gathered[1], index)
        if self.storages[index].parameters == "disk":
            for region in self.storages[index].pages("parameters"):
                region.drop()
        following = self.storages[self.order.get(self.gathered, index)]
        if following.parameters == "disk" and following.index != index:
            self.reader.submit(fetch, following.pages("parameters"), [])

    # -- gradients

    def watch_gradients(self) -> None:
        """Register hooks that move reduced gradients to disk, for groups that keep them there."""
        if not any(placed.gradients == "disk" for placed in self.placement.groups):
            return
        for storage in self.storages:
            for name, param in storage.names.items():
                leaf = param.sharded_param
                if leaf.requires_grad:
                    storage.last_trained = name
                if leaf.requires_grad and not hasattr(leaf, "_colotrain_watched"):
                    leaf._colotrain_watched = True
                    hook = functools.partial(self._gradient, storage, name)
                    leaf.register_post_accumulate_grad_hook(hook)

    def _gradient(self, storage: GroupStorage, name: str, leaf: Tensor) -> None:
        """Move a sharded gradient to disk; a hook, run whenever the gradient was added to."""
        self.norms.pop(name, None)
        if self.placement.groups[storage.index].gradients != "disk" or leaf.grad is None:
            return
        own = storage.store_gradient(name, leaf, self.store)
        if own.numel():
            self.norms[name] = norms([own])[0]
        if name == storage.last_trained:
            self._write_back(storage, "gradients")

    # -- the optimizer

    def stream_updates(self, optimizer: Any) -> Iterator[list[str]]:
        """Yield the names of parameters to update, group by group, with their state at hand.

        While one group is updated, the next group's pages are read, or its state is copied to the
        device.
        """
        return_free_memory()
        grouped = {name for storage in self.storages for name in storage.names}
        if alone := [name for name in optimizer.shards if name not in grouped]:
            yield alone
        busy = [
            (s, n) for s in self.storages if (n := [x for x in s.names if x in optimizer.shards])
        ]
        ahead: Future[None] | None = None
        for number, (storage, names) in enumerate(busy):
            if ahead is not None:
                ahead.result()
            if number == 0 or self.copy_stream is None:
                self._fetch_state(storage, names, optimizer)
            self._wait_for_copies()
            for following, others in busy[number + 1 : number + 2]:
                changed = following.pages("optimizer", "parameters")
                ahead = self.reader.submit(fetch, following.pages("gradients"), changed)
                if self.copy_stream is not None:
                    self._fetch_state(following, others, optimizer)
            yield names
            self._offload_state(storage, names, optimizer)
        self._finish()

    def _fetch_state(self, storage: GroupStorage, names: list[str], optimizer: Any) -> None:
        to_stay = self.placement.groups[storage.index].optimizer == self.top
        with self._copying(after_update=False):
            storage.fetch_state(names, optimizer, to_stay=to_stay)

    def _offload_state(self, storage: GroupStorage, names: list[str], optimizer: Any) -> None:
        for region in storage.pages("gradients"):
            region.drop()
        tier = self.placement.groups[storage.index].optimizer
        if tier == self.top:
            self._write_back(storage, "parameters")
            return
        known = len(storage.offloaded_state)
        with self._copying(after_update=True):
            storage.offload_state(names, optimizer, tier, self.store)
        if len(storage.offloaded_state) > known:  # the optimizer's own allocation is free again
            return_free_memory()
        if self.copy_stream is not None and storage.pages("optimizer"):
            self.copy_stream.synchronize()  # its pages can be written only once they are copied
        self._write_back(storage, "parameters", "optimizer")

    @contextmanager
    def _copying(self, *, after_update: bool) -> Iterator[None]:
        """On CUDA, run copies on their own stream, in parallel with another group's update."""
        if self.copy_stream is None:
            yield
            return
        if after_update:
            self.copy_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.copy_stream):
            yield

    def _wait_for_copies(self) -> None:
        """Make the update's stream wait for the copies made so far."""
        if self.copy_stream is not None:
            torch.cuda.current_stream().wait_stream(self.copy_stream)

    def forget(self, names: Iterable[str]) -> None:
        """Drop the optimizer state of `names`."""
        for name in names:
            for storage in self.storages:
                storage.offloaded_state.pop(name, None)

    def _finish(self) -> None:
        if self.copy_stream is not None:
            self.copy_stream.synchronize()
        if self.writing is not None:
            self.writing.result()
            self.writing = None
