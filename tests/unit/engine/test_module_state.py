"""A block that is computed again in backward reads what its forward read, and changes nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from colotrain.engine.model.blocks import checkpoint_blocks_
from colotrain.spec.plan import Recompute

WIDTH = 6


class Block(nn.Module):
    """Has all that a forward may change or be given: statistics, counters, an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))
        self.register_buffer("replaced", torch.ones(WIDTH, dtype=torch.float64))
        self.gain: Any = 1.0
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.replaced = self.replaced * 1.1
        found = self.norm(self.linear(x)) * self.gain * self.replaced
        return x + (found * self.calls.clone()).tanh()


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def pass_(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Twice(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.pass_(self.pass_(x)).square().mean()


class Gains(Layers):
    """Sets an attribute anew before each of two passes."""

    def forward(self, x: Tensor) -> Tensor:
        for gain in (0.5, 2.0):
            for block in self.blocks:
                block.gain = gain
            x = self.pass_(x)
        return x.square().mean()


class Adapts(Layers):
    """One step of gradient descent within forward, as in meta-learning."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            own = dict(block.named_parameters())
            inner = functional_call(block, own, (x,)).square().mean()
            slopes = torch.autograd.grad(inner, list(own.values()), create_graph=True)
            fast = {n: p - 0.1 * g for (n, p), g in zip(own.items(), slopes, strict=True)}
            x = functional_call(block, fast, (x,))
        return x.square().mean()


class Ensemble(Layers):
    """Several versions of the first block at once."""

    def forward(self, x: Tensor) -> Tensor:
        block = self.blocks[0].eval()
        own = {n: torch.stack([p, 2 * p]) for n, p in block.named_parameters()}

        def one(versions: dict[str, Tensor]) -> Tensor:
            return x + block.linear.bias * 0 + functional_call(block.linear, versions, (x,))

        found = vmap(one)({n.removeprefix("linear."): p for n, p in own.items() if "linear" in n})
        return self.pass_(found.mean(0)).square().mean()


class Copies(Layers):
    """Trains a copy of a block, too."""

    def forward(self, x: Tensor) -> Tensor:
        copied = copy.deepcopy(self.blocks[0])
        with torch.no_grad():
            copied.linear.weight.mul_(0.5)
        return self.pass_(copied(x)).square().mean()


def trained(kind: type[nn.Module], recompute: Recompute) -> dict[str, Tensor]:
    """Gradients, buffers and losses of three micro-batches of a step."""
    model = kind()
    checkpoint_blocks_(model, recompute)
    draws, found = torch.Generator().manual_seed(1), {}
    for number in range(3):
        x = torch.randn(5, WIDTH, dtype=torch.float64, generator=draws)
        loss = model(x)
        loss.backward()
        found[f"loss {number}"] = loss.detach()
    found |= {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return found | dict(model.named_buffers())


CASES = [(kind, "full") for kind in (Twice, Gains, Adapts, Ensemble, Copies)]
CASES += [(kind, "selective") for kind in (Twice, Gains, Ensemble, Copies)]


@pytest.mark.parametrize(("kind", "recompute"), CASES)
def test_recomputed_blocks_compute_and_leave_what_others_do(
    kind: type[nn.Module], recompute: Recompute
) -> None:
    expected, found = trained(kind, "none"), trained(kind, recompute)
    assert expected.keys() == found.keys()
    for name, values in expected.items():
        torch.testing.assert_close(found[name], values, rtol=1e-12, atol=1e-14, msg=name)
