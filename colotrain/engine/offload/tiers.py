"""Moves parameters, gradients and optimizer state between device, host and disk, group by group.

`PlacementPolicy` decides, the same on every rank of a pipeline stage; this module carries the
decision out. Tensors on disk lie in mapped memory (`disk.Region`) and training works on these very
tensors, so no other module has to know. Pages are read before they are used, then written back and
dropped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from colotrain import module_tree
from colotrain.engine.comms import exchange
from colotrain.engine.gradients.gradients import norms
from colotrain.engine.model.probes import held_now, memory_now, reset_peak
from colotrain.engine.offload.blocks import Block, Window, allocate
from colotrain.engine.offload.disk import ALIGNMENT, DiskStore, return_free_memory, whole_pages
from colotrain.engine.offload.group_storage import GroupStorage, take
from colotrain.engine.offload.transfers import GatherPrefetch, Transfers
from colotrain.engine.pipeline.stage import Stage
from colotrain.engine.sharding.fsdp_internals import (
    ReducedOnDevice,
    as_strided_in,
    hooks_after_accumulation,
    local_of,
    reduce_below,
)
from colotrain.engine.sharding.sharded_model import ShardedModel
from colotrain.engine.sharding.shared_parameters import SharedParameters
from colotrain.errors import ColotrainError
from colotrain.events.kinds import TierBytes
from colotrain.rundir import RunDir
from colotrain.spec.offload import (
    MARGIN,
    GroupBytes,
    Kind,
    NonModelBytes,
    Placement,
    bytes_by_tier,
    lower_of,
    moved_bytes,
    place,
    with_parameters_of,
)
from colotrain.spec.plan import RunPlan

TENSORS_OF_STATE = 4
"""Tensors of optimizer state per parameter for which space for alignment is reserved."""


class Tiers:
    """The tiers of a sharded model. The ranks of a pipeline stage have the same placement."""

    def __init__(
        self,
        plan: RunPlan,
        rundir: RunDir,
        sizes: list[GroupBytes],
        estimate: NonModelBytes,
        stage: Stage,
    ) -> None:
        self.policy = PlacementPolicy(plan, sizes, estimate, stage)
        self.rundir = rundir
        self.streams = exchange.is_any(self.placement.streams)
        """Whether any rank stores anything below the top tier: all then update group by group."""
        self.storages: list[GroupStorage] = []
        self.shared_params: SharedParameters | None = None
        self.norms: dict[str, Tensor] = {}
        """Parameter name → norm of its local gradient, where the gradient was moved to disk."""
        self.watched: dict[str, Tensor] = {}
        """Parameter name → sharded parameter whose gradients are moved to disk as they come."""
        self.store: DiskStore | None = None
        self.transfers = Transfers(device=self.policy.device)
        self.prefetch = GatherPrefetch(self.storages, self.transfers)

    @property
    def placement(self) -> Placement:
        return self.policy.placement

    def begin_step(self) -> None:
        """Start measuring a step's memory, with no pages from the disk among it."""
        self.trim()
        self.policy.begin_step()

    def update_placement(self, optimizer: Any) -> bool:
        """Place groups anew from what the last forward and backward needed. All ranks must call.

        The first call may move anything up or down, later calls only down. Returns whether the
        placement of this rank's stage changed.
        """
        wanted = self.policy.measure(
            has_state=optimizer.steps > 0, gather_bytes=self._shared_gather_bytes
        )
        self._reserve_on_all_ranks(wanted)
        changed = self.policy.adopt(wanted)
        self.streams = exchange.is_any(self.placement.streams)
        self._move(optimizer)
        return changed

    def _shared_gather_bytes(self, wanted: Placement) -> int:
        """Return the bytes to gather the groups that `wanted` takes out of shared memory."""
        if self.shared_params is None:
            return 0
        top = self.policy.top
        left = [s.group for s in self.storages if wanted.groups[s.index].parameters != top]
        return self.shared_params.gather_bytes(left)

    def _reserve_on_all_ranks(self, wanted: Placement) -> None:
        """Reserve the space of `wanted` on disk; raise on every rank if one finds none."""
        problem = None
        try:
            self._reserve(wanted)
        except ColotrainError as error:
            problem = error
        if exchange.is_any(problem is not None):
            raise problem or ColotrainError("another rank finds no space on disk", "see its log")

    def attach(self, sharded: ShardedModel, shared_params: SharedParameters | None) -> None:
        """Take over the groups of `sharded`, before they have storage, and reserve disk space."""
        self.shared_params = shared_params
        names = {id(p): name for name, p in module_tree.named_parameters(sharded.module)}
        for index, group in enumerate(sharded.groups):
            own = {names[id(param.sharded_param)]: param for param in group.params}
            storage = GroupStorage(
                index=index,
                group=group,
                names=own,
                parameters=self.policy.top,
                on_gpu=self.policy.device != "cpu",
            )
            self.storages.append(storage)
        self.norms = sharded.norms
        self._reserve(self.placement)
        if self.transfers.on_gpu:  # before a forward uses memory
            release = self.transfers.release_gradients
            sharded.module.register_forward_pre_hook(lambda *_: release(), prepend=True)

    def _reserve(self, placement: Placement) -> None:
        """Reserve the space on disk that `placement` needs and that is not reserved yet."""
        if not placement.uses_disk:
            return
        if self.store is None:
            budget = self.policy.budget
            assert budget.disk_path is not None
            folder = self.rundir.tier_folder(budget.disk_path)
            self.store = DiskStore(folder=folder, limit=budget.disk_bytes)
        need = sum(self._on_disk_bytes(storage, placement) for storage in self.storages)
        self.store.reserve(need - self.store.taken)

    def _on_disk_bytes(self, storage: GroupStorage, placement: Placement) -> int:
        """Return the bytes that a group's regions take on disk, with room for alignment."""
        size, placed = self.policy.sizes[storage.index], placement.groups[storage.index]
        kinds: tuple[Kind, ...] = ("parameters", "gradients", "optimizer")
        found = [getattr(size, k) for k in kinds if getattr(placed, k) == "disk"]
        gaps = ALIGNMENT * len(storage.names) * TENSORS_OF_STATE
        return sum(whole_pages(n + gaps) for n in found if n)

    def move_parameters(self, fresh: bool) -> None:
        """Move each group's parameters to their tier; with `fresh` they have no values to copy."""
        wanted = [placed.parameters for placed in self.placement.groups]
        moving = [s for s in self.storages if s.names and s.parameters != wanted[s.index]]
        for storage in moving:
            tier, window = wanted[storage.index], self.transfers.parameter_window
            storage.move_parameters(tier, self.store, window, fresh=fresh)
            self.transfers.write_back(storage.pages("parameters"))
        if self.shared_params is not None:
            self.shared_params.unshare(storage.group for storage in moving)
        for storage in moving:
            copies = GradientCopies(storage, self.transfers, self.store, self.norms)
            for fsdp_group in storage.group.fsdp_groups:
                if self.transfers.on_gpu:
                    reduce_below(fsdp_group, copies)
                self.prefetch.watch(storage.index, fsdp_group)

    def release(self, parameter: Tensor) -> None:
        """Write back and drop the pages of a parameter that was just filled."""
        for storage in self.storages:
            if storage.parameters == "disk" and storage.holds(parameter):
                self.transfers.write_back(storage.pages("parameters"))

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

    def watch_gradients(self) -> None:
        """Register hooks that move reduced gradients to disk, for groups that keep them there."""
        on_disk = any(placed.gradients == "disk" for placed in self.placement.groups)
        if self.transfers.on_gpu or not on_disk:
            return
        for storage in self.storages:
            for name, param in storage.names.items():
                leaf = param.sharded_param
                if leaf.requires_grad:
                    storage.last_trained = name
                if leaf.requires_grad and self.watched.get(name) is not leaf:
                    self.watched[name] = leaf
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
            self.transfers.write_back(storage.pages("gradients"))

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
            if number == 0 or not self.transfers.on_gpu:
                self._fetch_state(storage, names, optimizer)
            self.transfers.order_copies()
            for following, others in busy[number + 1 : number + 2]:
                changed = following.pages("optimizer", "parameters")
                ahead = self.transfers.read_ahead(following.pages("gradients"), changed)
                if self.transfers.on_gpu:
                    self._fetch_state(following, others, optimizer)
            yield names
            self._offload_state(storage, names, optimizer)
        self.transfers.finish()

    def _fetch_state(self, storage: GroupStorage, names: list[str], optimizer: Any) -> None:
        to_stay = self.placement.groups[storage.index].optimizer == self.policy.top
        with self.transfers.going_up():
            storage.fetch_state(names, optimizer, self.transfers.state_window, to_stay=to_stay)

    def _offload_state(self, storage: GroupStorage, names: list[str], optimizer: Any) -> None:
        for region in storage.pages("gradients"):
            region.drop()
        tier = self.placement.groups[storage.index].optimizer
        if tier == self.policy.top:
            self.transfers.write_back(storage.pages("parameters"))
            return
        known = len(storage.offloaded_state)
        window = self.transfers.state_window
        with self.transfers.going_down():
            storage.offload_state(names, optimizer, tier, self.store, window)
        if len(storage.offloaded_state) > known:  # the optimizer's own allocation is free again
            return_free_memory()
        if storage.pages("optimizer"):  # its pages can be written only once they are copied
            window.finish()
        self.transfers.write_back(storage.pages("parameters", "optimizer"))

    def wait_for_copies(self) -> None:
        """Let the host wait for optimizer state that is being copied to it."""
        self.transfers.wait_for_copies()

    def forget(self, names: Iterable[str]) -> None:
        """Drop the optimizer state of `names`."""
        for name in names:
            for storage in self.storages:
                storage.offloaded_state.pop(name, None)


class PlacementPolicy:
    """The placement of a stage's groups, the same on its ranks, and when to decide it anew."""

    def __init__(
        self, plan: RunPlan, sizes: list[GroupBytes], estimate: NonModelBytes, stage: Stage
    ) -> None:
        assert plan.plugin.budget is not None
        self.stage = stage
        self.plan, self.budget, self.sizes = plan, plan.plugin.budget, sizes
        self.device = plan.cluster.device
        self.non_model = estimate
        self.placement = self._place()
        self.top = self.placement.top
        self.measured, self.cannot_offload_more = False, False
        self.over_limit = self.freed_at_begin = True
        self.is_short = False
        """Whether a rank of this stage used more than its budget; at first its own answer."""

    def _place(self) -> Placement:
        return place(self.sizes, self.budget, self.non_model, device=self.device)

    def offloads(self, index: int) -> bool:
        """Whether a group's parameters start below the device. On CPU they never do."""
        return self.device != "cpu" and self.placement.groups[index].parameters != self.top

    @property
    def _limit(self) -> int:
        return self.budget.room(self.top)

    def begin_step(self) -> None:
        """Start measuring memory. Freed memory is kept while all fits: new pages cost time."""
        self.freed_at_begin = self.over_limit or self.placement.streams or held_now() > self._limit
        if self.freed_at_begin:
            return_free_memory()
        reset_peak()

    def exceeds_budget(self) -> bool:
        """Whether this rank used more than its budget, not counting freed memory that it kept."""
        self.is_short = False
        if not self.cannot_offload_more:
            self.over_limit = not self.measured or memory_now()[1] > self._limit
            self.is_short = self.over_limit and self.freed_at_begin
        return self.is_short

    def measure(self, *, has_state: bool, gather_bytes: Callable[[Placement], int]) -> Placement:
        """Return the placement for what the last step needed; all ranks must call, then `adopt`.

        The first call may move anything up or down, later calls only down, and nothing on a stage
        of which no rank was short. `has_state` tells whether the optimizer has made its state,
        `gather_bytes` what a placement needs in addition to gather parameters that ranks share now.
        """
        now, peak = held_now(), memory_now()[1]
        model = self._resident(has_state=has_state)
        *most, short = self._most_in_stage(peak - model, now - model, self.is_short)
        self.is_short = bool(short)
        if not self.is_short:
            return self.placement
        compute, update = (int(n * (1 + MARGIN)) for n in most)
        self.non_model = NonModelBytes(compute=compute, update=update)
        if more := gather_bytes(self._place()):
            self.non_model = NonModelBytes(compute=compute + more, update=update)
        wanted = self._place()
        if self.measured:
            wanted = lower_of(wanted, self.placement)
        if self.device != "cpu":  # `fully_shard` must know from the start where parameters are
            wanted = with_parameters_of(wanted, self.placement)
        return wanted

    def _most_in_stage(self, *values: int) -> list[int]:
        """Return the largest of each number, or 0, on the ranks of this stage. All must call."""
        table = torch.zeros(self.stage.count, len(values), dtype=torch.int64)
        table[self.stage.index] = torch.tensor(values)
        table = table.clamp(min=0).to(self.device)
        dist.all_reduce(table, op=dist.ReduceOp.MAX)
        found: list[int] = table[self.stage.index].tolist()
        return found

    def adopt(self, wanted: Placement) -> bool:
        """Use `wanted` from now on; returns whether it differs from the placement before."""
        changed = wanted.groups != self.placement.groups
        if self.measured and self.is_short and not changed:
            self.cannot_offload_more = True
        self.placement, self.measured = wanted, True
        return changed

    def _resident(self, *, has_state: bool) -> int:
        """Return the bytes of parameters, gradients and optimizer state now in the top tier."""
        kinds = bytes_by_tier(self.sizes, self.placement)
        if not has_state:
            del kinds["optimizer"]
        return sum(tiers.get(self.top, 0) for tiers in kinds.values())

    def describe(self, step: int) -> TierBytes:
        """Return where the bytes of this rank are after `step`."""
        num = self.plan.batch.accumulation_steps
        budget = {k: v for k, v in asdict(self.budget).items() if k.endswith("_bytes")}
        return TierBytes(
            step=step,
            bytes=bytes_by_tier(self.sizes, self.placement),
            need={str(tier): need for tier, need in self.placement.need.items()},
            other=asdict(self.non_model),
            moved_bytes=moved_bytes(self.sizes, self.placement, micro_batches=num),
            fits=self.placement.fits,
            budget=budget,
        )


class GradientCopies:
    """The copies of one group's sharded gradients."""

    def __init__(
        self,
        storage: GroupStorage,
        transfers: Transfers,
        store: DiskStore | None,
        norms_of: dict[str, Tensor],
    ) -> None:
        self.storage, self.transfers, self.store = storage, transfers, store
        self.norms = norms_of
        self.names = {id(param): name for name, param in storage.names.items()}
        self.block: Block | None = None
        self.copied: torch.cuda.Event | None = None
        """Event after the last copy to the block."""
        self.adds = False
        """Whether earlier micro-batches' gradients are being added to."""

    @property
    def window(self) -> Window:
        return self.transfers.gradient_window

    def bring_up(self, params: Sequence[Any], reducing: Any) -> list[ReducedOnDevice]:
        """Return stand-ins for `params`, with the gradients so far for the stream `reducing`."""
        self.adds = params[0].sharded_param.grad is not None
        if not self.adds:
            return [ReducedOnDevice(param, None) for param in params]
        assert self.block is not None
        assert self.transfers.up is not None
        if self.copied is not None:
            self.transfers.up.wait_event(self.copied)
        with torch.cuda.stream(self.transfers.up):
            flat = self.window.to_device(self.block).view(self.block.dtypes[0])
        reducing.wait_stream(self.transfers.up)
        grads = [local_of(param.sharded_param.grad) for param in params]
        return [
            ReducedOnDevice(param, as_strided_in(flat, grad))
            for param, grad in zip(params, grads, strict=True)
        ]

    def put_down(self, reduced: Sequence[ReducedOnDevice], reducing: Any) -> None:
        """Copy what was reduced to the block, once the stream `reducing` has done it."""
        grads = [local_of(each.sharded_param.grad) for each in reduced]
        flat = _whole_storage(grads[0])
        assert all(g.untyped_storage().data_ptr() == flat.data_ptr() for g in grads if g.numel())
        if self.block is None or self.block.sizes != [len(flat)]:
            self.block = self._allocate(flat)
        down = self.transfers.down
        assert down is not None
        down.wait_stream(reducing)
        with torch.cuda.stream(down):
            self._measure(reduced, grads)
            self.window.to_host(self.block, flat.view(torch.uint8))
            self.copied = down.record_event()
        if self.adds:
            self.transfers.keep_while_leaving(flat)
        else:  # it is memory of the reducing stream
            reducing.wait_stream(down)
        (whole,) = self.block.views()
        for each, grad in zip(reduced, grads, strict=True):
            leaf = each.param.sharded_param
            leaf.grad = each.param.to_sharded_dtensor(as_strided_in(whole, grad))
            if hooks := hooks_after_accumulation(leaf):
                self.transfers.wait_for_gradients()  # a user's hook may read it
                for hook in hooks:
                    hook(leaf)

    def _allocate(self, flat: Tensor) -> Block:
        sizes, dtypes, region = [len(flat)], [flat.dtype], None
        if self.storage.parameters == "disk":
            region = take(self.store, sizes, dtypes)
            self.storage.regions["gradients"] = [region]
        return allocate(sizes, dtypes, region)

    def _measure(self, reduced: Sequence[ReducedOnDevice], grads: Sequence[Tensor]) -> None:
        """Note the norms while the gradients are on the GPU."""
        names = [self.names[id(each.param)] for each in reduced]
        here = [(n, grad) for n, grad in zip(names, grads, strict=True) if grad.numel()]
        self.norms.update(zip((n for n, _ in here), norms([g for _, g in here]), strict=True))


def _whole_storage(part: Tensor) -> Tensor:
    """Return all elements of the storage of `part`."""
    numel = part.untyped_storage().nbytes() // part.itemsize
    return part.as_strided((numel,), (1,), 0)
