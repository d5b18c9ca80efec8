"""Preference pairs: DPO is that of plain torch with two models, and exact after a resume."""

from __future__ import annotations

import json
import random
import re
import shutil
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.dist.hf import make_directory
from tests.representatives import representatives
from tests.running import SMALL, Colotrain, losses

WORDS = ("red", "blue", "green", "seven", "three", "house", "tree", "river")
DPO = (
    "data.path=pairs.jsonl",
    "data.tokenizer=bytes",
    "data.chat_template=chatml",
    "data.seq_len=64",
    "train.objective=dpo",
    "train.dpo.beta=0.3",
    "train.eval_steps=all",
)
OF_BYTES = {"vocab_size": 256, "max_position_embeddings": 64}
PLUGINS = ("zero1", "zero2", "zero3", "fsdp-hybrid", "gemini")


@pytest.fixture
def pairs(colotrain: Colotrain) -> Colotrain:
    draw = random.Random(0)
    with (colotrain.cwd / "pairs.jsonl").open("w") as file:
        for index in range(40):
            good, bad = draw.sample(WORDS, 2)
            chosen, rejected = good + "." * draw.randint(0, 3), f"{bad} or {good}"
            record = {"prompt": f"Say {good}: ", "chosen": chosen, "rejected": rejected}
            if index % 4 == 3:
                record = {
                    "prompt": [{"role": "user", "content": good}],
                    "chosen": [{"role": "assistant", "content": chosen}],
                    "rejected": [{"role": "assistant", "content": rejected}],
                }
            print(json.dumps(record), file=file)
    return colotrain


@pytest.mark.parametrize("plugin", representatives(PLUGINS, kept=["zero3"]))
@pytest.mark.parametrize("kind", representatives(["llm", "adapters"], kept=["adapters"]))
def test_verify_compares_with_two_models_in_plain_torch(
    pairs: Colotrain, tmp_path: Path, kind: str, plugin: str
) -> None:
    model = (*SMALL, "data.corpus=null")
    if kind == "adapters":
        pytest.importorskip("transformers")
        folder = make_directory("llama", tmp_path / "llama", **OF_BYTES)
        model = (f"model.hf={folder}", "train.global_batch=8", "adapter.name=lora")
        model = (*model, "adapter.targets=[q_proj,down_proj]")
    options = ("--world-sizes", "2", "--plugins", plugin, "--accumulation", "2")
    result = pairs("verify", *model, *DPO, *options, "--json")
    assert result.code == 0, result.out + result.err
    cases = result.json["cases"]
    assert 0.0 < max(case["max_abs_gradient"] for case in cases) < 1e-6


def test_a_resumed_run_has_the_same_reference(pairs: Colotrain) -> None:
    words = (*SMALL, "data.corpus=null", *DPO, "plugin=zero2", "train.max_steps=6")
    words = (*words, "train.eval_every=3", "optim.lr=0.01")
    whole = pairs.run(*words, "name=whole", "checkpoint.every=3", "checkpoint.keep=9")
    found = losses(whole)
    assert found[0] == pytest.approx(0.6931472, abs=1e-6)  # the model is its own reference
    assert found[-1] < 0.6
    assert whole["metrics"]["reward_accuracy"] > 0.6
    margin = whole["metrics"]["reward_chosen"] - whole["metrics"]["reward_rejected"]
    assert whole["metrics"]["reward_margin"] == pytest.approx(margin, abs=1e-6)
    assert losses(pairs.run(*words, "data.num_workers=2", "name=ahead")) == found
    rundir = pairs.rundir("whole")
    for folder in (rundir.checkpoint(6),):
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
    notes = [e for e in pairs.events("whole") if e.kind == "note" and "reference" in str(e.fields)]
    shutil.rmtree(rundir.precomputed)  # computed again: from the first weights, not those of step 3
    again = pairs.resume("whole")
    assert losses(again)[-3:] == pytest.approx(found[-3:], abs=1e-6)
    assert again["metrics"] == pytest.approx(whole["metrics"], abs=1e-5)
    assert notes


def test_what_pairs_exclude_is_said_at_once(pairs: Colotrain) -> None:
    words = ("train.metrics=mine:fn", "data.isolate=true", "mesh.cp=2", "checkpoint.resume=.")
    result = pairs("plan", *SMALL, "data.corpus=null", *DPO, *words, "data.loss_on=all")
    assert result.code == 2
    for key in ("train.metrics", "data.isolate", "mesh.cp", "checkpoint.resume", "data.loss_on"):
        assert key in result.err
    result = pairs(
        "plan",
        *DPO,
        "model.target=torch.nn:Linear",
        "model.args={in_features: 2, out_features: 2}",
    )
    assert result.code == 2
    assert "expected a causal model of transformers" in result.err
    (pairs.cwd / "text.txt").write_text("once")
    result = pairs("plan", *SMALL, "data.corpus=null", *DPO, "data.path=text.txt")
    assert result.code == 2
    assert "records with prompt, chosen and rejected, not text" in result.err
    result = pairs("run", *SMALL, "data.corpus=null", "data.path=pairs.jsonl")
    assert result.code == 2
    assert "train.objective=dpo" in result.err


@pytest.mark.slow
def test_a_run_that_is_stopped_in_the_reference_pass_continues_there(pairs: Colotrain) -> None:
    records = (pairs.cwd / "pairs.jsonl").read_text()
    (pairs.cwd / "pairs.jsonl").write_text(100 * records)
    words = (*SMALL, "data.corpus=null", *DPO, "plugin=zero3", "train.max_steps=600")
    words = (*words, "train.eval_every=0", "train.micro_batch=1")
    started = pairs.start("run", *words, "name=long")
    deadline = time.monotonic() + 120
    while not pairs.rundir("long").events.is_dir() or not any(
        "are computed once" in str(event.fields) for event in pairs.events("long")
    ):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert pairs("stop", "long").code == 0
    started.communicate(timeout=120)
    assert started.returncode == 75
    assert not any(event.kind == "step" for event in pairs.events("long"))
    files = list(pairs.rundir("long").precomputed.glob("*/train-*"))
    known = sum(len(load_file(path)["ids"]) for path in files)
    asked = (str(event.fields) for event in pairs.events("long"))
    total = next(int(n) for text in asked for n in re.findall(r"of (\d+) train pairs", text))
    assert 0 < known < total
    found = losses(pairs.resume("long", "train.max_steps=3"))
    assert found == losses(pairs.run(*words, "name=whole", "train.max_steps=3"))
