"""Dropout where ranks have other units drops other ones; where they have the same, the same."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from colotrain.engine.sharding.context_parallel import collectives_of
from colotrain.models.tensor_parallel import TensorShard, divide_parameters_
from colotrain.models.tensor_parallel_styles import apply_styles_, own_divisions
from colotrain.spec.plan import ModelPlan
from tests.dist.test_transport import run

WIDTH, TOKENS = 64, 8
STYLES = {"layers.*.mlp.up": "colwise", "layers.*.mlp.down": "rowwise"}


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.inner = nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.dropout(self.inner(self.up(x)), 0.1, self.training))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp, self.before, self.after = Mlp(), nn.Dropout(), nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.after(self.mlp(self.before(x)))


class Model(nn.Module):
    def __init__(self, *, recomputes: bool) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        return x


def divided(rank: int, *, recomputes: bool, by_tokens: bool = False) -> tuple[Model, TensorShard]:
    torch.manual_seed(1)
    model = Model(recomputes=recomputes)
    shard = TensorShard(rank=rank, size=2, by_tokens=by_tokens)
    shard.all_gather, shard.reduce_scatter = collectives_of(dist.group.WORLD, "cpu")
    divisions = own_divisions(model, ModelPlan(target="its:own", tp_plan=STYLES))
    assert divisions is not None
    divide_parameters_(model, divisions, shard)
    apply_styles_(model, divisions, shard)
    return model, shard


def masks_of(model: Model, x: Tensor) -> dict[str, list[Tensor]]:
    """Name → which numbers were kept, in each forward of each dropout."""
    found: dict[str, list[Tensor]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(
                lambda _, inputs, output, name=name: found.setdefault(name, []).append(output != 0)
            )
    model(x)
    model(x)
    return found


def drops_own_units(rank: int, by_tokens: bool) -> None:
    model, shard = divided(rank, recomputes=False, by_tokens=by_tokens)
    torch.manual_seed(5)
    masks = masks_of(model, torch.randn(2, TOKENS, WIDTH))
    inner = []
    for name, found in masks.items():
        for mask in found:
            one, other = shard.gather(mask.float())
            alike = (one == other).float().mean().item()
            is_own = by_tokens or name.endswith("inner")
            assert 0.3 < alike < 0.7 if is_own else alike == 1.0, (name, alike)
            inner += [one, other] if name.endswith("inner") else []
    for index, mask in enumerate(inner):  # in other layers and forwards, too
        for other in inner[:index]:
            assert 0.3 < (mask == other).float().mean().item() < 0.7
    torch.testing.assert_close(*shard.gather(torch.rand(3)).unbind())  # common numbers go on


def recomputes_alike(rank: int) -> None:
    gradients = []
    for recomputes in (False, True):
        model, _ = divided(rank, recomputes=recomputes)
        for seed in (5, 6):
            torch.manual_seed(seed)
            x = torch.randn(2, TOKENS, WIDTH)
            model(x).square().mean().backward()
            state = torch.rand(3)
        gradients.append([state, *(p.grad for p in model.parameters())])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def in_evaluation(rank: int) -> None:
    """Nothing is drawn, so that the generator stays as it is."""
    model, _ = divided(rank, recomputes=False)
    before = torch.get_rng_state()
    model.eval()(torch.ones(2, TOKENS, WIDTH))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("by_tokens", [False, True])
def test_ranks_drop_their_own_units(by_tokens: bool) -> None:
    run(drops_own_units, 2, by_tokens)


@pytest.mark.parametrize("work", [recomputes_alike, in_evaluation])
def test_a_recomputation_drops_the_same(work: object) -> None:
    run(work, 2)  # type: ignore[arg-type]
