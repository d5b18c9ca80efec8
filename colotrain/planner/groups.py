"""The groups that the engine will make of a model, with their bytes. Standard library only."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from colotrain.planner.layout import Layout
from colotrain.spec.packing import pack, units_of
from colotrain.spec.plugins import stays_gathered
from colotrain.spec.precisions import PRECISIONS
from colotrain.spec.survey import ParameterInfo, Survey, Trace

REDUCE_BYTES = 4
"""Bytes per element of reduced gradients where computation is in half precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Parameters that are gathered and reduced together, as in `engine.sharding.grouping`."""

    name: str
    blocks: tuple[str, ...]
    stays: bool
    """Whether parameters stay gathered from a step's first forward to its last backward."""
    shard_bytes: int
    """Bytes of a rank's shard, in the dtype of storage."""
    gathered_sizes: tuple[int, ...]
    """Bytes of each gathered parameter, padded, in the compute dtype; without those that a rank
    computes with where they are, as where ranks share parameters in shared memory."""
    reduced_bytes: int
    """Bytes of unsharded, padded gradients in the dtype of reduction; 0 where all are frozen."""
    trained_bytes: int
    """Bytes of unsharded gradients in the dtype of accumulation."""
    trained_shard_bytes: int
    trained_shard_numel: int
    pieces: int = 1
    """Number of groups that a split block really is; they are gathered one after another."""
    trained_pieces: int = 1

    @property
    def gathered_bytes(self) -> int:
        return sum(self.gathered_sizes)


def find(survey: Survey, trace: Trace | None, layout: Layout) -> dict[str, Group]:
    """Name → group, in the model's order, with the root group (empty name) last."""
    known = list(dict.fromkeys(p.group for p in survey.parameters if p.group))
    if trace is not None:
        calls = Counter(s.block for s in trace.segments if s.phase == "forward")
        known = [b for b in known if calls[b] == 1 and b not in trace.ungrouped]
    found, cut = {}, _cut_up(known, survey, layout)
    for blocks in _packed(known, survey, layout):
        whole = _group(blocks[0], blocks, survey, layout, set(known))
        pieces, trained = cut.get(blocks[0], (1, 1))
        found[blocks[0]] = replace(whole, pieces=pieces, trained_pieces=trained)
    found[""] = _group("", (), survey, layout, set(known))
    return found


def _packed(blocks: list[str], survey: Survey, layout: Layout) -> list[tuple[str, ...]]:
    """Blocks of each group, as in `engine.sharding.grouping`, but split blocks stay whole."""
    if layout.chunk_bytes is None:
        return [(block,) for block in blocks]
    units = [unit for unit in units_of(survey.parameters, split=False) if unit.name in blocks]
    chunks = pack(units, layout.chunk_bytes, kind=lambda name: stays_gathered(name, layout))
    return [chunk.names for chunk in chunks]


def _cut_up(blocks: list[str], survey: Survey, layout: Layout) -> dict[str, tuple[int, int]]:
    """Split block → (number of its groups, number of those with trained parameters)."""
    if layout.chunk_bytes is None or not layout.split_blocks:
        return {}
    units = [unit for unit in units_of(survey.parameters, split=True) if unit.name in blocks]
    found = {}
    for unit in units:
        owners = {
            n: chunk.names[0] for chunk in pack([unit], layout.chunk_bytes) for n in chunk.names
        }
        trained = {
            owners[_longest(p.name, owners)]
            for p in survey.parameters
            if p.group == unit.name and p.frozen_by is None and p.numel
        }
        found[unit.name] = (len(set(owners.values())), len(trained))
    return {name: pair for name, pair in found.items() if pair[0] > 1}


def _longest(parameter: str, modules: Iterable[str]) -> str:
    """The innermost of `modules` that `parameter` is in."""
    return max((m for m in modules if parameter.startswith(f"{m}.")), key=len)


def _group(
    name: str, blocks: tuple[str, ...], survey: Survey, layout: Layout, known: set[str]
) -> Group:
    def is_in(parameter: ParameterInfo) -> bool:
        return parameter.group in blocks if blocks else parameter.group not in known

    members = [p for p in survey.parameters if is_in(p)]
    trained = [p for p in members if p.frozen_by is None]
    precision = PRECISIONS[layout.precision]
    compute = precision.num_bytes if precision.is_cast else None
    reduce = REDUCE_BYTES if compute else None
    shard = layout.shard
    padded = {p.name: _padded(p, shard) for p in members}
    used_in_place = {
        p.name
        for p in members
        if layout.shares_parameters
        or (layout.uses_shards and (not p.is_cast or compute in (None, p.itemsize)))
    }
    return Group(
        name=name,
        blocks=blocks,
        stays=stays_gathered(name, layout),
        shard_bytes=sum(shard_numel(p, shard) * p.itemsize for p in members),
        gathered_sizes=tuple(
            padded[p.name] * (compute if compute and p.is_cast else p.itemsize)
            for p in members
            if padded[p.name] and p.name not in used_in_place
        ),
        reduced_bytes=sum(padded[p.name] * (reduce or p.itemsize) for p in trained),
        trained_bytes=sum(p.numel * (reduce or p.itemsize) for p in trained),
        trained_shard_bytes=sum(shard_numel(p, shard) * p.itemsize for p in trained),
        trained_shard_numel=sum(shard_numel(p, shard) for p in trained),
    )


def num_rows(parameter: ParameterInfo, shard: int) -> int:
    """Rows of the first shard; `fully_shard` cuts dimension 0 and rounds up. A scalar is one."""
    return math.ceil(parameter.shape[0] / shard) if parameter.shape else 1


def shard_numel(parameter: ParameterInfo, shard: int) -> int:
    """Elements of the first shard."""
    if not parameter.shape:
        return parameter.numel
    return num_rows(parameter, shard) * (parameter.numel // max(1, parameter.shape[0]))


def _padded(parameter: ParameterInfo, shard: int) -> int:
    """Elements that collectives exchange: every shard is padded to the size of the largest."""
    return shard_numel(parameter, shard) * shard if parameter.shape else 0


def reached_by_backward(trace: Trace | None) -> set[str] | None:
    """Blocks that backward runs through; None without a trace."""
    return None if trace is None else {s.block for s in trace.segments if s.phase == "backward"}


def fetched_ahead(groups: Mapping[str, Group], trace: Trace | None) -> str:
    """Name of the frozen group that backward prefetches without need; empty if there is none.

    `fully_shard` always prefetches the group that ran before the current one in forward.
    """
    reached, found = reached_by_backward(trace), ""
    for name, group in groups.items():
        if reached is None or not name or reached & set(group.blocks):
            break
        found = name
    return found
