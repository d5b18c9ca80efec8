"""Models that the user's code compiled: names, and whether they compute the same."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor, nn

from colotrain.models.facts import facts_of
from colotrain.models.loading import build_whole
from colotrain.spec.plan import ModelPlan
from colotrain.verify.plain_models import build_plain


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
        self.head = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        mean: Tensor = self.head(self.inner(x)).square().mean()
        return mean


def whole() -> nn.Module:
    return torch.compile(Net())  # type: ignore[return-value]


def in_place() -> nn.Module:
    net = Net()
    net.compile()
    net.inner.compile()
    return net


def inside() -> nn.Module:
    net = Net()
    net.inner = torch.compile(net.inner)  # type: ignore[assignment]
    net.head = torch.compile(net.head)  # type: ignore[assignment]
    return torch.compile(net)  # type: ignore[return-value]


@pytest.mark.parametrize("name", ["whole", "in_place", "inside"])
def test_a_compiled_model_keeps_its_names_and_values(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "compiled_models", sys.modules[__name__])
    model = build_whole(ModelPlan(target=f"compiled_models:{name}"), seed=3)
    plain = build_whole(ModelPlan(target="compiled_models:Net"), seed=3)
    assert facts_of(model).was_compiled
    assert not facts_of(plain).was_compiled
    assert type(model) is Net
    assert not any(module._compiled_call_impl for module in model.modules())
    wanted = plain.state_dict()
    assert model.state_dict().keys() == wanted.keys()
    assert all(torch.equal(value, wanted[key]) for key, value in model.state_dict().items())
    reference = build_plain(ModelPlan(target=f"compiled_models:{name}"), seed=3)
    assert reference.state_dict().keys() == wanted.keys()
