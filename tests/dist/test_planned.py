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


@pytest.mark.parametrize("plugin", ["zero2", "zero3", "fsdp-hybrid"])
@pytest.mark.parametrize("freeze", [[], ["freeze.patterns=[embed*,blocks.0.*]"]])
@pytest.mark.parametrize("recompute", ["selective", "blocks"])
def test_the_plan_of_64_ranks_is_what_torch_s_tracker_sees(
    tmp_path: Path, plugin: str, freeze: list[str], recompute: str
) -> None:
    way = f"train.activation_checkpointing={recompute}"
    words = ["recipe=llm-25m", f"plugin={plugin}", way, *freeze]
    words += ["cluster=h200", "cluster.nodes=8", "cluster.procs_per_node=8"]
    words += ["train.micro_batch=1", "train.global_batch=null", "accumulate.steps=1"]
    words += ["data.seq_len=1024"]
    result = Colotrain(tmp_path)("plan", *words, "train.precision=bf16", "--trace", "--json")
    assert result.code == 0, result.err
    found = result.json["trace"]["categories"]
    for exact in ("parameters", "gradients", "optimizer"):
        assert found[exact]["plan"] == found[exact]["tracker"], exact
    for near in ("activations", "gathered"):
        assert found[near]["plan"] == pytest.approx(found[near]["tracker"], rel=0.1), near
