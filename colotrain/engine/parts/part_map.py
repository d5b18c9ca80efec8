"""What this rank has of the model's parameters, and of tensors that are laid out like them."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from colotrain import module_tree
from colotrain.engine.comms.groups import Groups
from colotrain.spec.axes import DP_SHARD, PP, STAGE, TP, Axis, Ranks
from colotrain.spec.divisions import Split


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What this rank has of one tensor."""

    name: str
    whole: tuple[int, ...]
    """Shape of the whole tensor."""
    slices: tuple[slice, ...]
    """Where this rank's numbers stand in the whole tensor."""
    is_here: bool
    """Whether this rank's stage has the tensor; its part may still be empty."""
    divided: Mapping[Axis, int] = field(default_factory=dict)
    """Mesh axis → dimension that the ranks along it divide among themselves, from the outermost.

    Ranks along all other axes have the same numbers.
    """
    stages: tuple[int, ...] = (0,)
    """Pipeline stages that have it."""
    counts: bool
    """Whether this rank's numbers enter norms and sums.

    Of the ranks that hold the same numbers, exactly one counts.
    """
    writes: bool
    """Whether this rank saves them: ranks with the same numbers take turns, by the name."""
    frozen: str | None = None
    """The pattern that froze it; None where it trains."""

    @property
    def is_sharded(self) -> bool:
        """Whether `fully_shard` divides its rows; it takes neither scalars nor empty tensors."""
        return DP_SHARD in self.divided

    @property
    def sizes(self) -> tuple[int, ...]:
        """Shape of this rank's part."""
        return tuple(s.stop - s.start for s in self.slices)

    @property
    def begin(self) -> tuple[int, ...]:
        """Index of this rank's first number in the whole tensor."""
        return tuple(s.start for s in self.slices)


@dataclass(slots=True, eq=False, kw_only=True)
class PartMap(Mapping[str, Part]):
    """Name → this rank's part of each of the model's parameters, in the model's order.

    All ranks have the same names in the same order, as sums over parameters depend on it.
    """

    ranks: Ranks
    rank: int
    splits: Mapping[str, Split] = field(default_factory=dict)
    """Parameter → what this rank has of it, where ranks along `axis` divide it."""
    axis: Axis = TP
    holders: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Parameter → the pipeline stages that have it, where there are several stages."""
    _parts: dict[str, Part] = field(default_factory=dict)

    @staticmethod
    def of(
        model: nn.Module,
        comms: Groups,
        *,
        splits: Mapping[str, Split],
        holders: Mapping[str, tuple[int, ...]],
        axis: Axis = TP,
    ) -> PartMap:
        """Return the parts of the parameters of a model that `fully_shard` has sharded."""
        parts = PartMap(
            ranks=comms.ranks, rank=comms.rank, splits=splits, holders=holders, axis=axis
        )
        for name, parameter in module_tree.named_parameters(model):
            sharded = isinstance(parameter, DTensor)
            parts._parts[name] = parts.part_of(name, parameter.shape, name, is_sharded=sharded)
        return parts

    def __getitem__(self, name: str) -> Part:
        return self._parts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def frozen(self) -> dict[str, str]:
        """Name → pattern of the parameters that are frozen now."""
        return {name: part.frozen for name, part in self.items() if part.frozen is not None}

    def freeze(self, reasons: Mapping[str, str]) -> None:
        """Note which parameters are frozen from now on, and the pattern of each."""
        self._parts = {n: replace(part, frozen=reasons.get(n)) for n, part in self.items()}

    def part_of(
        self,
        name: str,
        shape: Sequence[int],
        parameter: str,
        *,
        is_sharded: bool,
        is_divided: bool | None = None,
    ) -> Part:
        """Return which part of a whole tensor this rank has.

        The tensor is `parameter`, or state of it. Without its division along `axis` it has `shape`,
        and its rows are divided if `is_sharded`. What belongs to no parameter is on all stages.
        `is_divided`: whether it has the dimension that `axis` divides; None: as its rows are.
        """
        if is_divided is None:
            is_divided = is_sharded or name == parameter
        split = self.splits.get(parameter) if is_divided else None
        split = split if split is not None and split.dim < len(shape) else None
        divided: dict[Axis, int] = {} if split is None else {self.axis: split.dim}
        divided |= {DP_SHARD: 0} if is_sharded else {}
        stage, stages = self.ranks.coords(self.rank)[PP], self.holders.get(parameter, (0,))
        is_here = stage in stages or parameter not in self.holders
        slices: tuple[slice, ...] = (slice(0, 0),) * len(shape)
        if is_here:
            slices = self._slices(shape, split, is_sharded=is_sharded, rank=self.rank)
        has_any = is_here and all(s.start < s.stop for s in slices)
        alike = [axis for axis in STAGE if axis not in divided]
        position, number = self.ranks.index(self.rank, *alike), self.ranks.size(*alike)
        turn = zlib.crc32(name.encode()) % number if is_sharded else 0
        return Part(
            name=name,
            whole=tuple(shape) if split is None else split.whole_shape(shape),
            slices=slices,
            is_here=is_here,
            divided=divided,
            stages=stages,
            counts=stages[0] == stage and position == 0 and has_any,
            writes=stages[0] == stage and position == turn and (has_any or not is_sharded),
        )

    def slices_on(self, name: str, rank: int) -> tuple[slice, ...]:
        """Return where a parameter's numbers on a rank of this one's stage stand in the whole."""
        part, split = self[name], self.splits.get(name)
        shape = list(part.whole)
        if split is not None:
            shape[split.dim] = split.size
        return self._slices(shape, split, is_sharded=part.is_sharded, rank=rank)

    def _slices(
        self, shape: Sequence[int], split: Split | None, *, is_sharded: bool, rank: int
    ) -> tuple[slice, ...]:
        coords, slices = self.ranks.coords(rank), [slice(0, size) for size in shape]
        if is_sharded:
            first, length = rows_of(shape[0], coords[DP_SHARD], self.ranks.size(DP_SHARD))
            slices[0] = slice(first, first + length)
        if split is not None:  # which is even: a rank's part begins after those before it
            begin = split.start if rank == self.rank else coords[self.axis] * split.size
            own = slices[split.dim]
            slices[split.dim] = slice(begin + own.start, begin + own.stop)
        return tuple(slices)


def rows_of(rows: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return the first of the rows that a rank has, and their number.

    `fully_shard` cuts as `torch.chunk` does: later ranks may have fewer rows, or none.
    """
    step = -(-rows // ranks)
    first = min(rank * step, rows)
    return first, min(step, rows - first)


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's numbers of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
