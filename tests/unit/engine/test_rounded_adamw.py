"""AdamW of parameters in bfloat16: no update is lost, and ranks change no random bit."""

from __future__ import annotations

import math
import secrets
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colotrain.engine.optim.base import Unsharded
from colotrain.engine.optim.rounded_adamw import RoundedAdamW, random_bits, rounded
from colotrain.engine.parts.part_map import rows_of

SETTINGS: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
CPU = torch.device("cpu")


@pytest.fixture
def draw() -> torch.Generator:
    seed = secrets.randbits(32)
    print(f"drawn from {seed}")
    return torch.Generator().manual_seed(seed)


class OfRank(Unsharded):
    """The layout of one rank's rows of a named parameter, for which no rank is asked."""

    def __init__(self, *, first: int = 0, name: str = "weight", seed: int = 5) -> None:
        super().__init__()
        self.first, self.called, self.seed = first, name, seed

    def first_row(self, shard: nn.Parameter) -> int:
        return self.first

    def name(self, shard: nn.Parameter) -> str:
        return self.called


def optimizer(
    parameter: nn.Parameter, *, kahan: bool = False, layout: Any = None, **changed: Any
) -> RoundedAdamW:
    settings = {**SETTINGS, **changed}
    return RoundedAdamW([parameter], layout=layout or OfRank(), compensates=kahan, **settings)


def splitmix(key: int, place: int) -> int:
    """The generator as Vigna's `splitmix64.c` has it, with Python's whole numbers."""
    most = (1 << 64) - 1
    z = (key + (place + 1) * 0x9E3779B97F4A7C15) & most
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & most
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & most
    return z ^ (z >> 31)


def test_the_random_bits_are_those_of_splitmix() -> None:
    assert splitmix(0, 0) == 0xE220A8397B1DCDAF  # the sequence of seed 0 as it is published
    for key in (0, -3, secrets.randbits(63)):
        first = secrets.randbits(40)
        found = random_bits(key, first, 50, CPU).tolist()
        assert [z % (1 << 64) for z in found] == [splitmix(key, first + i) for i in range(50)]


def test_a_number_becomes_one_of_its_neighbours(draw: torch.Generator) -> None:
    values = torch.randn(9, 1000, generator=draw) * 10.0 ** torch.arange(-36, 36, 8)[:, None]
    low = rounded(values, torch.zeros(values.shape, dtype=torch.int64)).bfloat16()
    high = rounded(values, torch.full(values.shape, 0xFFFF)).bfloat16()
    assert torch.equal(low.abs().float() <= values.abs(), torch.ones_like(low, dtype=torch.bool))
    between = low.float() != values
    assert between.float().mean() > 0.9
    assert torch.equal(high, torch.nextafter(low, low.sign() * torch.inf).where(between, low))
    nan = torch.tensor([-1, 0x7FFFFFFF, 0x7FC00000], dtype=torch.int32).view(torch.float32)
    kept = torch.cat((nan, torch.tensor([torch.inf, -torch.inf, 0.0, 1.5])))
    for bits in (0, 1, 0xFFFF):
        found = rounded(kept, torch.full((7,), bits)).bfloat16().float()
        assert torch.allclose(found, kept, rtol=0, atol=0, equal_nan=True)


def exact(parameter: Tensor, grads: list[Tensor], **changed: Any) -> Tensor:
    """What torch's AdamW makes of it in float64."""
    leaf = nn.Parameter(parameter.double())
    made = torch.optim.AdamW([leaf], **{**SETTINGS, **changed})
    for grad in grads:
        leaf.grad = grad.double()
        made.step()
    return leaf.detach()


def test_the_mean_of_many_updates_is_the_exact_update() -> None:
    """Of every element there are 4,096 in each of 8 parameters, with bits of their own."""
    draw = torch.Generator().manual_seed(11)
    start = torch.randn(48, generator=draw).bfloat16()
    grad = torch.randn(48, generator=draw).bfloat16()
    total = {"weight": 0.0, "exp_avg": 0.0, "exp_avg_sq": 0.0}
    num = 4096 * 8
    for seed in range(8):
        many = nn.Parameter(start.expand(4096, 48).clone())
        many.grad = grad.expand(4096, 48).clone()
        made = optimizer(many, layout=OfRank(seed=seed))
        made.step()
        state = made.state[many]
        total["weight"] += many.detach().double().sum(0)
        for key in ("exp_avg", "exp_avg_sq"):
            total[key] += state[key].double().sum(0)
    wanted = {
        "weight": exact(start, [grad]),
        "exp_avg": 0.1 * grad.double(),
        "exp_avg_sq": 0.05 * grad.double() ** 2,
    }
    for key, value in wanted.items():
        place = 2.0 ** (value.abs().log2().floor() - 7)  # of the last bit of a bfloat16
        bound = 5 * place / 2 / math.sqrt(num) + 1e-6 * value.abs()  # float32 rounds, too
        assert ((total[key] / num - value).abs() <= bound).all(), key


@pytest.mark.parametrize("kahan", [True, False])
def test_a_thousand_tiny_updates_are_kept_that_the_nearest_number_loses(
    kahan: bool, draw: torch.Generator
) -> None:
    start = (torch.randn(40, 50, generator=draw).sign() * 1.5).bfloat16()
    grads = [(torch.rand(40, 50, generator=draw) + 0.5).bfloat16() for _ in range(1000)]
    settings = {"lr": 2e-5, "weight_decay": 0.0}
    wanted = exact(start, grads, **settings) - start.double()
    ours, nearest = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    made = optimizer(ours, kahan=kahan, **settings)
    plain = torch.optim.AdamW([nearest], fused=True, **{**SETTINGS, **settings})
    for grad in grads:
        ours.grad, nearest.grad = grad, grad.clone()
        made.step()
        plain.step()
    assert torch.equal(nearest.detach(), start)
    found = ours.detach().double() - start.double()
    if kahan:
        found += made.state[ours]["compensation"].double()
        # what is kept has 8 bits of its own, in which 1,000 random roundings add to 1.2 %
        assert (found - wanted).abs().max() < 0.07 * wanted.abs().min()
        assert (found - wanted).mean().abs() < 0.005 * wanted.abs().min()
        assert (made.state[ours]["compensation"].abs() <= 2**-8).all()  # half of the last place
    else:  # a step moves an element by 2^-7 or not at all; 2,000 elements have the right mean
        spread = (wanted.abs().mean().item() * 2**-7 / found.numel()) ** 0.5
        assert (found - wanted).mean().abs() < 5 * spread + 0.005 * 2e-2


def test_a_second_moment_falls_when_gradients_do(draw: torch.Generator) -> None:
    ours = nn.Parameter(torch.randn(64, 64, generator=draw).bfloat16())
    nearest = nn.Parameter(ours.detach().clone())
    settings = {**SETTINGS, "betas": (0.9, 0.999)}
    made = optimizer(ours, kahan=True, betas=(0.9, 0.999))
    plain = torch.optim.AdamW([nearest], fused=True, **settings)
    for step in range(300):
        grad = torch.full((64, 64), float(step < 2)).bfloat16()
        ours.grad, nearest.grad = grad, grad.clone()
        made.step()
        plain.step()
        if step == 1:
            before = made.state[ours]["exp_avg_sq"].double().mean().item()
            stuck = plain.state[nearest]["exp_avg_sq"].clone()
    assert torch.equal(plain.state[nearest]["exp_avg_sq"], stuck)
    after = made.state[ours]["exp_avg_sq"].double().mean().item()
    assert after == pytest.approx(before * 0.999**298, rel=0.01)


@pytest.mark.parametrize("kahan", [True, False])
@pytest.mark.parametrize("shape", [(33, 300), (5, 7, 129), (2, 80_000), (41,)])
def test_ranks_round_as_one_process_does(
    shape: tuple[int, ...], kahan: bool, draw: torch.Generator
) -> None:
    start = torch.randn(shape, generator=draw).bfloat16()
    grads = [torch.randn(shape, generator=draw).bfloat16() for _ in range(2)]
    for ranks in (1, 2, 3, 7):
        whole = nn.Parameter(start.clone())
        places = [rows_of(shape[0], rank, ranks) for rank in range(ranks)]
        shards = [nn.Parameter(start[first : first + rows].clone()) for first, rows in places]
        made = optimizer(whole, kahan=kahan)
        of_shards = [
            optimizer(shard, kahan=kahan, layout=OfRank(first=first))
            for shard, (first, _) in zip(shards, places, strict=True)
        ]
        for grad in grads:
            whole.grad = grad
            made.step()
            for (first, rows), shard, own in zip(places, shards, of_shards, strict=True):
                shard.grad = grad[first : first + rows].clone()
                own.step()
        assert torch.equal(torch.cat(list(shards)), whole)
        for key, value in made.state[whole].items():
            states = [own.state[s][key] for own, s in zip(of_shards, shards, strict=True)]
            assert torch.equal(torch.cat(states), value) if value.ndim else states[0] == value


def test_names_seeds_and_steps_have_bits_of_their_own() -> None:
    def updated(layout: OfRank, *, after: int = 0) -> Tensor:
        leaf = nn.Parameter(torch.ones(2000).bfloat16())
        made = optimizer(leaf, layout=layout, lr=1e-3)
        for step in range(after + 1):
            leaf.data.fill_(1.0)
            leaf.grad = torch.zeros_like(leaf) if step < after else torch.ones_like(leaf)
            made.step()
        return leaf.detach() != 1.0

    base = updated(OfRank())
    assert 200 < base.sum() < 1800
    assert torch.equal(updated(OfRank()), base)
    for other in (OfRank(name="bias"), OfRank(seed=6), OfRank(first=1)):
        assert not torch.equal(updated(other), base)
    assert not torch.equal(updated(OfRank(), after=1), base)


def test_what_is_not_in_bfloat16_is_updated_as_torch_does(draw: torch.Generator) -> None:
    start = torch.randn(30, 20, generator=draw, dtype=torch.float64)
    grads = [torch.randn(30, 20, generator=draw, dtype=torch.float64) for _ in range(3)]
    leaf = nn.Parameter(start.clone())
    made = optimizer(leaf, kahan=True)
    for grad in grads:
        leaf.grad = grad
        made.step()
    assert torch.allclose(leaf.detach(), exact(start, grads), rtol=1e-13, atol=1e-14)
    assert "compensation" not in made.state[leaf]
