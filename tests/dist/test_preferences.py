"""Preference pairs: every objective is plain torch's, and DPO's reference is that of a resume."""

from __future__ import annotations

import json
import random
import re
import shutil
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.dist.hf import make_chat_directory, make_directory
from tests.representatives import representatives
from tests.running import SMALL, Colotrain, losses

WORDS = ("red", "blue", "green", "seven", "three", "house", "tree", "river")
PAIRS = (
    "data.path=pairs.jsonl",
    "data.tokenizer=bytes",
    "data.chat_template=chatml",
    "data.seq_len=64",
    "train.eval_steps=all",
)
DPO = (*PAIRS, "train.objective=dpo", "train.dpo.beta=0.3")
WITHOUT_REFERENCE = {
    "orpo": ("train.objective=orpo", "train.orpo.beta=0.7"),
    "simpo": ("train.objective=simpo", "train.simpo.label_smoothing=0.1"),
}
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


FORMULAS = [f"{objective} {plugin}" for objective in WITHOUT_REFERENCE for plugin in PLUGINS]


@pytest.mark.parametrize("case", representatives(FORMULAS, kept=["orpo gemini"]))
def test_verify_compares_with_the_formula_in_plain_torch(pairs: Colotrain, case: str) -> None:
    objective, plugin = case.split()
    words = (*SMALL, "data.corpus=null", *PAIRS, *WITHOUT_REFERENCE[objective])
    options = ("--world-sizes", "2", "--plugins", plugin, "--accumulation", "4")
    result = pairs("verify", *words, *options, "--json")
    assert result.code == 0, result.out + result.err
    cases = result.json["cases"]
    assert 0.0 < max(case["max_abs_gradient"] for case in cases) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("objective", WITHOUT_REFERENCE)
def test_a_checked_export_repeats_the_loss_without_a_reference(
    pairs: Colotrain, tmp_path: Path, objective: str
) -> None:
    pytest.importorskip("transformers")
    folder = make_directory("llama", tmp_path / "llama", **OF_BYTES)
    words = (f"model.hf={folder}", *PAIRS, *WITHOUT_REFERENCE[objective], "train.global_batch=8")
    words = (*words, "train.max_steps=3", "optim.lr=0.01", "train.eval_every=3")
    found = pairs.run(*words, "name=trained", "checkpoint.every=1")
    assert found["metrics"]["reward_margin"] != 0.0
    again = pairs.resume("trained", "train.max_steps=4")
    assert losses(again)[:3] == losses(found)
    result = pairs("export", "trained", "--to", "out", "--check")
    assert result.code == 0, result.out + result.err
    receipt = json.loads((pairs.cwd / "out" / "receipt.json").read_text())
    assert receipt["validation_loss"]["difference"] < 1e-4


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
    words = ("train.metrics=mine:fn", "data.isolate=true", "checkpoint.resume=.")
    result = pairs("plan", *SMALL, "data.corpus=null", *DPO, *words, "data.loss_on=all")
    assert result.code == 2
    for key in ("train.metrics", "data.isolate", "checkpoint.resume", "data.loss_on"):
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


REWARD = (
    *("data.path=pairs.jsonl", "data.chat_template=chatml", "data.seq_len=64"),
    *("train.objective=reward", "train.reward.center_coefficient=0.01", "train.eval_steps=all"),
    *("train.global_batch=8", "optim.lr=0.01"),
)


def add_margins(pairs: Colotrain) -> str:
    """Give each pair a margin of its own; the setting that reads them."""
    path, draw = pairs.cwd / "pairs.jsonl", random.Random(2)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    lines = [json.dumps(record | {"margin": draw.uniform(-1, 2)}) + "\n" for record in records]
    path.write_text("".join(lines))
    return "train.reward.margins=true"


@pytest.mark.parametrize("plugin", representatives(PLUGINS, kept=["zero3"]))
def test_verify_scores_the_last_token_of_each_text_by_itself(
    pairs: Colotrain, tmp_path: Path, plugin: str
) -> None:
    pytest.importorskip("transformers")
    folder = make_directory("llama", tmp_path / "llama", **OF_BYTES)
    words = (f"model.hf={folder}", *REWARD, "data.tokenizer=bytes", add_margins(pairs))
    options = ("--world-sizes", "1,2", "--plugins", plugin, "--accumulation", "1,4")
    result = pairs("verify", *words, *options, "--json")
    assert result.code == 0, result.out + result.err
    cases = result.json["cases"]
    assert 0.0 < max(case["max_abs_gradient"] for case in cases) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [False, True])
def test_an_exported_reward_model_is_one_for_transformers(pairs: Colotrain, adapter: bool) -> None:
    transformers = pytest.importorskip("transformers")
    folder = make_chat_directory(pairs.cwd / "base")
    words = (f"model.hf={folder}", *REWARD, "train.max_steps=3", "train.eval_every=3", "name=judge")
    lora = ("adapter.name=lora", "adapter.targets=[q_proj]") if adapter else ()
    margins = () if adapter else (add_margins(pairs),)
    found = pairs.run(*words, *lora, *margins, "checkpoint.every=1")
    assert set(found["metrics"]) >= {"reward_margin", "reward_accuracy"}
    assert losses(pairs.resume("judge", "train.max_steps=4"))[:3] == losses(found)
    alone = ("--adapter",) if adapter else ()
    result = pairs("export", "judge", "--to", "out", "--check", *alone)
    assert result.code == 0, result.out + result.err
    receipt = json.loads((pairs.cwd / "out" / "receipt.json").read_text())
    assert receipt["validation_loss"]["difference"] < 1e-4
    if adapter:
        stored = load_file(pairs.cwd / "out" / "adapter_model.safetensors")
        assert any("score" in name for name in stored)
        settings = json.loads((pairs.cwd / "out" / "adapter_config.json").read_text())
        assert (settings["task_type"], settings["modules_to_save"]) == ("SEQ_CLS", ["score"])
        return
    model = transformers.AutoModelForSequenceClassification.from_pretrained(pairs.cwd / "out")
    assert (model.config.num_labels, model.config.pad_token_id) == (1, 256)
