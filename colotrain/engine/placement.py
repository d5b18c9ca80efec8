"""Where parameters, gradients and optimizer state rest: device, host or disk, group by group.

The decision is `tiers.place`, the same on every rank; here it is carried out. What rests on disk
is mapped memory (`disk.Region`) under the very tensors that training works on, so that checkpoints,
evaluation and reading gradients need to know nothing of it; what this module does is to fetch
pages before they are used and to write them back and drop them afterwards.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from colotrain.engine.disk import (
    ALIGNMENT,
    DiskStore,
    Region,
    aligned,
    return_free_memory,
    whole_pages,
)
from colotrain.engine.freezing import matches
from colotrain.engine.sharding import Group, ShardedModel
from colotrain.errors import ColotrainError
from colotrain.observe.probes import memory_now, reset_peak
from colotrain.plan import RunPlan
from colotrain.tiers import (
    GroupBytes,
    Kind,
    Other,
    Placement,
    Tier,
    bytes_by_tier,
    lowest,
    moved_bytes,
    place,
)

TENSORS_OF_STATE = 3
"""Space for alignment is kept for so many tensors of optimizer state per parameter."""
SAFETY = 1.5
"""By which the first guess exceeds the arithmetic, for what no arithmetic knows: a first step that
is killed for memory teaches nothing, and after it things may move up again."""
MARGIN = 0.03
"""Of what is measured, added to it: the next step's peak is not exactly this one's."""


@dataclass(slots=True, kw_only=True)
class Home:
    """Where one group's tensors rest on this rank."""

    index: int
    group: Group
    names: dict[str, Any]
    """Parameter name → torch's record of it (FSDPParam)."""
    regions: dict[Kind, list[Region]] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Parameter name → mapped memory for its sharded gradient."""
    kept: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """Parameter name → key of its optimizer state → the tensor below the device."""
    parameters: Tier = "device"
    """Where the parameters are now; on CPU the device is the host."""
    last_trained: str = ""
    """The last parameter of the group whose gradient is reduced."""

    def pages(self, *kinds: Kind) -> list[Region]:
        return [region for kind in kinds for region in self.regions.get(kind, [])]


Modules = list[tuple[str, list[nn.Module]]]


def weigh(model: nn.Module, groups: Modules, plan: RunPlan, state_ratio: float) -> list[GroupBytes]:
    """What each group weighs on a rank, the root's last, when all that ever trains does so.

    `state_ratio` is bytes of optimizer state per byte of parameter. The same on every rank: shards
    are counted with the padding that makes them equal.
    """
    ranks = plan.plugin.mesh[-1]
    thawed = [glob for globs in plan.freeze.unfreeze.values() for glob in globs]
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.ndim and parameter.numel():
            names.setdefault(parameter, []).append(name)
    sizes = []
    for name, modules in [*groups, ("", [model])]:
        whole = trained = 0
        for parameter in (p for module in modules for p in module.parameters()):
            known_as = names.pop(parameter, None)
            if known_as is None:  # counted with a group inside this one
                continue
            rows = -(-parameter.shape[0] // ranks)
            size = rows * (parameter.numel() // parameter.shape[0]) * parameter.itemsize
            whole += size
            trained += size if parameter.requires_grad or matches(known_as, thawed) else 0
        state = round(trained * state_ratio)
        sizes.append(GroupBytes(name=name, parameters=whole, gradients=trained, optimizer=state))
    return sizes


def guess(plan: RunPlan, sizes: Sequence[GroupBytes]) -> Other:
    """What else a rank will need, before any step has shown it. All ranks must call.

    Gathered parameters: the root's with the output of its gather, and two groups'; of one group
    the whole gradient, the part of it being added, and the input of its reduction; activations as
    the ledger has them.
    """
    now = memory_now()[0] if plan.cluster.device == "cpu" else 0
    base = torch.tensor(now, dtype=torch.int64, device=plan.cluster.device)
    dist.all_reduce(base, op=dist.ReduceOp.MAX)
    ranks = plan.plugin.mesh[-1]
    blocks = sorted(size.parameters for size in sizes[:-1])
    gathered = ranks * (2 * sizes[-1].parameters + sum(blocks[-2:]))
    reduced = 3 * ranks * max(size.gradients for size in sizes)
    passing = SAFETY * (gathered + reduced) + plan.memory.activations
    compute = int(base) + int(passing)
    return Other(compute=compute, update=int(base))


class Tiers:
    """The tiers of a sharded model. Everything here is decided alike on every rank."""

    def __init__(self, plan: RunPlan, sizes: list[GroupBytes], guess: Other) -> None:
        assert plan.plugin.budget is not None
        self.plan, self.budget, self.sizes = plan, plan.plugin.budget, sizes
        self.device = plan.cluster.device
        self.top: Tier = "host" if self.device == "cpu" else "device"
        self.other = guess
        self.placement = self._decide(guess)
        self.homes: list[Home] = []
        self.norms: dict[str, Tensor] = {}
        """Parameter name → norm of the local gradient, where that has gone to disk."""
        self.store: DiskStore | None = None
        self.settled, self.exhausted = False, False
        self.reader = ThreadPoolExecutor(1, thread_name_prefix="tiers-read")
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="tiers-write")
        self.writing: Future[None] | None = None
        self.order: dict[tuple[int, int], int] = {}
        """Two groups gathered one after the other → the one that came next, the last time."""
        self.gathered = (-1, -1)

    # -- deciding

    def _decide(self, other: Other) -> Placement:
        return place(self.sizes, self.budget, other, device=self.device)

    def is_short(self) -> bool:
        """Whether this rank has used more memory than it may, since things were last settled."""
        if self.exhausted:
            return False
        limit = self.budget.host_bytes if self.device == "cpu" else self.budget.device_bytes
        return not self.settled or memory_now()[1] > limit

    def settle(self, optimizer: Any) -> bool:
        """Place anew by what the last forward and backward needed. All ranks must call.

        The first time anything may move either way; later only down. Returns whether anything
        changed.
        """
        now, peak = memory_now()
        if self.device != "cpu":
            now = torch.cuda.memory_allocated()
        model = self._resident(optimizer)
        mine = torch.tensor([peak - model, now - model], dtype=torch.int64)
        mine = mine.to(self.device)
        dist.all_reduce(mine, op=dist.ReduceOp.MAX)
        compute, update = (int(max(n, 0) * (1 + MARGIN)) for n in mine.tolist())
        self.other = Other(compute=compute, update=update)
        wanted = self._decide(self.other)
        if self.settled:
            wanted = lowest(wanted, self.placement)
        if self.device != "cpu":  # `fully_shard` has to know from the beginning
            wanted = _with_parameters_of(wanted, self.placement)
        changed = wanted.groups != self.placement.groups
        self._reserve(wanted)
        self.exhausted = self.settled and not changed
        self.settled = True
        self._move(optimizer)
        reset_peak()
        return changed

    def _reserve(self, wanted: Placement) -> None:
        """Take `wanted` over with the space it needs on disk, on every rank or on none."""
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
        """Bytes of model data that are in the uppermost tier now."""
        has_state = optimizer.steps > 0
        return sum(
            (size.parameters if placed.parameters == self.top else 0)
            + (size.gradients if placed.gradients == self.top else 0)
            + (size.optimizer if placed.optimizer == self.top and has_state else 0)
            for size, placed in zip(self.sizes, self.placement.groups, strict=True)
        )

    def describe(self) -> dict[str, Any]:
        """The `tiers` event."""
        moved = moved_bytes(
            self.sizes,
            self.placement,
            micro_batches=self.plan.batch.accumulation_steps,
        )
        budget = {k: v for k, v in asdict(self.budget).items() if k.endswith("_bytes")}
        return {
            "bytes": bytes_by_tier(self.sizes, self.placement),
            "need": dict(self.placement.need),
            "other": asdict(self.other),
            "moved_bytes": moved,
            "fits": self.placement.fits,
            "budget": budget,
        }

    # -- carrying out

    def attach(self, sharded: ShardedModel) -> None:
        """Take the groups of `sharded` over, and the space on disk. Before they have storage."""
        names = {id(p): name for name, p in sharded.module.named_parameters()}
        for index, group in enumerate(sharded.groups):
            own = {names[id(param.sharded_param)]: param for param in group.params}
            self.homes.append(Home(index=index, group=group, names=own, parameters=self.top))
        self.norms = sharded.norms
        if self.placement.uses_disk:
            self._open_store()

    def _open_store(self) -> None:
        if self.store is None:
            assert self.budget.disk_path is not None
            self.store = DiskStore(folder=Path(self.budget.disk_path), limit=self.budget.disk_bytes)
        need = sum(map(self._on_disk_bytes, self.homes)) - self.store.taken
        self.store.reserve(need)

    def _on_disk_bytes(self, home: Home) -> int:
        """Space that a group's regions take, with room for alignment."""
        size, placed = self.sizes[home.index], self.placement.groups[home.index]
        kinds: tuple[Kind, ...] = ("parameters", "gradients", "optimizer")
        found = [getattr(size, k) for k in kinds if getattr(placed, k) == "disk"]
        gaps = ALIGNMENT * len(home.names) * TENSORS_OF_STATE
        return sum(whole_pages(n + gaps) for n in found if n)

    def house_parameters(self, fresh: bool) -> None:
        """Bring each group's parameters where they belong; `fresh` ones have no values yet."""
        for home in self.homes:
            wanted = self.placement.groups[home.index].parameters
            if wanted != home.parameters and home.names:
                self._rehouse(home, wanted, fresh=fresh)

    def _rehouse(self, home: Home, tier: Tier, *, fresh: bool) -> None:
        params = list(home.names.values())
        sizes = [param.padded_sharded_param_size.numel() for param in params]
        dtypes = [param.sharded_param.dtype for param in params]
        if tier == "disk":
            if "parameters" not in home.regions:
                home.regions["parameters"] = [self._take(sizes, dtypes)]
            flats = home.regions["parameters"][0].carve(sizes, dtypes)
        else:
            pin = self.device != "cpu"
            each = zip(sizes, dtypes, strict=True)
            flats = [torch.empty(n, dtype=d, pin_memory=pin) for n, d in each]
        for param, flat in zip(params, flats, strict=True):
            if not fresh:
                flat.copy_(param._sharded_param_data)
            rows = param.sharded_param._local_tensor.shape[0]
            param._sharded_param_data = flat
            local = flat.view(param.padded_sharded_param_size)[:rows]
            param.sharded_param._local_tensor = local
        home.parameters = tier
        self._write_back(home, "parameters")
        for fsdp_group in home.group.handle._get_fsdp_state()._fsdp_param_groups:
            self._watch_gathers(home.index, fsdp_group)

    def _take(self, sizes: Sequence[int], dtypes: Sequence[torch.dtype]) -> Region:
        assert self.store is not None
        each = zip(sizes, dtypes, strict=True)
        return self.store.take(max(1, sum(aligned(n * d.itemsize) for n, d in each)))

    def release(self, parameter: Tensor) -> None:
        """Write back and drop a parameter that was just filled."""
        for home in self.homes:
            if home.parameters == "disk" and any(
                p.sharded_param is parameter for p in home.names.values()
            ):
                self._write_back(home, "parameters")

    def trim(self) -> None:
        """Take every page that rests on disk out of this process's memory."""
        for home in self.homes:
            for region in home.pages("parameters", "gradients", "optimizer"):
                region.drop()

    def _move(self, optimizer: Any) -> None:
        """Parameters move now, optimizer state at its next visit, gradients when next reduced."""
        self.house_parameters(fresh=False)
        for home in self.homes:
            for name, param in home.names.items():
                if name in optimizer.shards:
                    optimizer.shards[name].data = param.sharded_param._local_tensor
        self.watch_gradients()

    def _write_back(self, home: Home, *kinds: Kind) -> None:
        """Start writing now; at most one group's pages are on their way at a time."""
        regions = home.pages(*kinds)
        if not regions:
            return
        if self.writing is not None:
            self.writing.result()
        self.writing = self.writer.submit(_write, regions)

    # -- parameters, around each gather

    def _watch_gathers(self, index: int, fsdp_group: Any) -> None:
        """After every all-gather of the group drop its pages and fetch those of the next."""
        if hasattr(fsdp_group, "_colotrain_gather"):
            return
        alone = fsdp_group._all_gather_process_group.size() == 1  # then waiting copies
        name = "wait_for_unshard" if alone else "unshard"
        gather = fsdp_group._colotrain_gather = getattr(fsdp_group, name)

        @functools.wraps(gather)
        def watched(*args: Any, **kwargs: Any) -> Any:
            pending = fsdp_group._all_gather_result is not None
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
            self.reader.submit(_fetch, following.pages("parameters"), [])

    # -- gradients

    def watch_gradients(self) -> None:
        """Have the gradients of groups that keep them on disk go there as they are reduced."""
        if not any(placed.gradients == "disk" for placed in self.placement.groups):
            return
        for home in self.homes:
            for name, param in home.names.items():
                leaf = param.sharded_param
                if leaf.requires_grad:
                    home.last_trained = name
                if leaf.requires_grad and not hasattr(leaf, "_colotrain_watched"):
                    leaf._colotrain_watched = True
                    hook = functools.partial(self._gradient, home, name, param)
                    leaf.register_post_accumulate_grad_hook(hook)

    def _gradient(self, home: Home, name: str, param: Any, leaf: Tensor) -> None:
        """Called when a sharded gradient is complete or has been added to."""
        self.norms.pop(name, None)
        if self.placement.groups[home.index].gradients != "disk" or leaf.grad is None:
            return
        local = leaf.grad._local_tensor  # type: ignore[attr-defined]
        if name not in home.gradients:
            self._make_room_for_gradients(home)
        own = home.gradients[name].view(local.shape)
        if local.data_ptr() != own.data_ptr():
            own.copy_(local)
            leaf.grad = param.to_sharded_dtensor(own)
        if own.numel():
            self.norms[name] = torch._foreach_norm([own])[0]
        if name == home.last_trained:
            self._write_back(home, "gradients")

    def _make_room_for_gradients(self, home: Home) -> None:
        missing = {
            n: p
            for n, p in home.names.items()
            if n not in home.gradients and p.sharded_param.requires_grad
        }
        sizes = [p.sharded_param._local_tensor.numel() for p in missing.values()]
        dtypes = [p.sharded_param.dtype for p in missing.values()]
        region = self._take(sizes, dtypes)
        home.regions.setdefault("gradients", []).append(region)
        home.gradients |= dict(zip(missing, region.carve(sizes, dtypes), strict=True))

    # -- the optimizer

    def visit(self, optimizer: Any) -> Iterator[list[str]]:
        """Names of the parameters to update, group by group, their state at hand meanwhile.

        While one group is updated the next one's pages are fetched.
        """
        return_free_memory()
        housed = {name for home in self.homes for name in home.names}
        alone = [name for name in optimizer.shards if name not in housed]
        if alone:
            yield alone
        busy = [(h, n) for h in self.homes if (n := [x for x in h.names if x in optimizer.shards])]
        ahead: Future[None] | None = None
        for number, (home, names) in enumerate(busy):
            if ahead is not None:
                ahead.result()
            self._arrive(home, names, optimizer)
            if number + 1 < len(busy):
                following = busy[number + 1][0]
                changed = following.pages("optimizer", "parameters")
                ahead = self.reader.submit(_fetch, following.pages("gradients"), changed)
            yield names
            self.leave(home, names, optimizer)
        self._flush()

    def _arrive(self, home: Home, names: list[str], optimizer: Any) -> None:
        """Optimizer state where the shards are; what may stay there leaves its place below."""
        stays = self.placement.groups[home.index].optimizer == self.top
        for name in names:
            shard = optimizer.shards[name]
            for key, kept in home.kept.get(name, {}).items():
                if kept.device != shard.device or stays:
                    optimizer.torch.state[shard][key] = kept.to(
                        shard.device, non_blocking=True, copy=True
                    )
        if stays:
            home.kept.clear()

    def leave(self, home: Home, names: list[str], optimizer: Any) -> None:
        """Bring the state of `names` back to where it rests."""
        for region in home.pages("gradients"):
            region.drop()
        if self.placement.groups[home.index].optimizer == self.top:
            self._write_back(home, "parameters")
            return
        states = {name: _large(optimizer.torch.state[optimizer.shards[name]]) for name in names}
        fresh = {n: s for n, s in states.items() if s and n not in home.kept}
        if fresh:
            home.kept |= self._make_room_for_state(home, fresh)
        for name, state in states.items():
            for key, value in state.items():
                kept = home.kept[name][key]
                if value is not kept:
                    kept.copy_(value)
                    optimizer.torch.state[optimizer.shards[name]][key] = kept
        self._write_back(home, "parameters", "optimizer")

    def _make_room_for_state(
        self, home: Home, states: Mapping[str, Mapping[str, Tensor]]
    ) -> dict[str, dict[str, Tensor]]:
        flat = [(n, k, t) for n, state in states.items() for k, t in state.items()]
        if self.placement.groups[home.index].optimizer == "disk":
            sizes, dtypes = [t.numel() for *_, t in flat], [t.dtype for *_, t in flat]
            region = self._take(sizes, dtypes)
            home.regions.setdefault("optimizer", []).append(region)
            tensors = region.carve(sizes, dtypes)
        else:
            pin = self.device != "cpu"
            tensors = [torch.empty(t.numel(), dtype=t.dtype, pin_memory=pin) for *_, t in flat]
        kept: dict[str, dict[str, Tensor]] = {}
        for (name, key, value), tensor in zip(flat, tensors, strict=True):
            kept.setdefault(name, {})[key] = tensor.view(value.shape)
        return kept

    def _flush(self) -> None:
        if self.writing is not None:
            self.writing.result()
            self.writing = None


def _fetch(to_read: list[Region], to_write: list[Region]) -> None:
    for region in to_read:
        region.fetch(to_write=False)
    for region in to_write:
        region.fetch(to_write=True)


def _write(regions: list[Region]) -> None:
    for region in regions:
        region.start_writing()
    for region in regions:
        region.finish_writing(forget=False)


def _large(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a parameter's state that are worth moving: not its step count."""
    return {k: v for k, v in state.items() if isinstance(v, Tensor) and v.ndim > 0 and v.numel()}


def _with_parameters_of(placement: Placement, current: Placement) -> Placement:
    groups = tuple(
        replace(wanted, parameters=now.parameters, gradients=now.gradients)
        for wanted, now in zip(placement.groups, current.groups, strict=True)
    )
    return replace(placement, groups=groups)
