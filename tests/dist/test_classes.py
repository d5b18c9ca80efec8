"""Classification of texts: plain torch's under every plugin, and an export for transformers."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.dist.hf import make_chat_directory, make_directory
from tests.representatives import representatives
from tests.running import Colotrain, losses

PLUGINS = ("zero1", "zero2", "zero3", "fsdp-hybrid", "gemini")
WORDS = {"color": ["red", "blue"], "number": ["seven", "three"], "animal": ["cat", "dog"]}
SETTINGS = (
    *("data.path=labelled.csv", "data.seq_len=24", "train.objective=classify"),
    *("train.eval_steps=all", "train.global_batch=8", "optim.lr=0.01"),
)


@pytest.fixture
def labelled(colotrain: Colotrain) -> Colotrain:
    pytest.importorskip("transformers")
    draw = random.Random(1)
    with (colotrain.cwd / "labelled.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        for _ in range(60):
            name = draw.choice(list(WORDS))
            words = (draw.choice(WORDS[name]) for _ in range(draw.randint(1, 4)))
            writer.writerow([" ".join(words), name])
    return colotrain


@pytest.mark.parametrize("plugin", representatives(PLUGINS, kept=["zero2"]))
def test_verify_compares_with_each_text_by_itself(
    labelled: Colotrain, tmp_path: Path, plugin: str
) -> None:
    folder = make_directory("llama", tmp_path / "base", vocab_size=256)
    words = (f"model.hf={folder}", *SETTINGS, "data.tokenizer=bytes")
    options = ("--world-sizes", "2", "--plugins", plugin, "--accumulation", "4")
    result = labelled("verify", *words, *options, "--json")
    assert result.code == 0, result.out + result.err
    cases = result.json["cases"]
    assert 0.0 < max(case["max_abs_gradient"] for case in cases) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [False, True])
def test_an_exported_classifier_is_one_for_transformers(labelled: Colotrain, adapter: bool) -> None:
    import transformers

    folder = make_chat_directory(labelled.cwd / "base")
    words = (f"model.hf={folder}", *SETTINGS, "train.max_steps=4", "train.eval_every=4")
    lora = ("adapter.name=lora", "adapter.targets=[q_proj]") if adapter else ()
    found = labelled.run(*words, *lora, "name=run", "checkpoint.every=1")
    assert 0.0 <= found["metrics"]["accuracy"] <= 1.0
    assert losses(labelled.resume("run", "train.max_steps=5"))[:4] == losses(found)
    other = labelled(
        "resume", "run", "train.max_steps=6", "train.classify.classes=[color,animal,number]"
    )
    assert other.code != 0
    assert "its head knows animal, color, number, not color, animal, number" in other.err
    alone = ("--adapter",) if adapter else ()
    result = labelled("export", "run", "--to", "out", "--check", *alone)
    assert result.code == 0, result.out + result.err
    if adapter:
        stored = load_file(labelled.cwd / "out" / "adapter_model.safetensors")
        assert any("score" in name for name in stored)
        settings = json.loads((labelled.cwd / "out" / "adapter_config.json").read_text())
        assert (settings["task_type"], settings["modules_to_save"]) == ("SEQ_CLS", ["score"])
        return
    model = transformers.AutoModelForSequenceClassification.from_pretrained(labelled.cwd / "out")
    assert model.config.id2label == {0: "animal", 1: "color", 2: "number"}


def test_what_is_no_data_of_classes_is_said_at_once(labelled: Colotrain) -> None:
    folder = make_directory("llama", labelled.cwd / "base", vocab_size=256)
    words = ("plan", f"model.hf={folder}", *SETTINGS, "data.tokenizer=bytes")
    result = labelled(*words, "train.loss=mine:fn", "model.args={num_labels: 3}")
    assert result.code == 2
    for key in ("train.loss", "model.args.num_labels"):
        assert key in result.err
    result = labelled("plan", "recipe=llm-tiny", "data.corpus=null", *SETTINGS)
    assert result.code == 2
    assert "model.hf: expected a model directory under train.objective=classify" in result.err
    (labelled.cwd / "text.txt").write_text("once")
    result = labelled(*words, "data.path=text.txt")
    assert result.code == 2
    assert "records with a text and a label, not text" in result.err
    (labelled.cwd / "one.jsonl").write_text('{"text": "a", "label": 1}\n')
    result = labelled(*words, "data.path=one.jsonl")
    assert result.code == 2
    assert "at least two classes" in result.err
