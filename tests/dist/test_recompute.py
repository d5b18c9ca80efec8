"""Recomputing in backward, through the command line: every plugin trains as without."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch

from colotrain.spec.plugins import ROWS
from tests.checkpoints import read_whole
from tests.dist.conftest import SMALL, Colotrain
from tests.dist.test_contracts import WATCH
from tests.representatives import representatives
from tests.running import losses

DROPS = """
import torch
import torch.nn.functional as F
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.2)
    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        p = self.drop.p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        x = x + self.drop(self.output(mixed.transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(F.gelu(self.up(x))))

class Model(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.head = nn.Linear(width, 3)
    def forward(self, x, y):
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(self.head(x), y)

def data(seed):
    g = torch.Generator().manual_seed(seed)
    rows = [torch.randn(6, 19, generator=g) for _ in range(64)]
    return [{"x": row[:, :16], "y": row[:, 16:]} for row in rows]
"""
FROZEN = "freeze.patterns=[blocks.0.*,blocks.1.qkv.*,blocks.2.down.weight]"


@pytest.mark.parametrize("plugin", representatives(ROWS, kept=["zero3", "gemini"]))
def test_with_dropout_and_freezing_the_run_is_bit_identical(
    colotrain: Colotrain, plugin: str
) -> None:
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    (colotrain.cwd / "drops.py").write_text(DROPS)
    (colotrain.cwd / "watch.py").write_text(WATCH)
    seen = colotrain.cwd / "seen.jsonl"

    def train(recompute: str) -> tuple[Any, Any, dict[str, torch.Tensor]]:
        seen.unlink(missing_ok=True)
        summary = colotrain.run(
            *("model.target=drops:Model", "data.target=drops:data", f"data.args.seed={seed}"),
            *("train.global_batch=12", "train.micro_batch=3", "train.max_steps=4"),
            *("cluster.procs_per_node=2", "train.on_gradients=watch:on_gradients"),
            *(FROZEN, "freeze.unfreeze={3:[blocks.0.*]}", f"train.seed={seed % 1000}"),
            *(f"plugin={plugin}", f"train.activation_checkpointing={recompute}"),
            f"name={recompute}",
        )
        gradients = [json.loads(line)["seen"] for line in seen.read_text().splitlines()]
        state = read_whole(colotrain.rundir(recompute).checkpoint(4))
        return losses(summary), gradients, state

    plain = train("none")
    assert len(plain[0]) == len(plain[1]) == 4
    assert plain[1][0]["blocks.0.up.weight"][0] == "frozen"
    assert plain[1][3]["blocks.0.up.weight"][0] == "trained"
    again = train("selective")
    assert again[:2] == plain[:2]
    assert again[2].keys() == plain[2].keys()
    for name, tensor in plain[2].items():
        assert torch.equal(again[2][name], tensor), name


@pytest.mark.slow
def test_memory_measured_and_predicted_is_between_the_others(
    colotrain: Colotrain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a cache of its own: a peak that is known from an earlier run would be no prediction."""
    monkeypatch.setenv("COLOTRAIN_CACHE", str(colotrain.cwd / "cache"))
    shape = ("model.args.d_model=256", "model.args.num_layers=6", "model.args.d_hidden=704")
    words = ("recipe=llm-tiny", *shape, "plugin=zero3", "train.eval_steps=0", "checkpoint.every=0")
    batch = ("train.micro_batch=8", "train.global_batch=8", "cluster.procs_per_node=1")
    measured, predicted = [], []
    for recompute in ("none", "selective", "full"):
        way = f"train.activation_checkpointing={recompute}"
        summary = colotrain.run(*words, *batch, way, "train.max_steps=2", f"name={recompute}")
        measured.append(summary["memory"]["measured_peak"])
        predicted.append(summary["memory"]["predicted_peak"])
    assert predicted == pytest.approx(measured, rel=0.1)
    for peaks in (measured, predicted):
        assert peaks[0] - 16 * 2**20 > peaks[1] > peaks[2] + 32 * 2**20


CHANGES = """
import torch
from torch import nn

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
    def forward(self, x):
        x.mul_(0.5)
        return x + self.b(self.a(x).relu())

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()

def data():
    return [{"x": torch.full((4,), i / 64)} for i in range(64)]
"""


def test_a_block_that_changes_its_input_is_not_recomputed_from_it(colotrain: Colotrain) -> None:
    (colotrain.cwd / "changes.py").write_text(CHANGES)
    words = ("model.target=changes:Model", "data.target=changes:data", "train.global_batch=4")
    for verb in ("run", "plan"):
        result = colotrain(verb, *words, "train.activation_checkpointing=selective")
        assert result.code == 2, result.err
        assert result.err.splitlines()[-1].startswith(
            "error: train.activation_checkpointing=selective: forward of Layer changes what it is"
        )
    assert not (colotrain.cwd / "runs").exists()
    advised = colotrain("plan", *words, "--advise", "--json")
    ways = {option["activation_checkpointing"] for option in advised.json["alternatives"]}
    assert ways == {"none"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_with_compile_the_losses_are_the_same(colotrain: Colotrain) -> None:
    words = (*SMALL, "plugin=zero2", "train.max_steps=3", "train.compile=true")
    freeze = ("freeze.patterns=[embed*,blocks.0.*]", "freeze.unfreeze={2:[blocks.0.*]}")
    plain = colotrain.run(*words, *freeze)
    again = colotrain.run(*words, *freeze, "train.activation_checkpointing=selective")
    assert losses(again) == pytest.approx(losses(plain), abs=1e-5)
