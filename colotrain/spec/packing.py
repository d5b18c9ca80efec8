"""Modules packed into groups: small modules joined, large ones split. Standard library only.

A group is all-gathered and reduce-scattered at once, so its size is a trade-off: many small groups
need many collectives, few large ones much gathered memory. Buffers have the size of the largest
group, so they are partly padding for every smaller group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from colotrain.spec.installed_torch import torch_packs_modules
from colotrain.spec.survey import ParameterInfo

IDEAL_BYTES = 64 << 20
"""Preferred bytes per group: enough for an efficient collective."""
MOST_GROUPS = 64
SIZES = [1 << power for power in range(20, 31)]
CLOSE = 0.02
"""Shares of padding that differ by less count as equal."""
EXTRA = 0.03
"""Memory that packing modules into larger groups may add to a rank, as a share of its parameters,
gradients and optimizer state."""
COPIES = 5
"""Most copies of a group's bytes in a rank's memory: two gathered groups, the buffers they were
gathered in (one on a CPU), and one for reducing gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A module that may form a group, and the modules inside it that may, too."""

    name: str
    num_bytes: int
    """Bytes of all its parameters."""
    trained: bool
    """Whether any of its parameters is trained."""
    dtypes: frozenset[Any] = frozenset()
    """Data types of its parameters."""
    parts: tuple[Unit, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Modules that make up a group. A module comes in an earlier chunk than its parent."""

    names: tuple[str, ...]
    num_bytes: int


def pack(
    units: Iterable[Unit], chunk_bytes: int, kind: Callable[[str], Any] = lambda name: None
) -> list[Chunk]:
    """Units in groups of at most `chunk_bytes`, or of one unit that cannot be split further.

    Neighbours share a group only if they have the same `kind` and the same dtypes (gradients of
    two dtypes cannot be reduced together), and if both are trained or both frozen: backward would
    gather frozen parameters, too. Parts of a unit share a group only with parts of the same unit.
    Where torch does not gather several modules as one group, each unit is a group.
    """
    if not torch_packs_modules():
        return [Chunk(names=(unit.name,), num_bytes=unit.num_bytes) for unit in units]
    chunks: list[Chunk] = []
    before: Any = None
    for unit, owner in (piece for top in units for piece in _split(top, chunk_bytes, top.name)):
        alike = (kind(unit.name), unit.trained, unit.dtypes, owner)
        last = chunks[-1] if chunks else None
        if last and alike == before and last.num_bytes + unit.num_bytes <= chunk_bytes:
            names, size = (*last.names, unit.name), last.num_bytes + unit.num_bytes
            chunks[-1] = Chunk(names=names, num_bytes=size)
        else:
            chunks.append(Chunk(names=(unit.name,), num_bytes=unit.num_bytes))
        before = alike
    return chunks


def _split(unit: Unit, chunk_bytes: int, top: str) -> Iterator[tuple[Unit, str | None]]:
    """Yield the unit with owner None; if it is too large, its parts and rest with owner `top`."""
    if unit.num_bytes <= chunk_bytes or not unit.parts:
        yield unit, None if unit.name == top else top
        return
    for part in unit.parts:
        yield from _split(part, chunk_bytes, top)
    left = unit.num_bytes - sum(part.num_bytes for part in unit.parts)
    if left:
        rest = Unit(name=unit.name, num_bytes=left, trained=unit.trained, dtypes=unit.dtypes)
        yield rest, f"{unit.name} without its parts"


def choose_chunk_bytes(units: Sequence[Unit], *, state_bytes: int) -> int:
    """The size that packs `units` with least padding in at most MOST_GROUPS groups.

    Among equally good sizes, the one nearest to IDEAL_BYTES is taken. Where possible,
    packing adds at most the share EXTRA to `state_bytes`: a rank's bytes of parameters, gradients
    and optimizer state.
    """
    own = {unit.num_bytes * count for unit in units for count in (1, 2, 3, 4, 8)}
    sizes = sorted({*SIZES, *(n for n in own if SIZES[0] <= n <= SIZES[-1])})
    packed = {size: [chunk.num_bytes for chunk in pack(units, size)] for size in sizes}
    few = {size: groups for size, groups in packed.items() if len(groups) <= MOST_GROUPS}
    if not few:
        return min(packed, key=lambda size: (len(packed[size]), size))
    largest = max((unit.num_bytes for unit in units), default=0)
    limit = largest + int(EXTRA * state_bytes) // COPIES
    return min(
        [size for size in few if size <= limit] or [min(few)],
        key=lambda size: (
            round(padding(few[size]) / CLOSE),
            abs(math.log2(size / IDEAL_BYTES)),
            size,
        ),
    )


def padding(sizes: Sequence[int]) -> float:
    """Share of padding in buffers that each have the size of the largest group."""
    return 1.0 - sum(sizes) / (len(sizes) * max(sizes)) if any(sizes) else 0.0


def units_of(parameters: Sequence[ParameterInfo], *, split: bool) -> list[Unit]:
    """The parameters' blocks as units, with their modules as parts if `split`."""
    groups: dict[str, list[ParameterInfo]] = {}
    for parameter in parameters:
        if parameter.group and parameter.shape and parameter.numel:
            groups.setdefault(parameter.group, []).append(parameter)
    return [_unit(name, members, split=split) for name, members in groups.items()]


def _unit(name: str, members: list[ParameterInfo], *, split: bool) -> Unit:
    inside: dict[str, list[ParameterInfo]] = {}
    for parameter in members:
        child, _, rest = parameter.name.removeprefix(f"{name}.").partition(".")
        if rest:
            inside.setdefault(f"{name}.{child}", []).append(parameter)
    return Unit(
        name=name,
        num_bytes=sum(p.numel * p.itemsize for p in members),
        trained=any(p.frozen_by is None for p in members),
        dtypes=frozenset(p.itemsize for p in members),  # two dtypes of one size are rare
        parts=tuple(_unit(n, ps, split=True) for n, ps in inside.items()) if split else (),
    )
