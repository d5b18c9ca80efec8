"""The groups that the engine will make of a model, with their bytes. Standard library only."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from colotrain.plan import ParameterInfo, Survey, Trace
from colotrain.plugins import expand

if TYPE_CHECKING:
    from colotrain.estimate.memory import Layout

REDUCE_BYTES = 4
"""Gradients are reduced in fp32 whenever computing is in half precision."""
COMPUTE_BYTES = {"fp32": None, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Parameters that are gathered and reduced together, as `engine.grouping` finds them."""

    name: str
    blocks: tuple[str, ...]
    stays: bool
    """Whole from the first forward of a step to its last backward."""
    shard_bytes: int
    """Of a rank, as stored."""
    gathered_bytes: int
    """Whole and padded, in the dtype that is computed in."""
    reduced_bytes: int
    """Whole and padded gradients in the dtype they are reduced in; 0 where nothing trains."""
    trained_bytes: int
    """Whole gradients as they are accumulated."""
    trained_shard_bytes: int
    trained_shard_numel: int


def find(survey: Survey, trace: Trace | None, layout: Layout) -> dict[str, Group]:
    """Name → group, in the model's order, with the root's (empty name) last."""
    known = list(dict.fromkeys(p.group for p in survey.parameters if p.group))
    if trace is not None:
        calls = Counter(s.block for s in trace.segments if s.phase == "forward")
        known = [block for block in known if calls[block] == 1]
    found = {}
    for blocks in _packed(known, survey, layout):
        found[blocks[0]] = _group(blocks[0], blocks, survey, layout, set(known))
    found[""] = _group("", (), survey, layout, set(known))
    return found


def _packed(blocks: list[str], survey: Survey, layout: Layout) -> list[tuple[str, ...]]:
    """As `engine.grouping.pack`."""
    if layout.chunk_bytes is None:
        return [(block,) for block in blocks]
    sizes = Counter[str]()
    for parameter in survey.parameters:
        sizes[parameter.group] += parameter.numel * parameter.itemsize
    packed: list[list[str]] = []
    room = 0
    for block in blocks:
        alike = packed and _stays(block, layout) == _stays(packed[-1][0], layout)
        if alike and sizes[block] <= room:
            packed[-1].append(block)
            room -= sizes[block]
        else:
            packed.append([block])
            room = layout.chunk_bytes - sizes[block]
    return [tuple(blocks) for blocks in packed]


def _stays(name: str, layout: Layout) -> bool:
    for pattern, reshard in layout.reshard_overrides.items():
        if any(fnmatchcase(name, glob) for glob in expand(pattern)):
            return not reshard
    return layout.row.parameters_live == "step"


def _group(
    name: str, blocks: tuple[str, ...], survey: Survey, layout: Layout, known: set[str]
) -> Group:
    def is_in(parameter: ParameterInfo) -> bool:
        return parameter.group in blocks if blocks else parameter.group not in known

    members = [p for p in survey.parameters if is_in(p)]
    trained = [p for p in members if p.frozen_by is None]
    compute = COMPUTE_BYTES[layout.precision]
    reduce = REDUCE_BYTES if compute else None
    shard = layout.shard
    padded = {p.name: _padded(p, shard) for p in members}
    return Group(
        name=name,
        blocks=blocks,
        stays=_stays(name, layout) if name else layout.row.parameters_live == "step",
        shard_bytes=sum(_rows(p, shard) * p.itemsize for p in members),
        gathered_bytes=sum(padded[p.name] * (compute or p.itemsize) for p in members),
        reduced_bytes=sum(padded[p.name] * (reduce or p.itemsize) for p in trained),
        trained_bytes=sum(p.numel * (reduce or p.itemsize) for p in trained),
        trained_shard_bytes=sum(_rows(p, shard) * p.itemsize for p in trained),
        trained_shard_numel=sum(_rows(p, shard) for p in trained),
    )


def _rows(parameter: ParameterInfo, shard: int) -> int:
    """Elements of the first, largest shard."""
    if not parameter.shape:
        return parameter.numel
    rows = parameter.shape[0]
    return math.ceil(rows / shard) * (parameter.numel // max(1, rows))


def _padded(parameter: ParameterInfo, shard: int) -> int:
    """Elements that are exchanged: every rank's part is as large as the largest."""
    return _rows(parameter, shard) * shard if parameter.shape else 0
