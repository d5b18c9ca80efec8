"""Checksums of bits, and who of those that disagree is wrong."""

from __future__ import annotations

import pytest
import torch

from colotrain.engine.comms.raw_bytes import checksum, sum_of_bits
from colotrain.engine.state.shard_file import all_finite
from colotrain.engine.step.guard import minority


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool]
)
def test_any_single_flipped_bit_changes_the_checksum(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    tensor = torch.randint(0, 2, (3, 7), generator=generator).to(dtype)
    before, bits = checksum(tensor), tensor.view(-1).view(torch.uint8)
    for place in range(bits.numel()):
        for bit in range(7):
            bits[place] ^= 1 << bit
            assert checksum(tensor) != before
            bits[place] ^= 1 << bit
    assert checksum(tensor) == before


def test_another_order_of_the_same_values_changes_the_checksum() -> None:
    tensor = torch.arange(1000.0)
    assert checksum(tensor) != checksum(tensor.flip(0))
    assert checksum(tensor) == checksum(tensor.flip(0).flip(0))
    for change in (lambda t: t.flip(0), lambda t: torch.cat((t[:5], t[5:] * 2))):
        changed = change(tensor).view(torch.uint8)
        assert sum_of_bits(tensor.view(torch.uint8)) != sum_of_bits(changed)


@pytest.mark.parametrize(
    ("values", "wrong"),
    [([1, 1, 2], [2]), ([5, 1, 1, 1], [0]), ([1, 2], [0, 1]), ([1, 1, 2, 2], [0, 1, 2, 3])],
)
def test_the_minority_is_wrong_where_there_is_one(values: list[int], wrong: list[int]) -> None:
    assert minority(values) == wrong


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_value_that_is_not_finite_is_enough(bad: float) -> None:
    tensor = torch.full((10_000,), 3e38)  # whose sum overflows
    assert all_finite(tensor)
    tensor[1234] = bad
    assert not all_finite(tensor)
    assert not all_finite(tensor.to(torch.bfloat16))
    assert all_finite(torch.tensor([1, 2]))
    assert all_finite(torch.empty(0))


@pytest.mark.parametrize("start", range(1, 9))
def test_a_view_has_the_checksum_of_its_values(start: int) -> None:
    view = torch.randn(40)[start:]
    assert checksum(view) == checksum(view.clone())
    assert checksum(view[0]) == checksum(view[0].clone())
