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
from colotrain.engine.offload.group_storage import Home
from colotrain.engine.probes import held_now, memory_now, reset_peak
from colotrain.engine.sharding.fsdp_internals import is_being_gathered, is_gathered_alone, local_of
from colotrain.engine.sharding.sharded_model import ShardedModel
from colotrain.engine.shm.shared_parameters import SharedParameters
from colotrain.errors import ColotrainError
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
        self, plan: RunPlan, rundir: RunDir, sizes: list[GroupBytes], guess: NonModelBytes
    ) -> None:
        assert plan.plugin.budget is not None
        self.plan, self.budget, self.sizes = plan, plan.plugin.budget, sizes
        self.rundir = rundir
        self.device = plan.cluster.device
        self.top: Tier = "host" if self.device == "cpu" else "device"
        self.non_model = guess
        self.placement = self._decide(guess)
        self.homes: list[Home] = []
        self.shared_params: SharedParameters | None = None
        self.norms: dict[str, Tensor] = {}
        """Parameter name → norm of its local gradient, where the gradient was moved to disk."""
        self.store: DiskStore | None = None
        self.settled, self.exhausted = False, False
        self.crowded = self.begun_empty = True
        self.reader = ThreadPoolExecutor(1, thread_name_prefix="tiers-read")
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="tiers-write")
        self.writing: Future[None] | None = None
        self.lane = torch.cuda.Stream() if self.device == "cuda" else None
        self.order: dict[tuple[int, int], int] = {}
        """The last two groups gathered → the group that was gathered after them the last time."""
        self.gathered = (-1, -1)

    # -- deciding

    def _decide(self, non_model: NonModelBytes) -> Placement:
        return place(self.sizes, self.budget, non_model, device=self.device)

    def begin_step(self) -> None:
        """Start measuring memory. Freed memory is kept while all fits: new pages cost time."""
        self.trim()
        self.begun_empty = self.crowded or self.placement.streams or held_now() > self._limit
        if self.begun_empty:
            return_free_memory()
        reset_peak()

    def offloads(self, index: int) -> bool:
        """Whether a group's parameters start below the device. On CPU they never do."""
        return self.device != "cpu" and self.placement.groups[index].parameters != self.top

    def is_short(self) -> bool:
        """Whether this rank used more than its budget, not counting freed memory that it kept."""
        if self.exhausted:
            return False
        self.crowded = not self.settled or memory_now()[1] > self._limit
        return self.crowded and self.begun_empty

    @property
    def _limit(self) -> int:
        return self.budget.host_bytes if self.device == "cpu" else self.budget.device_bytes

    def settle(self, optimizer: Any) -> bool:
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
            leaving = [h.group for h in self.homes if wanted.groups[h.index].parameters != self.top]
            compute += self.shared_params.gather_bytes(leaving)
            self.non_model = NonModelBytes(compute=compute, update=update)
            wanted = self._decide(self.non_model)
        if self.settled:
            wanted = lower_of(wanted, self.placement)
        if self.device != "cpu":  # `fully_shard` must know from the start where parameters are
            wanted = with_parameters_of(wanted, self.placement)
        changed = wanted.groups != self.placement.groups
        self._reserve(wanted)
        self.exhausted = self.settled and not changed
        self.settled = True
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

    def describe(self) -> dict[str, Any]:
        """Return the fields of the `tiers` event."""
        moved = moved_bytes(
            self.sizes,
            self.placement,
            micro_batches=self.plan.batch.accumulation_steps,
        )
        budget = {k: v for k, v in asdict(self.budget).items() if k.endswith("_bytes")}
        return {
            "bytes": bytes_by_tier(self.sizes, self.placement),
            "need": dict(self.placement.need),
            "other": asdict(self.non_model),
            "moved_bytes": moved,
            "fits": self.placement.fits,
            "budget": budget,
        }

    # -- carrying out

    def attach(self, sharded: ShardedModel, shared_params: SharedParameters | None) -> None:
        """Take over the groups of `sharded`, before they have storage, and reserve disk space."""
        self.shared_params = shared_params
        names = {id(p): name for name, p in sharded.module.named_parameters()}
        for index, group in enumerate(sharded.groups):
            own = {names[id(param.sharded_param)]: param for param in group.params}
            home = Home(
                index=index,
                group=group,
                names=own,
                parameters=self.top,
                pinned=self.device != "cpu",
            )
            self.homes.append(home)
        self.norms = sharded.norms
        if self.placement.uses_disk:
            self._open_store()

    def _open_store(self) -> None:
        if self.store is None:
            assert self.budget.disk_path is not None
            folder = self.rundir.tier_folder(self.budget.disk_path)
            self.store = DiskStore(folder=folder, limit=self.budget.disk_bytes)
        need = sum(map(self._on_disk_bytes, self.homes)) - self.store.taken
        self.store.reserve(need)

    def _on_disk_bytes(self, home: Home) -> int:
        """Return the bytes that a group's regions take on disk, with room for alignment."""
        size, placed = self.sizes[home.index], self.placement.groups[home.index]
        kinds: tuple[Kind, ...] = ("parameters", "gradients", "optimizer")
        found = [getattr(size, k) for k in kinds if getattr(placed, k) == "disk"]
        gaps = ALIGNMENT * len(home.names) * TENSORS_OF_STATE
        return sum(whole_pages(n + gaps) for n in found if n)

    def move_parameters(self, fresh: bool) -> None:
        """Move each group's parameters to their tier; with `fresh` they have no values to copy."""
        wanted = [placed.parameters for placed in self.placement.groups]
        moving = [h for h in self.homes if h.names and h.parameters != wanted[h.index]]
        for home in moving:
            home.move_parameters(wanted[home.index], self.store, fresh=fresh)
            self._write_back(home, "parameters")
        if self.shared_params is not None:
            self.shared_params.unshare(home.group for home in moving)
        for home in moving:
            for fsdp_group in home.group.fsdp_groups:
                self._watch_gathers(home.index, fsdp_group)

    def release(self, parameter: Tensor) -> None:
        """Write back and drop the pages of a parameter that was just filled."""
        for home in self.homes:
            if home.parameters == "disk" and home.holds(parameter):
                self._write_back(home, "parameters")

    def trim(self) -> None:
        """Unmap from this process every page that is kept on disk."""
        for home in self.homes:
            for region in home.pages("parameters", "gradients", "optimizer"):
                region.drop()

    def _move(self, optimizer: Any) -> None:
        """Move parameters now, optimizer state at its next update, gradients when next reduced."""
        self.move_parameters(fresh=False)
        for home in self.homes:
            for name, param in home.names.items():
                if name in optimizer.shards:
                    optimizer.shards[name].data = local_of(param.sharded_param)
        self.watch_gradients()

    def _write_back(self, home: Home, *kinds: Kind) -> None:
        """Start writing back a group's pages, once those of the group before it are written."""
        regions = home.pages(*kinds)
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
        alone = is_gathered_alone(fsdp_group)  # then `wait_for_unshard` copies out of the shards
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
        if self.homes[index].parameters == "disk":
            for region in self.homes[index].pages("parameters"):
                region.drop()
        following = self.homes[self.order.get(self.gathered, index)]
        if following.parameters == "disk" and following.index != index:
            self.reader.submit(fetch, following.pages("parameters"), [])

    # -- gradients

    def watch_gradients(self) -> None:
        """Register hooks that move reduced gradients to disk, for groups that keep them there."""
        if not any(placed.gradients == "disk" for placed in self.placement.groups):
            return
        for home in self.homes:
            for name, param in home.names.items():
                leaf = param.sharded_param
                if leaf.requires_grad:
                    home.last_trained = name
                if leaf.requires_grad and not hasattr(leaf, "_colotrain_watched"):
                    leaf._colotrain_watched = True
                    hook = functools.partial(self._gradient, home, name)
                    leaf.register_post_accumulate_grad_hook(hook)

    def _gradient(self, home: Home, name: str, leaf: Tensor) -> None:
        """Move a sharded gradient to disk; a hook, run whenever the gradient was added to."""
        self.norms.pop(name, None)
        if self.placement.groups[home.index].gradients != "disk" or leaf.grad is None:
            return
        own = home.keep_gradient(name, leaf, self.store)
        if own.numel():
            self.norms[name] = norms([own])[0]
        if name == home.last_trained:
            self._write_back(home, "gradients")

    # -- the optimizer

    def visit(self, optimizer: Any) -> Iterator[list[str]]:
        """Yield the names of parameters to update, group by group, with their state at hand.

        While one group is updated, the next group's pages are read, or its state is copied to the
        device.
        """
        return_free_memory()
        grouped = {name for home in self.homes for name in home.names}
        alone = [name for name in optimizer.shards if name not in grouped]
        if alone:
            yield alone
        busy = [(h, n) for h in self.homes if (n := [x for x in h.names if x in optimizer.shards])]
        ahead: Future[None] | None = None
        for number, (home, names) in enumerate(busy):
            if ahead is not None:
                ahead.result()
            if number == 0 or self.lane is None:
                self._raise(home, names, optimizer)
            self._join()
            for following, others in busy[number + 1 : number + 2]:
                changed = following.pages("optimizer", "parameters")
                ahead = self.reader.submit(fetch, following.pages("gradients"), changed)
                if self.lane is not None:
                    self._raise(following, others, optimizer)
            yield names
            self._lower(home, names, optimizer)
        self._finish()

    def _raise(self, home: Home, names: list[str], optimizer: Any) -> None:
        to_stay = self.placement.groups[home.index].optimizer == self.top
        with self._copying(after_update=False):
            home.raise_state(names, optimizer, to_stay=to_stay)

    def _lower(self, home: Home, names: list[str], optimizer: Any) -> None:
        for region in home.pages("gradients"):
            region.drop()
        tier = self.placement.groups[home.index].optimizer
        if tier == self.top:
            self._write_back(home, "parameters")
            return
        known = len(home.kept)
        with self._copying(after_update=True):
            home.lower_state(names, optimizer, tier, self.store)
        if len(home.kept) > known:  # the optimizer's own allocation is free again
            return_free_memory()
        if self.lane is not None and home.pages("optimizer"):
            self.lane.synchronize()  # its pages can be written only once they are copied
        self._write_back(home, "parameters", "optimizer")

    @contextmanager
    def _copying(self, *, after_update: bool) -> Iterator[None]:
        """On CUDA, run copies on their own stream, in parallel with another group's update."""
        if self.lane is None:
            yield
            return
        if after_update:
            self.lane.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.lane):
            yield

    def _join(self) -> None:
        """Make the update's stream wait for the copies made so far."""
        if self.lane is not None:
            torch.cuda.current_stream().wait_stream(self.lane)

    def forget(self, names: Iterable[str]) -> None:
        """Drop the optimizer state of `names`."""
        for name in names:
            for home in self.homes:
                home.kept.pop(name, None)

    def _finish(self) -> None:
        if self.lane is not None:
            self.lane.synchronize()
        if self.writing is not None:
            self.writing.result()
            self.writing = None
