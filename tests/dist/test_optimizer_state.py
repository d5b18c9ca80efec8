"""Optimizer state that a checkpoint lacks begins as in plain torch: with the first update."""

from __future__ import annotations

import functools
import secrets
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.checkpoints import read_whole
from tests.dist.test_run import losses
from tests.running import Colotrain

BATCH, WIDTH, LR = 8, 6, 0.02
CLOSE = 1e-4  # a gradient that is almost zero may show its last bits in a first update
USERS = """
import torch
import torch.nn.functional as F
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.load_state_dict(torch.load("drawn.pt", weights_only=True)["weights"])

    def forward(self, x, y, late):
        x = self.layers[0](x).tanh()
        if late.any():  # from the third batch on
            x = x + self.layers[1](x).tanh()
        return F.mse_loss(self.layers[2](x), y)

def data():
    drawn = torch.load("drawn.pt", weights_only=True)
    return [{"x": x, "y": y, "late": l} for x, y, l in zip(drawn["x"], drawn["y"], drawn["late"])]
"""
NARROW = """

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(6, 1)
        nn.init.constant_(self.line.weight, 0.5)

    def forward(self, x, y, late):
        return F.mse_loss(self.line(x), y[:, :1])
"""
"""One output: of two ranks, one holds nothing."""
OPTIONS = (
    "model.target=users:Model",
    "data.target=users:data",
    "data.shuffle=false",
    "data.validation_fraction=0",
    "train.global_batch=8",
    "train.micro_batch=2",
    "train.grad_clip=null",
    "optim.weight_decay=0",
    f"optim.lr={LR}",
    "optim.schedule.name=constant",
    "cluster.procs_per_node=2",
    "name=anew",
)


@pytest.fixture
def drawn(colotrain: Colotrain) -> dict[str, Any]:
    """Fresh weights and samples, drawn anew in every run of the tests."""
    seed = secrets.randbits(32)
    print(f"drawn from {seed}")
    draw = torch.Generator().manual_seed(seed)
    shapes = [(f"layers.{i}.{n}", s) for i in range(3) for n, s in SHAPES.items()]
    late = torch.arange(BATCH * 12) >= BATCH * 2
    made: dict[str, Any] = {
        "weights": {name: torch.randn(shape, generator=draw) / 2 for name, shape in shapes},
        "x": torch.randn(BATCH * 12, WIDTH, generator=draw),
        "y": torch.randn(BATCH * 12, WIDTH, generator=draw),
        "late": late,
    }
    torch.save(made, colotrain.cwd / "drawn.pt")
    (colotrain.cwd / "users.py").write_text(USERS)
    return made


SHAPES = {"weight": (WIDTH, WIDTH), "bias": (WIDTH,)}


def plainly(
    drawn: dict[str, Any], optimizer: Any, batches: list[int], *, middle_from: int
) -> dict[str, Tensor]:
    """The weights after `batches` in one process of torch; layer 1 trains from a step on."""
    weights = {n: w.clone().requires_grad_() for n, w in drawn["weights"].items()}
    made = optimizer(list(weights.values()))
    for step, batch in enumerate(batches):
        rows = slice(batch * BATCH, (batch + 1) * BATCH)
        x, y = drawn["x"][rows], drawn["y"][rows]
        x = F.linear(x, weights["layers.0.weight"], weights["layers.0.bias"]).tanh()
        if batch >= 2:
            more = F.linear(x, weights["layers.1.weight"], weights["layers.1.bias"]).tanh()
            x = x + more
        made.zero_grad()
        out = F.linear(x, weights["layers.2.weight"], weights["layers.2.bias"])
        F.mse_loss(out, y).backward()
        if step < middle_from:
            for name, weight in weights.items():
                weight.grad = None if name.startswith("layers.1.") else weight.grad
        made.step()
    return {name: weight.detach() for name, weight in weights.items()}


def differences(found: Path, expected: dict[str, Tensor]) -> dict[str, float]:
    stored = read_whole(found)
    return {n: (stored[f"model.{n}"] - w).abs().max().item() for n, w in expected.items()}


@pytest.mark.parametrize("plugin", ["zero1", "gemini"])
def test_what_trains_only_after_a_resume_begins_as_in_plain_torch(
    colotrain: Colotrain, drawn: dict[str, Any], plugin: str
) -> None:
    """NAdam begins with a product of one, so that zeros would be another optimizer."""
    nadam = (*OPTIONS, "optim.name=torch.optim:NAdam")
    colotrain.run(*nadam, "plugin=zero3", "freeze.patterns=[layers.1.*]", "train.max_steps=3")
    colotrain.resume("anew", f"plugin={plugin}", "freeze.patterns=[]", "train.max_steps=6")
    expected = plainly(drawn, lambda p: torch.optim.NAdam(p, lr=LR), list(range(6)), middle_from=3)
    found = differences(colotrain.rundir("anew").checkpoint(6), expected)
    assert max(found.values()) < CLOSE, found


def roll_back(colotrain: Colotrain, drawn: dict[str, Any], *options: str) -> None:
    """Five steps of which the fourth first meets a bad batch; the second is saved before it."""
    drawn["x"][3 * BATCH + 5, 2] = torch.nan
    torch.save(drawn, colotrain.cwd / "drawn.pt")
    back = ("train.on_nonfinite=rollback", "checkpoint.every=2", "train.max_steps=5")
    colotrain.run(*OPTIONS, *back, "optim.betas=[0.9,0.999]", *options)


def assert_rolled_back(
    colotrain: Colotrain, drawn: dict[str, Any], optimizer: Any, *, middle_from: int
) -> None:
    """The run ended as plain torch does that never saw the batches passed over."""
    made = functools.partial(optimizer, lr=LR, weight_decay=0)
    expected = plainly(drawn, made, [0, 1, 4, 5, 6], middle_from=middle_from)
    found = differences(colotrain.rundir("anew").checkpoint(5), expected)
    assert max(found.values()) < CLOSE, found


@pytest.mark.parametrize("name", ["AdamW", "NAdam"])
def test_a_rollback_forgets_state_that_its_checkpoint_lacks(
    colotrain: Colotrain, drawn: dict[str, Any], name: str
) -> None:
    """Layer 1 is first used by the third batch."""
    chosen = "adamw" if name == "AdamW" else f"torch.optim:{name}"
    roll_back(colotrain, drawn, f"optim.name={chosen}")
    assert_rolled_back(colotrain, drawn, getattr(torch.optim, name), middle_from=0)


def test_a_rollback_undoes_what_was_unfrozen_since(
    colotrain: Colotrain, drawn: dict[str, Any]
) -> None:
    """Layer 1 trains in step 3, and is not yet in the checkpoint of step 2 as trained."""
    thaw = ("freeze.patterns=[layers.1.*]", "freeze.unfreeze={2:[layers.1.*]}")
    roll_back(colotrain, drawn, *thaw, "checkpoint.content=trained")
    assert_rolled_back(colotrain, drawn, torch.optim.AdamW, middle_from=2)


def test_adafactor_resumes_where_a_rank_holds_no_row(
    colotrain: Colotrain, drawn: dict[str, Any]
) -> None:
    (colotrain.cwd / "users.py").write_text(USERS.replace("Model(", "Whole(") + NARROW)
    options = (*OPTIONS, "plugin=zero2", "optim.name=adafactor")
    whole = colotrain.run(*options, "train.max_steps=4", "name=whole")
    colotrain.run(*options, "train.max_steps=2")
    resumed = colotrain.resume("anew", "train.max_steps=4")
    assert losses(resumed) == pytest.approx(losses(whole), abs=1e-6)


def test_parameters_that_the_model_lacks_are_refused(
    colotrain: Colotrain, drawn: dict[str, Any]
) -> None:
    adapter = ("adapter.name=lora", "adapter.targets=[layers.0]")
    colotrain.run(*OPTIONS, *adapter, "plugin=zero3", "train.max_steps=2")
    result = colotrain(
        "resume", "anew", "adapter.name=null", "adapter.targets=[]", "train.max_steps=4"
    )
    assert result.code == 2, result.err
    assert "which the model lacks (2 in all)" in result.err


@pytest.mark.parametrize("name", ["torch.optim:NAdam", "lion"])  # lion's exp_avg is AdamW's, too
def test_another_optimizers_state_is_not_taken_for_its_own(
    colotrain: Colotrain, drawn: dict[str, Any], name: str
) -> None:
    colotrain.run(*OPTIONS, "plugin=zero2", "train.max_steps=2")
    result = colotrain("resume", "anew", f"optim.name={name}", "train.max_steps=4")
    assert result.code == 0, result.err
    assert f"no state of optim.name={name} for layers.0.weight (6 in all)" in result.err
