"""The tables of `spec`: what they say of torch is so."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import pytest
import torch
from torch import nn

from colotrain.config.schema import Train
from colotrain.engine.model.precision import cast_dtype, dtype_of
from colotrain.engine.optim.optimizers import MAKERS, make
from colotrain.records import from_plain, to_plain
from colotrain.spec.objectives import (
    DPO,
    KTO,
    OBJECTIVES,
    ORPO,
    ClassifyPlan,
    DistillPlan,
    EmbedPlan,
    ObjectivePlan,
    RewardPlan,
    SimPO,
)
from colotrain.spec.optimizers import OPTIMIZERS
from colotrain.spec.plan import ModelPlan, OptimPlan
from colotrain.spec.precisions import PRECISIONS, PrecisionName

UNUSED_LAYOUT: Any = None


@pytest.mark.parametrize("name", PRECISIONS)
def test_a_precision_has_the_bytes_of_its_dtype(name: str) -> None:
    assert dtype_of(name).itemsize == PRECISIONS[name].num_bytes
    assert cast_dtype(name) == (None if name == "fp32" else dtype_of(name))


@pytest.mark.parametrize("name", [name for name, o in OPTIMIZERS.items() if o.is_elementwise])
def test_an_optimizer_keeps_what_its_row_says(name: str) -> None:
    row, parameter = OPTIMIZERS[name], nn.Parameter(torch.ones(3, 5))
    plan = OptimPlan(
        name=name,
        lr=0.1,
        betas=(0.9, 0.99),
        eps=1e-8,
        weight_decay=0.0,
        schedule="constant",
        warmup_steps=0,
        final_ratio=1.0,
    )
    optimizer = make(plan, [{"params": [parameter], "weight_decay": 0.0}], UNUSED_LAYOUT)
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    kept = optimizer.state[parameter].values()
    assert sum(value.numel() for value in kept if value.ndim) == row.state_tensors * 15
    assert any(value.numel() == 1 for value in kept) == row.counts_steps


def test_every_optimizer_of_the_table_can_be_made() -> None:
    assert MAKERS.keys() == OPTIMIZERS.keys()


def test_every_objective_that_a_configuration_may_name_is_described() -> None:
    names, _ = get_args(get_type_hints(Train)["objective"])
    assert list(get_args(names)) == list(OBJECTIVES)
    assert all(isinstance(getattr(Train(), o.section), o) for o in OBJECTIVES.values())


def test_a_plan_tells_its_objectives_apart() -> None:
    classes = ClassifyPlan(class_names=("a", "b"), pad_id=3)
    objectives = (
        *(DPO(), KTO(), ORPO(), SimPO(), RewardPlan(pad_id=3), classes),
        *(DistillPlan(teacher="there"), EmbedPlan(pooling="last")),
    )
    assert {type(objective) for objective in objectives} == set(get_args(ObjectivePlan))
    for objective in objectives:
        model = ModelPlan(target="", objective=objective)
        assert from_plain(ModelPlan, to_plain(model)) == model


def test_every_precision_that_a_plan_may_name_is_described() -> None:
    assert list(get_args(PrecisionName)) == list(PRECISIONS)
