"""Groups: small modules packed, large ones split, frozen ones apart, the chunk size found."""

from __future__ import annotations

import pytest

from colotrain.spec.packing import MOST_GROUPS, Unit, choose_chunk_bytes, pack, padding

MIB = 1 << 20


def unit(name: str, mib: float, *, trained: bool = True, parts: tuple[Unit, ...] = ()) -> Unit:
    return Unit(name=name, num_bytes=round(mib * MIB), trained=trained, parts=parts)


def names(units: list[Unit], chunk_mib: float) -> list[tuple[str, ...]]:
    return [chunk.names for chunk in pack(units, round(chunk_mib * MIB))]


def test_neighbours_are_packed_until_the_chunk_is_full() -> None:
    units = [unit(f"b.{i}", 20) for i in range(5)]
    assert names(units, 64) == [("b.0", "b.1", "b.2"), ("b.3", "b.4")]
    assert names(units, 19) == [(f"b.{i}",) for i in range(5)]


def test_trained_and_frozen_modules_do_not_share_a_group() -> None:
    units = [unit(f"b.{i}", 1, trained=i >= 2) for i in range(4)]
    assert names(units, 64) == [("b.0", "b.1"), ("b.2", "b.3")]


def test_modules_of_different_dtypes_do_not_share_a_group() -> None:
    dtypes = (2, 2, 4, 2)
    units = [
        Unit(name=f"b.{i}", num_bytes=MIB, trained=True, dtypes=frozenset({dtype}))
        for i, dtype in enumerate(dtypes)
    ]
    assert names(units, 64) == [("b.0", "b.1"), ("b.2",), ("b.3",)]


def test_a_large_module_is_split_and_what_is_left_of_it_comes_last() -> None:
    mlp = unit("b.0.mlp", 90, parts=(unit("b.0.mlp.up", 45), unit("b.0.mlp.down", 45)))
    block = unit("b.0", 130, parts=(unit("b.0.norm", 1), unit("b.0.attn", 36), mlp))
    assert names([block, unit("b.1", 2)], 50) == [
        ("b.0.norm", "b.0.attn"),
        ("b.0.mlp.up",),
        ("b.0.mlp.down",),
        ("b.0",),
        ("b.1",),
    ]
    assert sum(chunk.num_bytes for chunk in pack([block], 50 * MIB)) == block.num_bytes


def test_pieces_of_two_blocks_do_not_share_a_group() -> None:
    blocks = [
        unit(f"b.{i}", 60, parts=(unit(f"b.{i}.x", 30), unit(f"b.{i}.y", 30))) for i in (0, 1)
    ]
    assert names(blocks, 40) == [("b.0.x",), ("b.0.y",), ("b.1.x",), ("b.1.y",)]
    assert names(blocks, 60) == [("b.0",), ("b.1",)]


def test_the_kind_of_neighbours_keeps_them_apart() -> None:
    units = [unit(f"b.{i}", 1) for i in range(3)]
    found = pack(units, 64 * MIB, kind=lambda name: name == "b.1")
    assert [chunk.names for chunk in found] == [("b.0",), ("b.1",), ("b.2",)]


@pytest.mark.parametrize(("count", "mib"), [(12, 27), (20, 172), (48, 9), (300, 30), (3, 0.1)])
def test_the_size_that_is_found_leaves_little_padding_in_few_groups(count: int, mib: float) -> None:
    units = [unit(f"b.{i}", mib) for i in range(count)]
    groups = pack(units, choose_chunk_bytes(units, state_bytes=1 << 50))
    assert len(groups) <= MOST_GROUPS
    assert padding([chunk.num_bytes for chunk in groups]) < 0.15


@pytest.mark.parametrize(("count", "mib", "ranks"), [(8, 12, 2), (30, 6, 4), (24, 48, 8)])
def test_packing_adds_little_to_what_a_rank_holds(count: int, mib: float, ranks: int) -> None:
    units = [unit(f"b.{i}", mib) for i in range(count)]
    states = round(4 * count * mib * MIB) // ranks
    largest = max(
        chunk.num_bytes for chunk in pack(units, choose_chunk_bytes(units, state_bytes=states))
    )
    assert 5 * (largest - units[0].num_bytes) <= 0.03 * states


def test_groups_stay_few_whatever_that_adds() -> None:
    units = [unit(f"b.{i}", 1) for i in range(200)]
    assert len(pack(units, choose_chunk_bytes(units, state_bytes=0))) <= MOST_GROUPS


def test_padding_is_what_groups_fall_short_of_the_largest() -> None:
    assert padding([10, 10]) == 0.0
    assert padding([10, 5]) == pytest.approx(0.25)
    assert padding([]) == 0.0
