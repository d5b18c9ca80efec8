"""`auto` takes the micro-batch and recomputation that are fastest of those that surely fit."""

from __future__ import annotations

import json
from typing import Any

import pytest

from colotrain.cli.main import guarded
from colotrain.runs.resolving import plan_from
from colotrain.spec.plan import RunPlan

ASKED = ("train.micro_batch=auto", "train.activation_checkpointing=auto")
SMALL = (
    "recipe=llm-tiny",
    "hardware=h100",
    "cluster.procs_per_node=1",
    "model.args.num_layers=3",
    "train.global_batch=48",
    "data.seq_len=512",
    "train.precision=bf16",
    "plugin=zero1",
)


def planned(*words: str) -> RunPlan:
    return plan_from([*SMALL, *words], here=False)


def test_what_fits_whole_recomputes_nothing_with_the_largest_micro_batch() -> None:
    plan = planned(*ASKED)
    assert (plan.batch.micro_batch, plan.train.activation_checkpointing) == (24, "none")
    assert plan.batch.accumulation_steps * plan.batch.micro_batch == 48, "32 do not divide it"
    assert plan.batch.reason.startswith(
        "train.micro_batch=24 and train.activation_checkpointing=none: the fastest that surely"
    )


def test_with_less_memory_it_is_the_fastest_of_all_that_surely_fit() -> None:
    """The reference plans every micro-batch with each recomputation."""
    least = planned("train.micro_batch=1", "train.activation_checkpointing=full")
    most = planned("train.micro_batch=24", "train.activation_checkpointing=none")
    memory = (2 * least.peak.high + most.peak.high) // 3
    room = f"cluster.memory={memory}"
    chosen = planned(*ASKED, room)
    every = [
        planned(f"train.micro_batch={size}", f"train.activation_checkpointing={way}", room)
        for size in (1, 4, 8, 12, 16, 24)
        for way in ("none", "selective", "full")
    ]
    fitting = [plan for plan in every if plan.peak.high <= memory]
    assert 0 < len(fitting) < len(every)
    assert chosen.peak.high <= memory
    assert chosen.time.step_s <= 1.01 * min(plan.time.step_s for plan in fitting)


def test_one_of_the_two_alone_is_chosen_beside_the_other() -> None:
    plan = planned("train.micro_batch=4", "train.activation_checkpointing=auto")
    assert (plan.batch.micro_batch, plan.train.activation_checkpointing) == (4, "none")
    assert "micro_batch" not in plan.batch.reason
    plan = planned("train.micro_batch=auto", "train.activation_checkpointing=full")
    assert (plan.batch.micro_batch, plan.train.activation_checkpointing) == (24, "full")
    plan = planned(*ASKED, "accumulate.steps=8")
    assert plan.batch.micro_batch == 6, "the other sizes say it"


def test_what_is_asked_for_stays_and_says_nothing() -> None:
    assert planned("train.micro_batch=2").batch.reason == ""


@pytest.mark.parametrize("word", ["train.global_batch=null", "plugin=zer1", "model.args.x=1"])
def test_what_is_wrong_beside_is_refused_as_ever(word: str, capsys: Any) -> None:
    assert guarded(["plan", *SMALL, *ASKED, word, "--json"]) == 2
    key = word.partition("=")[0].replace("global_batch", "micro_batch")
    assert key.removesuffix(".x") in capsys.readouterr().err


def test_where_nothing_fits_it_plans_what_needs_least(capsys: Any) -> None:
    assert guarded(["plan", *SMALL, *ASKED, "cluster.memory=800MiB", "--json"]) == 3
    document = json.loads(capsys.readouterr().out)
    assert (document["batch"]["micro"], document["activation_checkpointing"]) == (1, "full")


def test_where_activations_are_not_known_nothing_surely_fits(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that reads its values cannot be followed without them."""
    source = (
        "from colotrain.models.llm import LLM\n"
        "class Looks(LLM):\n"
        "    def forward(self, input_ids, labels=None):\n"
        "        assert self.head.weight.abs().sum().item() > 0\n"
        "        return super().forward(input_ids, labels)\n"
    )
    (tmp_path / "looks.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    plan = planned(*ASKED, "model.target=looks:Looks")
    assert plan.memory.activations == 0
    assert (plan.batch.micro_batch, plan.train.activation_checkpointing) == (1, "full")
    assert "known to fit" in plan.batch.reason
