"""AdamW with moments of 8 bits under every plugin, in checkpoints, on disk, and in the plan."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from colotrain.runs.resolving import plan_from
from colotrain.spec.plan import RunPlan
from colotrain.spec.plugins import ROWS
from colotrain.verify.runner import verify
from tests.checkpoints import read_whole
from tests.dist.conftest import SMALL, Colotrain
from tests.dist.test_gemini import assert_same_state, on_disk
from tests.dist.test_run import losses

WIDER = (*SMALL, "model.args.d_model=72", "optim.name=adamw8bit", "train.max_steps=4")
"""Matrices of which each has 4,096 elements or more."""


class Odd(nn.Module):
    """Rows that end within a block, whose number two or three ranks do not divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(12, 300), nn.Linear(300, 35), nn.Linear(35, 300)])
        self.head = nn.Linear(300, 5)

    def forward(self, x: Tensor, target: Tensor, kind: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return F.cross_entropy(self.head(x), target)


def plan_of(plugin: str, ranks: int, *more: str) -> RunPlan:
    return plan_from(
        [
            "model.target=tests.dist.test_adamw8bit:Odd",
            "data.target=tests.dist.difficult:samples",
            *(f"plugin={plugin}", f"cluster.procs_per_node={ranks}", "optim.name=adamw8bit"),
            *("train.global_batch=12", "train.micro_batch=2", "train.max_steps=3"),
            *("train.seed=7", "optim.lr=0.01", "checkpoint.every=0", f"name={plugin}-{ranks}"),
            *more,
        ]
    )


def test_every_plugin_updates_as_one_process_does(tmp_path: Path) -> None:
    plans = [plan_of(plugin, 2) for plugin in ROWS]
    plans.append(plan_of("zero3", 3))
    results = list(verify(plans, tmp_path))
    wrong = [f"{r.plugin}, {r.world_size}: {r.difference}" for r in results if not r.passed]
    assert len(results) == len(plans)
    assert not wrong, "\n".join(wrong)


def test_checkpoints_and_the_disk_hold_codes_and_a_run_goes_on_exactly(
    colotrain: Colotrain,
) -> None:
    base = (*WIDER, "plugin=gemini", "optim.schedule.name=constant")
    straight = colotrain.run(*base, "name=straight")
    colotrain.run(*base, *on_disk(colotrain), "train.max_steps=2", "name=half")
    resumed = colotrain.resume("half", "train.max_steps=4", *on_disk(colotrain))
    assert losses(resumed) == losses(straight)
    assert_same_state(colotrain, "half", "straight")
    held = read_whole(colotrain.rundir("half").checkpoint(4))
    codes = {name: t for name, t in held.items() if name.endswith("_codes")}
    assert len(codes) > 10
    for name, tensor in codes.items():
        rows, row = tensor.shape
        scales = held[name.replace("_codes", "_scales")]
        assert tensor.dtype == torch.uint8
        assert scales.dtype == torch.float32
        assert scales.shape == (rows, -(-row // 256))


def test_a_run_goes_on_on_other_ranks_under_another_plugin(colotrain: Colotrain) -> None:
    base = (*WIDER, "optim.schedule.name=constant")
    whole = colotrain.run(*base, "plugin=zero2", "name=whole")
    colotrain.run(*base, "plugin=zero3", "train.max_steps=2", "name=half")
    resumed = colotrain.resume("half", "cluster.procs_per_node=1", "train.max_steps=4")
    assert losses(resumed) == pytest.approx(losses(whole), abs=1e-4)


def test_the_plan_counts_the_bytes_that_a_run_keeps(colotrain: Colotrain) -> None:
    colotrain.run(*WIDER, "plugin=zero3", "name=counted", "train.max_steps=2")
    planned = colotrain.rundir("counted").plan().memory.optimizer
    kept = [e.fields["optimizer"] for e in colotrain.events("counted") if e.kind == "memory"]
    assert planned == max(kept)
