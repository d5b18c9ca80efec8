"""The plan of a run beside what it took, and beside torch's own memory tracker."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.running import SMALL, Colotrain

PARTS = ("parameters", "gradients", "optimizer", "activations", "gathered", "buffers", "baseline")


def test_a_run_is_shown_beside_its_plan_by_category(tmp_path: Path) -> None:
    command = Colotrain(tmp_path)
    words = (*SMALL, "plugin=zero3", "train.max_steps=4", "checkpoint.every=0", "name=mine")
    command.run(*words)
    document = command("plan", "mine", "--json").json
    predicted, measured = document["memory"]["predicted"], document["memory"]["measured"]
    assert measured["parameters"] == predicted["parameters"]
    assert measured["optimizer"] == predicted["optimizer"]
    assert measured["baseline"] == pytest.approx(predicted["baseline"], rel=0.15)
    assert sum(measured[part] for part in PARTS) == pytest.approx(measured["peak"], rel=0.02)
    assert document["memory"]["error"] == pytest.approx(0.0, abs=0.1)
    shown = command("plan", "mine").out.splitlines()
    rows = {line[:15].strip(): line.split() for line in shown}
    assert rows["parameters"][-1] == rows["optimizer"][-1] == "+0.0%"
    assert rows["within a step"][-1].endswith("%")


FREEZE = [[], ["freeze.patterns=[embed*,blocks.0.*]"]]
KEPT = {("selective", 1, "zero3"), ("full", 1, "zero2"), ("full", 0, "fsdp-hybrid")}
"""Cases that `make test` has: recomputation, index of `FREEZE`, plugin."""


@pytest.mark.parametrize(
    ("recompute", "freeze", "plugin"),
    [
        pytest.param(
            recompute,
            FREEZE[freeze],
            plugin,
            id=f"{recompute}-freeze{freeze}-{plugin}",
            marks=() if (recompute, freeze, plugin) in KEPT else pytest.mark.slow,
        )
        for recompute in ("selective", "full")
        for freeze in (0, 1)
        for plugin in ("zero2", "zero3", "fsdp-hybrid")
    ],
)
def test_the_plan_of_64_ranks_is_what_torch_s_tracker_sees(
    tmp_path: Path, plugin: str, freeze: list[str], recompute: str
) -> None:
    way = f"train.activation_checkpointing={recompute}"
    words = ["recipe=llm-25m", f"plugin={plugin}", way, *freeze]
    words += ["hardware=h200", "cluster.nodes=8", "cluster.procs_per_node=8"]
    words += ["train.micro_batch=1", "train.global_batch=null", "accumulate.steps=1"]
    words += ["data.seq_len=1024"]
    result = Colotrain(tmp_path)("plan", *words, "train.precision=bf16", "--trace", "--json")
    assert result.code == 0, result.err
    found = result.json["trace"]["categories"]
    for exact in ("parameters", "gradients", "optimizer"):
        assert found[exact]["plan"] == found[exact]["tracker"], exact
    for near in ("activations", "gathered"):
        assert found[near]["plan"] == pytest.approx(found[near]["tracker"], rel=0.1), near


OWN = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, looks: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.looks = looks

    def forward(self, x, y):
        for block in self.blocks:
            x = block(x).relu()
        loss = (x.sum(1) - y).square().mean()
        return loss * loss.item() if self.looks else loss

def rows():
    return [{"x": torch.ones(4), "y": torch.tensor(1.0)}] * 16
"""
RECIPE = """
model: {target: "own:Model"}
data: {target: "own:rows"}
train: {global_batch: 8, micro_batch: 4}
cluster: {procs_per_node: 2, device: cpu}
"""


@pytest.fixture
def own(tmp_path: Path) -> Colotrain:
    """Beside a model and data of the user's own."""
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/own.yaml").write_text(RECIPE)
    return Colotrain(tmp_path)


def test_a_model_and_data_of_ones_own_are_what_torch_s_tracker_sees(own: Colotrain) -> None:
    result = own("plan", "recipe=own", "plugin=zero2", "--trace", "--json")
    assert result.code == 0, result.err
    found = result.json["trace"]["categories"]
    for exact in ("parameters", "gradients", "optimizer"):
        assert found[exact]["plan"] == found[exact]["tracker"], exact


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("model.args.looks=true", "error: model.target=own:Model: expected a model that runs"),
        (
            "optim.name=muon",
            "error: optim.name=muon: expected one of adamw, sgd, lion, schedule_free_adamw",
        ),
    ],
)
def test_what_torch_s_tracker_cannot_play_is_one_line(
    own: Colotrain, setting: str, line: str
) -> None:
    result = own("plan", "recipe=own", "--trace", setting)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(line)
    assert result.err.count("\n") == 1
