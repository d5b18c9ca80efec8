"""Bytes of gemini's groups: the plan's and the run's are what plain torch keeps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from colotrain.engine.offload.group_bytes import measure_bytes
from colotrain.engine.optim.shard_optimizer import state_per_row
from colotrain.planner.offload import planned_bytes
from colotrain.spec.plan import FreezePlan, OptimPlan, PluginPlan
from colotrain.spec.survey import ParameterInfo, Survey

OPTIMIZERS = {
    "adamw": (0.9, 0.95),
    "sgd": (0.9,),
    "lion": (0.9, 0.99),
}


def optim_plan(name: str, betas: tuple[float, ...]) -> OptimPlan:
    return OptimPlan(
        name=name,
        lr=1e-3,
        betas=betas,
        eps=1e-8,
        weight_decay=0.0,
        schedule="constant",
        warmup_steps=0,
        final_ratio=1.0,
    )


class Scaled(nn.Module):
    """A layer with a frozen part, rows that do not divide among three ranks, and a scalar."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 5, dtype=dtype)
        self.frozen = nn.Linear(7, 5, dtype=dtype).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones((), dtype=dtype))


def plain_state_bytes(name: str, betas: tuple[float, ...], parameters: list[nn.Parameter]) -> int:
    """Bytes of the state that torch's own optimizer (lion: one moment) keeps after a step."""
    if name == "lion":
        return sum(p.nbytes for p in parameters)
    made: torch.optim.Optimizer
    if name == "adamw":
        made = torch.optim.AdamW(parameters, betas=(betas[0], betas[1]))
    else:
        made = torch.optim.SGD(parameters, momentum=betas[0])
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    made.step()
    values = [v for state in made.state.values() for v in state.values()]
    return sum(v.nbytes for v in values if isinstance(v, torch.Tensor) and v.ndim)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_plan_and_run_count_what_torch_keeps(name: str, dtype: torch.dtype, ranks: int) -> None:
    layers = nn.ModuleList([Scaled(dtype), Scaled(torch.float32)])
    model = nn.ModuleDict({"layers": layers})
    optim = optim_plan(name, OPTIMIZERS[name])
    plugin = PluginPlan(
        name="gemini",
        reason="asked for",
        parameters_live="group",
        gradients="sharded",
        mesh=(ranks,),
        chunk_bytes=1,
    )
    run: Any = SimpleNamespace(plugin=plugin, freeze=FreezePlan())
    groups: list[tuple[str, list[nn.Module]]] = [(f"layers.{i}", [layers[i]]) for i in range(2)]
    measured = measure_bytes(model, groups, run, state_per_row(optim))
    infos = tuple(
        ParameterInfo(
            name=name,
            shape=tuple(p.shape),
            numel=p.numel(),
            itemsize=p.itemsize,
            frozen_by=None if p.requires_grad else "requires_grad",
            group=".".join(name.split(".")[:2]),
        )
        for name, p in model.named_parameters()
    )
    planned = planned_bytes(plugin, Survey(parameters=infos, matched={}, flops_per_token=0), optim)
    assert planned == measured
    for layer, size in zip(layers, measured[:-1], strict=True):
        first_rows = [  # of the rank that has most; scalars are not sharded
            nn.Parameter(p.detach()[: -(-len(p) // ranks)].clone(), requires_grad=p.requires_grad)
            for p in layer.parameters()
            if p.ndim
        ]
        trained = [p for p in first_rows if p.requires_grad]
        assert size.parameters == sum(p.nbytes for p in first_rows)
        assert size.gradients == sum(p.nbytes for p in trained)
        assert size.optimizer == plain_state_bytes(name, OPTIMIZERS[name], trained)
    assert measured[-1].parameters == 0, "nothing is outside the groups"
