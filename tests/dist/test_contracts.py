"""What is known to go wrong elsewhere, each as a run of the command line."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from colotrain.spec.plugins import ROWS
from tests.checkpoints import read_whole
from tests.representatives import representatives
from tests.running import SMALL, Colotrain, losses

CONSTANT = "optim.schedule.name=constant"
WATCH = """
import json, os
import torch
import colotrain

def on_gradients(model, step):
    seen = {}
    for view in colotrain.gradients(model):
        whole = view.full()
        assert tuple(whole.shape) == view.shape
        if view.local is not None and view.local.ndim:
            rows = whole[view.offset : view.offset + view.local.shape[0]]
            assert torch.equal(rows, view.local), view.name
        seen[view.name] = [view.status, whole.norm().item(), view.norm]
    if os.environ["RANK"] == "0":
        with open("seen.jsonl", "a") as out:
            out.write(json.dumps({"step": step, "seen": seen}) + "\\n")
"""


WRITES = """
import torch

def on_gradients(model, step):
    if step == 1:
        with torch.no_grad():
            model.get_parameter("blocks.0.mlp.up.weight").mul_(1.5)
        model.get_parameter("blocks.0.mlp.down.weight").data.mul_(0.5)
"""


def watched(colotrain: Colotrain, *overrides: str) -> list[dict[str, Any]]:
    """What `on_gradients` saw in each step of a run."""
    (colotrain.cwd / "watch.py").write_text(WATCH)
    seen = colotrain.cwd / "seen.jsonl"
    seen.unlink(missing_ok=True)
    colotrain.run(*SMALL, "train.on_gradients=watch:on_gradients", *overrides)
    return [json.loads(line)["seen"] for line in seen.read_text().splitlines()]


def test_whole_gradients_are_readable_by_name_under_zero3(colotrain: Colotrain) -> None:
    steps = watched(colotrain, "plugin=zero3", "train.max_steps=2", "freeze.patterns=[embed*]")
    assert len(steps) == 2
    for seen in steps:
        assert seen["embed.weight"] == ["frozen", 0.0, 0.0]
        others = [entry for name, entry in seen.items() if name != "embed.weight"]
        assert all(status == "trained" for status, _, _ in others)
        assert all(norm > 0 and norm == pytest.approx(own, rel=1e-5) for _, norm, own in others)


def test_gradients_are_unscaled_in_fp16(colotrain: Colotrain) -> None:
    full = watched(colotrain, "plugin=zero2", "train.max_steps=1")[0]
    half = watched(colotrain, "plugin=zero2", "train.max_steps=1", "train.precision=fp16")[0]
    for name, (_, norm, _) in full.items():
        assert half[name][1] == pytest.approx(norm, rel=0.05), name


def test_accumulation_32_is_one_optimizer_step_per_32_micro_batches(colotrain: Colotrain) -> None:
    overrides = ("train.global_batch=64", "train.micro_batch=1", "train.max_steps=2")
    for plugin in ("zero1", "gemini"):
        summary = colotrain.run(*SMALL, *overrides, f"plugin={plugin}")
        assert summary["micro_batches"] == 64
        assert summary["optimizer_steps"] == 2


OVERFLOWS = """
import os, torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.calls = 0
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        self.calls += self.training
        if os.environ["RANK"] == "1" and self.training and self.calls == 6:
            x = x * 1e30
        return x.float().square().mean()

def data():
    generator = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(4, generator=generator)} for _ in range(64)]
"""


@pytest.mark.parametrize("plugin", ["zero1", "zero2", "fsdp-hybrid"])
def test_an_overflow_in_one_micro_batch_skips_exactly_that_step(
    colotrain: Colotrain, plugin: str
) -> None:
    (colotrain.cwd / "overflows.py").write_text(OVERFLOWS)
    summary = colotrain.run(
        "model.target=overflows:Model",
        "data.target=overflows:data",
        "train.global_batch=16",
        "train.micro_batch=2",  # four a step: the sixth is the second of step 2
        "train.max_steps=4",
        "train.precision=fp16",
        "cluster.procs_per_node=2",
        f"plugin={plugin}",
        "checkpoint.every=1",
        "checkpoint.keep=9",
        "name=overflow",
    )
    steps = [e for e in colotrain.events("overflow") if e.kind == "step" and e.rank == 0]
    assert [event.fields["skipped"] for event in steps] == [False, True, False, False]
    assert ["lr" in event.fields for event in steps] == [True, False, True, True]
    assert summary["optimizer_steps"] == 3
    scales = []
    for number in (1, 2, 3):
        folder = colotrain.rundir("overflow").checkpoint(number)
        scales.append(json.loads((folder / "manifest.json").read_text())["loss_scale"])
    assert scales == [65536.0, 32768.0, 32768.0]
    before, after = (
        read_whole(colotrain.rundir("overflow").checkpoint(number)) for number in (1, 2)
    )
    for name, tensor in before.items():
        if name.startswith(("model.", "optim.")):
            assert torch.equal(tensor, after[name]), name


def test_the_freeze_set_may_change_at_resume(colotrain: Colotrain) -> None:
    first = ("name=thaw", "plugin=zero2", "freeze.patterns=[embed*]", "train.max_steps=3", CONSTANT)
    colotrain.run(*SMALL, *first, "checkpoint.keep=9")
    result = colotrain(
        "resume", "thaw", "freeze.patterns=[blocks.0.*]", "train.max_steps=6", "plugin=zero3"
    )
    assert result.code == 0, result.err
    rundir = colotrain.rundir("thaw")
    before, after = (read_whole(rundir.checkpoint(number)) for number in (3, 6))
    for name in (name for name in before if name.startswith("model.")):
        frozen = name.startswith("model.blocks.0.")
        assert torch.equal(before[name], after[name]) == frozen, name
    assert "optim.blocks.0.mlp.up.weight.exp_avg" not in after
    assert after["optim.embed.weight.step"].item() == 3
    assert after["optim.head.weight.step"].item() == 6


@pytest.mark.parametrize("plugin", representatives(ROWS, kept=["zero2", "gemini"]))
def test_a_parameter_trains_from_the_step_that_unfreezes_it_also_across_resume(
    colotrain: Colotrain, plugin: str
) -> None:
    schedule = ("freeze.patterns=[embed*]", "freeze.unfreeze={2:[embed*]}", f"plugin={plugin}")
    always = (*SMALL, *schedule, CONSTANT, "checkpoint.every=1", "checkpoint.keep=9")
    straight = colotrain.run(*always, "name=straight", "train.max_steps=4")
    saved = [
        read_whole(colotrain.rundir("straight").checkpoint(n))["model.embed.weight"]
        for n in (1, 2, 3)
    ]
    assert torch.equal(saved[0], saved[1])
    assert not torch.equal(saved[1], saved[2])
    colotrain.run(*always, "name=parted", "train.max_steps=3")
    resumed = colotrain("resume", "parted", "train.max_steps=4", "--json")
    assert resumed.code == 0, resumed.err
    assert losses(resumed.json) == losses(straight)


def test_frozen_parameters_that_one_rank_casts_once_are_those_of_now(
    colotrain: Colotrain,
) -> None:
    """Also after a change by the user's code, an evaluation, and where they begin to train."""
    (colotrain.cwd / "writes.py").write_text(WRITES)
    one = ("cluster.procs_per_node=1", "train.micro_batch=8", "train.precision=bf16", CONSTANT)
    frozen = ("freeze.patterns=[embed*,blocks.0.*]", "freeze.unfreeze={4:[embed*]}")
    base = (*SMALL, *one, *frozen, "train.max_steps=6", "train.eval_every=3")
    seen = []
    for words in ((), ("train.on_gradients=writes:on_gradients",)):
        runs = [colotrain.run(*base, *words, f"plugin={plugin}") for plugin in ("zero1", "zero3")]
        assert losses(runs[0]) == losses(runs[1])
        seen.append(losses(runs[0]))
    assert seen[0][:2] == seen[1][:2]
    assert seen[0][2] != seen[1][2]
