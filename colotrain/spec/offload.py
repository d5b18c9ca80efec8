"""Placement of each group's bytes on device, host or disk: arithmetic, the same on every rank.

Bytes over a tier's budget move down one tier, those that cost least to move first. Optimizer state
is read and written once a step. Sharded gradients are written and read once per micro-batch.
Parameters are read for every forward, every backward and the update. Of one kind, the model's
first groups move first: memory peaks between forward and backward, and backward uses them last.
Standard library only.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Tier = Literal["device", "host", "disk"]
Kind = Literal["optimizer", "gradients", "parameters"]
TIERS: tuple[Tier, ...] = ("device", "host", "disk")
SAFETY = 1.5
"""Factor added to the first estimate of a run, before anything was measured: a first step that is
killed for lack of memory measures nothing. After the measurement more can stay in memory."""
MARGIN = 0.1
"""Fraction added to bytes that were measured, or on CUDA traced, because the next step's peak
differs a little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Bytes that one rank may use of each tier, everything included."""

    device_bytes: int
    """0 on CPU, where the device's memory is the host's."""
    host_bytes: int
    disk_bytes: int
    """0 where no folder is given."""
    disk_path: str | None
    """Folder of the disk tier: absolute, or relative to the run directory."""

    def room(self, tier: Tier) -> int:
        """Return the bytes that a rank may use of a tier."""
        rooms = {"device": self.device_bytes, "host": self.host_bytes, "disk": self.disk_bytes}
        return rooms[tier]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBytes:
    """Bytes of a group on the rank that holds most of it."""

    name: str
    parameters: int
    gradients: int
    optimizer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """A parameter as the model declares it, before sharding."""

    shape: tuple[int, ...]
    itemsize: int
    """Bytes per element."""
    trains: bool
    """Whether it trains now or is unfrozen later."""


def padded_rows(parameter: Declared, ranks: int) -> int:
    """A rank's rows, padded so that every rank has as many.

    Scalars and empty parameters are not sharded: 0.
    """
    return math.ceil((*parameter.shape, 0)[0] / ranks)


StatePerRow = Callable[[tuple[int, ...], int], float]
"""Whole shape of a parameter, and bytes per element → bytes of optimizer state for each row."""


def group_bytes(
    name: str, parameters: Iterable[Declared], *, ranks: int, state_per_row: StatePerRow
) -> GroupBytes:
    """Bytes of a group. Gradients have the parameter's own dtype."""
    whole = trained = 0
    state = 0.0
    for parameter in parameters:
        rows, itemsize = padded_rows(parameter, ranks), parameter.itemsize
        size = rows * math.prod(parameter.shape[1:]) * itemsize
        whole += size
        if parameter.trains:
            trained += size
            state += rows * state_per_row(parameter.shape, itemsize)
    return GroupBytes(name=name, parameters=whole, gradients=trained, optimizer=round(state))


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTiers:
    """The tiers of one group."""

    parameters: Tier
    gradients: Tier
    optimizer: Tier


@dataclass(frozen=True, slots=True, kw_only=True)
class NonModelBytes:
    """Bytes that are not model data (parameters, gradients, optimizer state), at their peak."""

    compute: int
    """Bytes in forward and backward: activations, gathered parameters, buffers, the process."""
    update: int
    """Bytes during the optimizer's update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Tier of every group's bytes, in the order of the groups."""

    groups: tuple[GroupTiers, ...]
    top: Tier
    """Tier that training computes in: the device, or the host on CPU."""
    fits: bool
    """Whether every tier stays within its budget."""
    need: dict[Tier, int]
    """Tier → bytes that it holds at its peak."""

    @property
    def streams(self) -> bool:
        """Whether anything is stored below the top tier."""
        tiers = {tier for placed in self.groups for tier in dataclasses.astuple(placed)}
        return bool(tiers - {self.top})

    @property
    def uses_disk(self) -> bool:
        return any("disk" in dataclasses.astuple(placed) for placed in self.groups)


def with_margin(non_model: NonModelBytes) -> NonModelBytes:
    """`non_model` and `MARGIN` of it."""
    compute, update = (int(n * (1 + MARGIN)) for n in dataclasses.astuple(non_model))
    return NonModelBytes(compute=compute, update=update)


def place(
    groups: Sequence[GroupBytes], budget: Budget, non_model: NonModelBytes, *, device: str
) -> Placement:
    """Placement that keeps as much as `budget` allows in the upper tiers.

    On CPU the tiers are host and disk. On CUDA bytes leave the device for the host first;
    gradients are in the tier of their parameters, because `fully_shard` puts them there.
    """
    used = TIERS[1:] if device == "cpu" else TIERS
    top = used[0]
    placed = [GroupTiers(parameters=top, gradients=top, optimizer=top) for _ in groups]
    for upper, lower in itertools.pairwise(used):
        if lower == "disk" and not budget.disk_bytes:
            continue
        for index, kinds in _moves(groups, placed, upper, device):
            if _need(groups, placed, non_model, upper, device) <= budget.room(upper):
                break
            changes = dict.fromkeys(kinds, lower)
            placed[index] = dataclasses.replace(placed[index], **changes)
    need = {tier: _need(groups, placed, non_model, tier, device) for tier in used}
    fits = all(need[tier] <= budget.room(tier) for tier in used)
    return Placement(groups=tuple(placed), top=top, fits=fits, need=need)


def lower_of(placement: Placement, other: Placement) -> Placement:
    """The lower tier of `placement` and `other` for each group and kind, so nothing moves up."""
    groups = tuple(
        GroupTiers(
            parameters=_lower(mine.parameters, its.parameters),
            gradients=_lower(mine.gradients, its.gradients),
            optimizer=_lower(mine.optimizer, its.optimizer),
        )
        for mine, its in zip(placement.groups, other.groups, strict=True)
    )
    return dataclasses.replace(placement, groups=groups)


def with_parameters_of(placement: Placement, current: Placement) -> Placement:
    """`placement` with the parameters and gradients in the tiers that `current` has them in.

    A group's optimizer state is not above its parameters: the update is where they are.
    """
    groups = tuple(
        GroupTiers(
            parameters=now.parameters,
            gradients=now.gradients,
            optimizer=_lower(wanted.optimizer, now.parameters),
        )
        for wanted, now in zip(placement.groups, current.groups, strict=True)
    )
    return dataclasses.replace(placement, groups=groups)


def _lower(one: Tier, two: Tier) -> Tier:
    return max(one, two, key=TIERS.index)


def _moves(
    groups: Sequence[GroupBytes], placed: Sequence[GroupTiers], upper: Tier, device: str
) -> Iterator[tuple[int, tuple[Kind, ...]]]:
    """Group index and kinds of bytes that may leave `upper` together, the cheapest first."""
    together: tuple[tuple[Kind, ...], ...] = (("optimizer",), ("gradients",), ("parameters",))
    if device != "cpu" and upper == "device":
        together = (("optimizer",), ("parameters", "gradients"))
    for kinds in together:
        for index, group in enumerate(groups):
            if getattr(placed[index], kinds[0]) != upper:
                continue
            if any(getattr(group, kind) for kind in kinds):
                yield index, kinds


def _need(
    groups: Sequence[GroupBytes],
    placed: Sequence[GroupTiers],
    non_model: NonModelBytes,
    tier: Tier,
    device: str,
) -> int:
    """Bytes in `tier` at its peak."""
    resting = sum(
        getattr(group, field.name)
        for group, its in zip(groups, placed, strict=True)
        for field in dataclasses.fields(its)
        if getattr(its, field.name) == tier
    )
    if tier == "disk":
        return resting
    window = streaming_bytes(groups, placed, tier)
    if tier == "host" and device != "cpu":
        return resting + window
    return resting + max(non_model.compute, non_model.update + window)


def estimate_non_model(
    groups: Sequence[GroupBytes],
    *,
    ranks: int,
    process: int,
    activations: int,
    safety: float = SAFETY,
) -> NonModelBytes:
    """Estimate what a rank holds beside model data from the groups, before it was measured.

    It is for the CPU, and for models that cannot be traced; on CUDA the planner follows a step's
    allocations (`planner.memory.non_model_bytes`), and the run takes the sum from its plan.
    `process` are the bytes that it has before the model is built.

    Gathered are the root group (with the output of its gather) and two more groups. Gradients are
    those of one group: unsharded, being added, and as input of the reduction. The root group's
    appear one by one, and count as activations. `safety` is a factor on all of these.
    """
    *blocks, root = groups
    gathered = 2 * root.parameters + sum(sorted(group.parameters for group in blocks)[-2:])
    gradients = 3 * max((group.gradients for group in blocks), default=0)
    transient = int(safety * ranks * (gathered + gradients))
    return NonModelBytes(compute=process + transient + activations, update=process)


def streaming_bytes(groups: Sequence[GroupBytes], placed: Sequence[GroupTiers], tier: Tier) -> int:
    """Most bytes that an update brings up to `tier` at once: a group and the prefetched next.

    Groups whose parameters are below a GPU are updated on the host, so nothing of them comes up.
    Beside the others there is a scaled copy of the gradients of the one that is being updated.
    """
    streamed = [
        sum(
            getattr(group, field.name)
            for field in dataclasses.fields(its)
            if TIERS.index(getattr(its, field.name)) > TIERS.index(tier)
            and (tier != "device" or its.parameters == tier)
        )
        for group, its in zip(groups, placed, strict=True)
    ]
    scaled = [
        group.gradients if any(streamed) and tier == its.parameters == "device" else 0
        for group, its in zip(groups, placed, strict=True)
    ]
    each = zip(streamed, [*streamed[1:], 0], scaled, strict=True)
    return max(map(sum, each), default=0)


def bytes_by_tier(groups: Iterable[GroupBytes], placement: Placement) -> dict[str, dict[str, int]]:
    """Kind → tier → bytes."""
    found: dict[str, dict[str, int]] = {k: {} for k in ("parameters", "gradients", "optimizer")}
    for group, placed in zip(groups, placement.groups, strict=True):
        for kind, tiers in found.items():
            tier, size = getattr(placed, kind), getattr(group, kind)
            if size:
                tiers[tier] = tiers.get(tier, 0) + size
    return found


def moved_bytes(groups: Iterable[GroupBytes], placement: Placement, *, micro_batches: int) -> int:
    """Bytes that a step reads from and writes to the lower tiers.

    Optimizer state and parameters are read and written for the update, parameters read once more
    per forward and per backward; gradients are written by the first micro-batch, read and
    written by the others, and read for the update.
    """
    moved, top = 0, placement.top
    for group, placed in zip(groups, placement.groups, strict=True):
        if placed.optimizer != top:
            moved += 2 * group.optimizer
        if placed.gradients != top:
            moved += 2 * micro_batches * group.gradients
        if placed.parameters != top:
            trained = 2 * group.gradients  # as many bytes as their parameters have
            moved += 2 * micro_batches * group.parameters + trained
    return moved
