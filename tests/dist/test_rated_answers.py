"""KTO is that of plain torch with two models, whose KL is the mean of a whole global batch."""

from __future__ import annotations

import json
import random
import shutil

import pytest

from colotrain.spec.plugins import ROWS
from tests.dist.hf import make_directory
from tests.masked import make_tokenizer
from tests.running import SMALL, Colotrain, losses

WORDS = ("red", "blue", "green", "seven", "three", "house", "tree", "river")
KTO = (
    "data.corpus=null",
    "data.path=rated.jsonl",
    "data.chat_template=chatml",
    "data.seq_len=64",
    "train.objective=kto",
    "train.kto.beta=0.3",
    "train.kto.undesirable_weight=1.5",
    "train.eval_steps=all",
)
BYTES = "data.tokenizer=bytes"


@pytest.fixture
def rated(colotrain: Colotrain) -> Colotrain:
    draw = random.Random(0)
    with (colotrain.cwd / "rated.jsonl").open("w") as file:
        for index in range(60):
            good, bad = draw.sample(WORDS, 2)
            is_good = draw.random() < 0.6
            answer = good + "." * draw.randint(0, 3) if is_good else f"{bad} or {good}"
            record = {"prompt": f"Say {good}: ", "completion": answer, "label": is_good}
            if index % 4 == 3:
                record["prompt"] = [{"role": "user", "content": good}]
                record["completion"] = [{"role": "assistant", "content": answer}]
            print(json.dumps(record), file=file)
    return colotrain


def verified(rated: Colotrain, *words: str) -> None:
    result = rated("verify", *words, *KTO, "--json")
    assert result.code == 0, result.out + result.err
    assert 0.0 < max(case["max_abs_gradient"] for case in result.json["cases"]) < 1e-6


def test_verify_compares_with_two_models_in_plain_torch(rated: Colotrain) -> None:
    """With the KL of a micro-batch instead of the global batch's, gradients differ by 4e-4."""
    options = ("--world-sizes", "2", "--plugins", "zero2", "--accumulation", "2")
    verified(rated, *SMALL, BYTES, "optim.lr=0.02", *options, "--freeze", "none")


@pytest.mark.slow
def test_every_plugin_and_division_has_the_same_steps(rated: Colotrain) -> None:
    options = ("--world-sizes", "1,2", "--accumulation", "1,4", "--plugins", ",".join(ROWS))
    verified(rated, *SMALL, BYTES, "optim.lr=0.02", *options, "--freeze", "none")


@pytest.mark.slow
def test_adapters_of_a_directory_are_exported(rated: Colotrain) -> None:
    pytest.importorskip("peft")
    folder = make_directory("llama", rated.cwd / "llama", vocab_size=128)
    make_tokenizer(folder)
    model = (f"model.hf={folder}", "train.global_batch=8", "train.micro_batch=2")
    model = (*model, "adapter.name=lora", "adapter.targets=[q_proj,down_proj]", "optim.lr=0.01")
    words = (*model, *KTO, "cluster.procs_per_node=2", "data.seq_len=32", "train.max_steps=4")
    rated.run(*words, "name=lora")
    for options in ((), ("--adapter",)):
        shutil.rmtree(rated.cwd / "out", ignore_errors=True)
        result = rated("export", "lora", "--to", "out", *options, "--check")
        assert result.code == 0, result.out + result.err
        receipt = json.loads((rated.cwd / "out/receipt.json").read_text())
        assert receipt["validation_loss"]["export"] is not None


def test_a_resumed_run_goes_on_bit_for_bit(rated: Colotrain) -> None:
    words = (*SMALL, *KTO, BYTES, "plugin=zero3", "train.max_steps=6", "train.eval_every=3")
    words = (*words, "optim.lr=0.01", "checkpoint.every=3", "checkpoint.keep=9")
    whole = rated.run(*words, "name=whole")
    found = losses(whole)
    assert found[-1] < found[0]
    assert {"reward_chosen", "reward_rejected", "kl"} <= whole["metrics"].keys()
    shutil.rmtree(rated.rundir("whole").checkpoint(6))
    again = rated.resume("whole")
    assert losses(again)[-3:] == found[-3:]
    assert again["metrics"] == whole["metrics"]


def test_what_rated_answers_exclude_is_said_at_once(rated: Colotrain) -> None:
    words = ("train.metrics=mine:fn", "data.isolate=true", "checkpoint.resume=.")
    words = (*words, "train.on_nonfinite=rollback", "data.loss_on=all", "train.kto.beta=0")
    result = rated("plan", *SMALL, *KTO, BYTES, *words)
    assert result.code == 2
    for word in words:
        assert word.partition("=")[0] in result.err
    (rated.cwd / "text.txt").write_text("once")
    result = rated("plan", *SMALL, *KTO, BYTES, "data.path=text.txt")
    assert result.code == 2
    assert "records with prompt, completion and label, not text" in result.err


def test_a_split_with_one_answer_is_refused_before_ranks_start(rated: Colotrain) -> None:
    lines = (rated.cwd / "rated.jsonl").read_text().splitlines(keepends=True)
    (rated.cwd / "few.jsonl").write_text("".join(lines[:40]))
    (rated.cwd / "one.jsonl").write_text(lines[0])
    few = ("data.path=few.jsonl", "data.validation_fraction=0.01")
    for data in (few, ("data.path=few.jsonl", "data.validation_path=one.jsonl")):
        result = rated("run", *SMALL, BYTES, *KTO, *data, "name=few", "train.max_steps=1")
        assert result.code == 2, result.out + result.err
        assert "at least two validation records" in result.err
        assert not any(event.kind == "started" for event in rated.events("few"))
