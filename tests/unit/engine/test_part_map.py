"""Which numbers of which tensors the ranks have: all of them, each counted and saved once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from colotrain.engine.parts.part_map import Part, PartMap, rows_of
from colotrain.spec.axes import DP_REPLICATE, DP_SHARD, EP, PP, TP, Ranks
from colotrain.spec.divisions import Split

SIZES = [
    {DP_SHARD: 1},
    {DP_SHARD: 3},
    {DP_REPLICATE: 2, DP_SHARD: 2},
    {DP_SHARD: 2, TP: 2},
    {DP_REPLICATE: 3, DP_SHARD: 2, TP: 2},
    {DP_SHARD: 3, EP: 2},
    {PP: 2, DP_SHARD: 2},
    {PP: 2, DP_REPLICATE: 2, DP_SHARD: 2, TP: 2},
]
SHAPES = {
    "tall": (10, 4),
    "wide": (4, 6),
    "short": (2, 4),
    "norm": (5,),
    "one": (),
    "none": (0, 3),
}
TALL, WIDE = "tall", "wide"


def ranks_of(sizes: dict) -> Iterator[tuple[int, PartMap]]:  # type: ignore[type-arg]
    """Every rank's map: with TP (or EP), rows of `tall` and columns of `wide` are divided."""
    ranks = Ranks(sizes)
    stages = range(ranks.size(PP))
    for rank in range(ranks.world):
        axis = EP if ranks.size(EP) > 1 else TP
        index, size = ranks.coords(rank)[axis], ranks.size(axis)
        splits = {
            TALL: Split(dim=0, start=index * (10 // size), size=10 // size, whole=10),
            WIDE: Split(dim=1, start=index * (6 // size), size=6 // size, whole=6),
        }
        holders = {name: (number % len(stages),) for number, name in enumerate(SHAPES)}
        holders[WIDE] = tuple(stages)  # a tied one is on both
        yield (
            rank,
            PartMap(
                ranks=ranks,
                rank=rank,
                axis=axis,
                splits=splits if size > 1 else {},
                holders=holders if len(stages) > 1 else {},
            ),
        )


def part_of(parts: PartMap, name: str, tensor: str) -> Part:
    shape = list(SHAPES[name])
    if name in parts.splits:
        shape[parts.splits[name].dim] = parts.splits[name].size
    sharded = name not in ("one", "none")
    return parts.part_of(tensor, shape, name, is_sharded=sharded)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("name", SHAPES)
def test_every_number_is_counted_once_and_saved_once(name: str, sizes: dict) -> None:  # type: ignore[type-arg]
    shape = SHAPES[name]
    for tensor in (name, f"optim.{name}.exp_avg", f"model.{name}"):
        counted, written, writers = torch.zeros(shape), torch.zeros(shape), 0
        for _, parts in ranks_of(sizes):
            part = part_of(parts, name, tensor)
            assert part.whole == shape
            counted[part.slices] += part.counts
            written[part.slices] += part.writes
            writers += part.writes
            assert part.is_here or not (part.counts or part.writes)
        assert bool((counted == 1).all()), tensor
        assert bool((written == 1).all()), tensor
        assert writers


@pytest.mark.parametrize("sizes", SIZES)
def test_ranks_with_the_same_numbers_take_turns_to_save_them(sizes: dict) -> None:  # type: ignore[type-arg]
    """Of many tensors every rank that has a part saves some."""
    names = [f"optim.short.{number}" for number in range(200)]
    for rank, parts in ranks_of(sizes):
        found = [part_of(parts, "short", name) for name in names]
        has_any = found[0].is_here and all(found[0].sizes)
        assert any(part.writes for part in found) == has_any, rank


@pytest.mark.parametrize(("rows", "ranks"), itertools.product((1, 2, 5, 8, 9), (1, 2, 3, 4)))
def test_rows_are_cut_as_torch_cuts_them(rows: int, ranks: int) -> None:
    chunks = list(torch.arange(rows).chunk(ranks))
    chunks += [torch.arange(0)] * (ranks - len(chunks))
    found = [rows_of(rows, rank, ranks) for rank in range(ranks)]
    assert [list(range(first, first + n)) for first, n in found] == [c.tolist() for c in chunks]


def test_what_belongs_to_no_parameter_is_saved_by_the_first_rank_alone() -> None:
    for rank, parts in ranks_of(SIZES[-1]):
        part = parts.part_of("model.running_mean", (7,), "running_mean", is_sharded=False)
        assert part.is_here
        assert part.writes == (rank == 0)


def test_plain_state_as_long_as_a_part_is_no_part() -> None:
    """Bytes of plain data may have the size of a dimension that is divided."""
    for _, parts in ranks_of({DP_SHARD: 1, TP: 2}):
        part = parts.part_of("json.optim.tall.step", (5,), TALL, is_sharded=False)
        assert (part.whole, part.begin, part.divided) == ((5,), (0,), {})


def test_a_frozen_parameter_has_its_pattern() -> None:
    parts = PartMap(ranks=Ranks({DP_SHARD: 1}), rank=0)
    for name, shape in SHAPES.items():
        parts._parts[name] = parts.part_of(name, shape, name, is_sharded=bool(shape))
    parts.freeze({WIDE: "w*"})
    assert parts.frozen == {WIDE: "w*"}
    assert list(parts) == list(SHAPES)
    parts.freeze({})
    assert parts.frozen == {}
