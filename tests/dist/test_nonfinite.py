"""A value that is not finite is traced to where it began."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from colotrain.engine.gradients.nonfinite import describe
from colotrain.events.kinds import Nonfinite
from tests.running import Colotrain

# Two ranks, four micro-batches a step; the data's `index` tells a model where it is.
PLANTS = """
import os
import torch
from torch import nn


class Plant(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, bad):
        ctx.bad = bad
        return weight.clone()

    @staticmethod
    def backward(ctx, grad):
        return (grad * float("nan") if ctx.bad else grad), None


class Layer(nn.Module):
    def __init__(self, planted):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4) * 0.9)
        self.planted = planted

    def forward(self, x, index):
        bad = self.planted and PLANTED_SAMPLE in index.tolist() and self.training
        return torch.tanh(x @ Plant.apply(self.weight, bad))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer(i == 1) for i in range(3))

    def forward(self, x, index):
        for layer in self.layers:
            x = layer(x, index)
        return x.square().mean()


PLANTED_SAMPLE = 4 * 16 + 2 * 4 + 1 * 2 + 1  # step 5, micro-batch 3, rank 1, its second sample


def data():
    g = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(4, generator=g), "index": torch.tensor(i)} for i in range(200)]


def bad_data():
    samples = data()
    samples[PLANTED_SAMPLE]["x"][2] = float("nan")
    return samples


class Clean(Model):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer(False) for _ in range(3))
"""
RARE = """

class Rare(Clean):
    def forward(self, x, index):
        import random
        loss = super().forward(x, index)
        return loss * float("nan") if random.random() < 0.01 else loss


def many():
    g = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(4, generator=g), "index": torch.tensor(i)} for i in range(8000)]
"""
OVERRIDES = (
    "train.global_batch=16",
    "train.micro_batch=2",
    "train.max_steps=7",
    "data.shuffle=false",
    "cluster.procs_per_node=2",
    "name=planted",
)


def origin(colotrain: Colotrain) -> dict[str, Any]:
    return next(e for e in colotrain.events("planted") if e.kind == "nonfinite").fields


@pytest.mark.parametrize("plugin", ["zero1", "zero3"])
@pytest.mark.parametrize(
    ("model", "data", "phase", "module", "parameter"),
    [
        ("Model", "data", "backward", "layers.1", "layers.1.weight"),
        ("Clean", "bad_data", "forward", "layers.0", None),
    ],
)
def test_the_first_bad_value_is_named(
    colotrain: Colotrain,
    plugin: str,
    model: str,
    data: str,
    phase: str,
    module: str,
    parameter: str,
) -> None:
    (colotrain.cwd / "plants.py").write_text(PLANTS)
    result = colotrain(
        "run",
        f"model.target=plants:{model}",
        f"data.target=plants:{data}",
        f"plugin={plugin}",
        *OVERRIDES,
    )
    assert result.code == 1
    found = origin(colotrain)
    assert (found["step"], found["rank"], found["micro_batch"]) == (5, 1, 3)
    assert (found["phase"], found["module"], found["parameter"]) == (phase, module, parameter)
    assert 75 in found["samples"]
    error = next(line for line in result.err.splitlines() if line.startswith("error:"))
    assert f"{phase} of micro-batch 3 on rank 1, module {module}" in error
    in_data = "samples [75], whose x is not finite itself; correct or leave out these samples"
    assert (in_data in error, found["input"]) == (
        (True, "x") if data == "bad_data" else (False, None)
    )
    assert not [e for e in colotrain.events("planted") if e.kind == "restart"]


def test_a_bad_step_can_be_skipped(colotrain: Colotrain) -> None:
    (colotrain.cwd / "plants.py").write_text(PLANTS)
    summary = colotrain.run(
        "model.target=plants:Clean",
        "data.target=plants:bad_data",
        "plugin=zero2",
        "train.on_nonfinite=skip",
        *OVERRIDES,
    )
    assert summary["steps"] == 7
    assert summary["optimizer_steps"] == 6
    assert summary["micro_batches"] == 28
    assert origin(colotrain)["samples"] == [75]


def test_the_second_pass_meets_the_random_numbers_of_the_first(colotrain: Colotrain) -> None:
    (colotrain.cwd / "plants.py").write_text(PLANTS + RARE)
    settings = ("train.max_steps=500", "cluster.procs_per_node=1", "train.eval_steps=0")
    named = ("model.target=plants:Rare", "data.target=plants:many", "data.validation_fraction=0")
    result = colotrain("run", *OVERRIDES, *settings, *named)
    assert result.code == 1
    error = next(line for line in result.err.splitlines() if line.startswith("error:"))
    assert "it began in forward of micro-batch" in error


def test_the_error_names_phase_place_and_samples() -> None:
    where = Nonfinite(step=5, rank=1, micro_batch=3, phase="forward", module="", samples=[7, 8])
    text = "forward of micro-batch 3 on rank 1, module (the model itself), samples [7, 8]"
    assert describe(where) == text
    assert describe(replace(where, input="x")) == f"{text}, whose x is not finite itself"
    summed = replace(where, phase="reduce", module="a", parameter="a.weight", samples=[*range(9)])
    assert describe(summed) == (
        "reduce of micro-batch 3 on rank 1, parameter a.weight, samples [0, 1, 2, 3, 4, 5, 6, 7]"
    )
