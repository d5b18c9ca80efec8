"""Models that break elsewhere, under every plugin, against one process of plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from colotrain.cli.resolving import plan_from
from colotrain.plan import RunPlan
from colotrain.plugins import ROWS
from colotrain.verify.compare import CaseResult, Tolerance
from colotrain.verify.runner import verify
from tests.dist.difficult import MODELS

TOLERANCE = Tolerance()


def plan_of(model: str, plugin: str, *overrides: str) -> RunPlan:
    return plan_from(
        [
            "model.target=tests.dist.difficult:make",
            f"model.args.name={model}",
            "data.target=tests.dist.difficult:samples",
            f"plugin={plugin}",
            "train.global_batch=12",
            "train.micro_batch=3",
            "train.max_steps=3",
            "train.seed=7",
            "optim.name=sgd",
            "optim.lr=0.1",
            "optim.schedule.name=constant",
            "cluster.procs_per_node=2",
            "checkpoint.every=0",
            f"name={model}-{plugin}",
            *overrides,
        ]
    )


def check(plans: Sequence[RunPlan], folder: Path) -> list[CaseResult]:
    results = list(verify(plans, folder, tolerance=TOLERANCE))
    assert len(results) == len(plans)
    wrong = [
        f"{plan.name}: {result.difference}"
        for plan, result in zip(plans, results, strict=True)
        if not result.passed
    ]
    assert not wrong, "\n".join(wrong)
    return results


@pytest.mark.parametrize("plugin", ROWS)
def test_difficult_models_train_as_in_one_process(plugin: str, tmp_path: Path) -> None:
    check([plan_of(model, plugin) for model in MODELS], tmp_path)
