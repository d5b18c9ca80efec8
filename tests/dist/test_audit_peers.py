"""`colotrain audit` on scripts of other frameworks; those that are not installed are skipped."""

from __future__ import annotations

from pathlib import Path

import pytest

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
SHARDED = ("fully_shard", "fsdp", "zero3")
RANKS = {"zero1": 2, "zero2": 2, "zero3": 2, "fully_shard": 2, "fsdp": 2}

pytestmark = pytest.mark.slow


def run(colotrain: Colotrain, kind: str, accumulation: int, fault: str = "") -> Result:
    for name in NEEDS.get(kind, ()):
        pytest.importorskip(name)
    return audit(colotrain, SCRIPT, kind, str(accumulation), fault, ranks=RANKS.get(kind, 1))


@pytest.mark.parametrize("kind", [*NEEDS, "fully_shard", "fsdp"])
def test_a_correct_script_has_no_fault(colotrain: Colotrain, kind: str) -> None:
    if kind == "lightning-deepspeed":
        pytest.skip("it divides twice by itself from two micro-batches on")
    result = run(colotrain, kind, 2)
    assert result.code == 0, result.out
    outcomes = {c["check"]: c["outcome"] for c in result.json["checks"]}
    assert set(outcomes.values()) <= {"ok", "cannot tell"}
    compared = {outcomes[name] for name in COMPARED}
    assert compared == ({"cannot tell"} if kind in SHARDED else {"ok"}), result.out


@pytest.mark.parametrize("kind", ["zero1", "zero2", "zero3", "fully_shard", "fsdp"])
def test_every_gradient_is_in_the_table(colotrain: Colotrain, kind: str) -> None:
    result = run(colotrain, kind, 1)
    first, *_ = records(colotrain.rundir(result.json["run"]))
    assert [row.status for row in first.parameters] == ["trained"] * 53


@pytest.mark.parametrize("kind", ["accelerate", "lightning", "zero1", "zero2"])
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
