"""`colotrain audit` on scripts of other frameworks; those that are not installed are skipped."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from colotrain.events.gradients import records
from tests.dist.test_audit import audit, wrong
from tests.running import Colotrain, Result

SCRIPT = str(Path(__file__).with_name("audited_peers.py"))
NEEDS = {
    "accelerate": ["accelerate"],
    "lightning": ["lightning"],
    "lightning-ddp": ["lightning"],
    "lightning-deepspeed": ["lightning", "deepspeed"],
    "transformers": ["transformers", "accelerate"],
    "zero1": ["deepspeed"],
    "zero2": ["deepspeed"],
    "zero3": ["deepspeed"],
}
COMPARED = ("accumulation", "gradient", "targets")
RANKS = {"zero1": 2, "zero2": 2, "zero3": 2, "fully_shard": 2, "fsdp": 2}

pytestmark = pytest.mark.slow


def run(colotrain: Colotrain, kind: str, accumulation: int, fault: str = "") -> Result:
    for name in NEEDS.get(kind, ()):
        pytest.importorskip(name)
    return audit(colotrain, SCRIPT, kind, str(accumulation), fault, ranks=RANKS.get(kind, 1))


def plain_gradients(accumulation: int, world: int) -> dict[str, torch.Tensor]:
    """The first step's mean gradient by plain torch, in one process and in float64."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [SCRIPT, "plain", str(accumulation)])
        script = runpy.run_path(SCRIPT)
    torch.manual_seed(0)
    net, samples = script["Net"]().double(), script["Samples"]()
    for index in range(world * accumulation * 4):
        x, y = samples[index]
        loss = F.cross_entropy(net(x[None].double()), y[None])
        (loss / (world * accumulation * 4)).backward()
    return {name: p.grad for name, p in net.named_parameters()}


@pytest.mark.parametrize("kind", [*NEEDS, "fully_shard", "fsdp"])
def test_a_correct_script_has_no_fault_and_plain_torchs_gradients(
    colotrain: Colotrain, kind: str
) -> None:
    accumulation = 1 if kind == "lightning-deepspeed" else 2  # from two on, it divides twice
    result = run(colotrain, kind, accumulation)
    assert result.code == 0, result.out
    outcomes = {c["check"]: c["outcome"] for c in result.json["checks"]}
    assert set(outcomes.values()) == {"ok"}
    assert {outcomes[name] for name in COMPARED} == {"ok"}, result.out
    if kind == "transformers":  # it has a model of its own
        return
    world = 2 if kind == "lightning-ddp" else RANKS.get(kind, 1)
    wanted = plain_gradients(accumulation, world)
    first, *_ = records(colotrain.rundir(result.json["run"]))
    assert [row.name.removeprefix("net.") for row in first.parameters] == list(wanted)
    for row, gradient in zip(first.parameters, wanted.values(), strict=True):
        assert row.status == "trained"
        assert row.norm == pytest.approx(float(gradient.norm()), abs=1e-6)
        assert row.max_abs == pytest.approx(float(gradient.abs().max()), abs=1e-6)


@pytest.mark.parametrize("kind", ["accelerate", "lightning", "zero1", "zero3"])
def test_a_loss_that_is_divided_twice_is_found(colotrain: Colotrain, kind: str) -> None:
    result = run(colotrain, kind, 2, "divided-twice")
    found = wrong(result)["accumulation"]
    assert "0.50 of the mean of 2 micro-batches: the loss is divided by 2 twice" in found["text"]
    assert any("audited_peers.py" in site and "(" not in site for site in found["sites"])


@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_lightning_and_deepspeed_divide_twice(colotrain: Colotrain, accumulation: int) -> None:
    result = run(colotrain, "lightning-deepspeed", accumulation)
    assert result.code == (0 if accumulation == 1 else 4), result.out
    update = next(c for c in result.json["checks"] if c["check"] == "update")
    assert update["text"].startswith(f"{1 / accumulation:.2f} of plain torch's")
    if accumulation > 1:
        sites = " ".join(wrong(result)["accumulation"]["sites"])
        assert "lightning/" in sites
        assert "deepspeed/" in sites
