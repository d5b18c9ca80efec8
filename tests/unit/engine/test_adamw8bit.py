"""AdamW with moments of 8 bits: the update, and that ranks change nothing of it."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colotrain.engine.optim.adamw8bit import AdamW8bit, code_tables, pieces, values_of_codes
from colotrain.engine.optim.base import Unsharded
from colotrain.engine.optim.shard_optimizer import _blank_state
from colotrain.engine.parts.part_map import rows_of
from colotrain.spec.optimizers import OPTIMIZERS
from colotrain.spec.plan import OptimPlan
from colotrain.verify.optimizers import PlainAdamW8bit, numbers_of_8_bits

SETTINGS: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
SHAPES = [(33, 300), (40, 512), (5, 7, 129), (300, 16), (2, 2048)]
"""Rows that end within a block, or with one, or are shorter than one; few rows, and a bank."""
PLAN = OptimPlan(
    name="adamw8bit",
    lr=0.01,
    betas=(0.9, 0.95),
    schedule="constant",
    warmup_steps=0,
    final_ratio=1.0,
)


@pytest.fixture
def draw() -> torch.Generator:
    seed = secrets.randbits(32)
    print(f"drawn from {seed}")
    return torch.Generator().manual_seed(seed)


def gradients(shape: tuple[int, ...], draw: torch.Generator, *, num: int = 5) -> Iterator[Tensor]:
    """Gradients whose elements have very different sizes, some of them zero."""
    for _ in range(num):
        sizes = 10 ** (-8 * torch.rand(shape, generator=draw))
        yield torch.randn(shape, generator=draw) * sizes * (sizes > 1e-7)


def optimizer(parameter: nn.Parameter, layout: Any = None) -> AdamW8bit:
    return AdamW8bit([parameter], layout=layout or Unsharded(), **SETTINGS)


@pytest.mark.parametrize("signed", [True, False])
def test_a_number_has_the_code_of_the_nearest_value(signed: bool, draw: torch.Generator) -> None:
    tables, values = code_tables(torch.device("cpu"), signed=signed), values_of_codes(signed=signed)
    assert values.tolist() == pytest.approx(numbers_of_8_bits(signed=signed), rel=1e-6)
    numbers = 10 ** (-8 * torch.rand(20_000, generator=draw))
    if signed:
        numbers *= torch.randn(20_000, generator=draw).sign()
    numbers = torch.cat((numbers, values, torch.zeros(1)))
    codes = tables.encode(numbers).long()
    distances = (numbers[:, None].double() - values.double()).abs()
    if not signed:
        distances[numbers > 0, 0] = torch.inf  # what is above zero stays above it
    chosen = distances.gather(1, codes[:, None]).squeeze(1)
    assert torch.allclose(chosen, distances.amin(1), rtol=1e-6, atol=0)
    assert torch.equal(tables.decode(codes.byte()), values[codes])


@pytest.mark.parametrize("shape", SHAPES)
def test_an_update_is_that_of_moments_rounded_in_blocks_of_rows(
    shape: tuple[int, ...], draw: torch.Generator
) -> None:
    start = torch.randn(shape, generator=draw)
    ours = nn.Parameter(start.clone())
    exact = nn.Parameter(start.double())
    made = optimizer(ours)
    betas = {"betas": SETTINGS["betas"], "eps": SETTINGS["eps"]}
    group = {"params": [exact], "lr": SETTINGS["lr"], "weight_decay": SETTINGS["weight_decay"]}
    plain = PlainAdamW8bit([group], betas)
    for grad in gradients(shape, draw):
        ours.grad, exact.grad = grad, grad.double()
        made.step()
        plain.step()
    off = (ours.double() - exact).abs()
    assert (off > 1e-5).sum() <= 1e-3 * off.numel()  # a number halfway between two
    assert off.max() < SETTINGS["lr"]


class OfRank:
    """The layout of one rank's rows of a whole parameter, for which no rank is asked."""

    def __init__(self, whole: torch.Size) -> None:
        self.whole = whole

    def whole_shape(self, shard: nn.Parameter) -> torch.Size:
        return self.whole


@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_are_the_same_on_any_number_of_ranks(
    shape: tuple[int, ...], draw: torch.Generator
) -> None:
    for ranks in (2, 3, 7):
        assert_same_on_ranks(shape, ranks, draw)


def assert_same_on_ranks(shape: tuple[int, ...], ranks: int, draw: torch.Generator) -> None:
    start = torch.randn(shape, generator=draw)
    whole = nn.Parameter(start.clone())
    places = [rows_of(shape[0], rank, ranks) for rank in range(ranks)]
    shards = [nn.Parameter(start[first : first + rows].clone()) for first, rows in places]
    of_whole, of_shards = optimizer(whole), [optimizer(s, OfRank(start.shape)) for s in shards]
    for grad in gradients(shape, draw):
        whole.grad = grad
        of_whole.step()
        for (first, rows), shard, own in zip(places, shards, of_shards, strict=True):
            shard.grad = grad[first : first + rows].clone()
            own.step()
    assert torch.equal(torch.cat(list(shards)), whole)
    for key, value in of_whole.state[whole].items():
        if value.ndim:
            parts = [own.state[s][key] for own, s in zip(of_shards, shards, strict=True)]
            assert torch.equal(torch.cat(parts), value), key


def test_a_bank_of_large_rows_is_updated_in_pieces(draw: torch.Generator) -> None:
    rows, row = 2, 3 * (1 << 18) + 100
    covered = torch.zeros(rows, row)
    for piece in pieces(rows, row):
        covered[piece] += 1
        assert piece[1].start % 256 == 0
    assert bool((covered == 1).all())


@pytest.mark.parametrize(
    ("shape", "bits"), [((4096,), 32), ((63, 64), 32), ((64, 64), 8), ((1024, 8), 32), ((), 32)]
)
def test_small_parameters_vectors_and_short_rows_stay_in_32_bits(
    shape: tuple[int, ...], bits: int
) -> None:
    parameter = nn.Parameter(torch.ones(shape, dtype=torch.bfloat16))
    parameter.grad = torch.ones_like(parameter)
    made = optimizer(parameter)
    made.step()
    state = made.state[parameter]
    assert ("exp_avg_codes" in state) == (bits == 8)
    assert bits == 8 or state["exp_avg"].dtype == torch.float32
    kept = sum(value.nbytes for value in state.values() if value.ndim) if shape else 8
    known = OPTIMIZERS["adamw8bit"].bytes_per_row(shape, parameter.itemsize)
    assert kept == (shape[0] if shape else 1) * known


@pytest.mark.parametrize("rows", [0, 1, 20])
def test_blank_state_of_a_shard_is_that_of_its_first_step(rows: int) -> None:
    shard = nn.Parameter(torch.ones(rows, 512))
    whole = torch.Size((64, 512))
    blank = _blank_state(PLAN, shard, whole=whole, is_hidden=False)
    shard.grad = torch.ones_like(shard)
    made = optimizer(shard, OfRank(whole))
    made.step()
    kept = made.state[shard]
    assert {k: (v.shape, v.dtype) for k, v in blank.items()} == {
        k: (v.shape, v.dtype) for k, v in kept.items()
    }
    assert not any(value.any() for value in blank.values())


def test_a_gradient_that_becomes_zero_does_not_make_a_step_of_a_thousand() -> None:
    """Rounded to nearest, its second moment would be zero, and its first one would not."""
    parameter = nn.Parameter(torch.zeros(16, 256))
    made = optimizer(parameter)
    grad = torch.ones(16, 256)
    grad[:, 0] = 1e-4
    for value in (1e-4, 0.0, 0.0):
        grad[:, 0] = value
        parameter.grad = grad.clone()
        made.step()
    assert parameter.abs().max() < 0.1
