"""Classes of words: plain transformers' steps under every plugin, and an export that says the same.

Tokens, labels and losses of the reference are made as in transformers' example of token
classification.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from colotrain.spec.plugins import ROWS
from tests.dist.hf import make_chat_directory
from tests.masked import LETTERS
from tests.representatives import representatives
from tests.running import Colotrain, losses

transformers = pytest.importorskip("transformers")
NAMES = ("O", "B-PER", "I-PER")
SETTINGS = (
    *("model.hf=model", "data.path=words.jsonl", "data.seq_len=24", "train.eval_steps=all"),
    "data.validation_fraction=0.2",
    *("train.objective=classify_tokens", "train.global_batch=8", "train.micro_batch=1"),
    *("cluster.procs_per_node=2", "optim.lr=0.01"),
)
DESCENT = ("optim.name=sgd", "optim.betas=[0.0]", "optim.weight_decay=0", "train.grad_clip=null")


def write_words(path: Path, count: int, *, seed: int) -> list[dict[str, Any]]:
    """Records of one word to five, so that micro-batches have different numbers of labels: a
    seventh of them none."""
    draw, found = random.Random(seed), list[dict[str, Any]]()
    for number in range(count):
        words = ["".join(draw.choices(LETTERS.strip(), k=draw.randint(1, 4))) for _ in range(5)]
        words = words[: draw.randint(1, 5)]
        found.append({"tokens": words, "ner_tags": [draw.choice(NAMES) for _ in words]})
        if number % 7 == 6:
            found[-1]["ner_tags"] = [-100 for _ in words]
    path.write_text("".join(json.dumps(record) + "\n" for record in found))
    return found


def make_model(folder: Path, kind: str) -> None:
    """A classifier of words whose classes have an order that is not the alphabet's."""
    if kind == "llama":
        make_chat_directory(folder)
        causal = transformers.AutoModelForCausalLM.from_pretrained(folder)
        config: Any = causal.config
        architecture = transformers.LlamaForTokenClassification
    else:
        from tests.embedders import make_embedder

        config = transformers.AutoConfig.from_pretrained(make_embedder(folder, pooling=False))
        architecture = transformers.BertForTokenClassification
    config.id2label = dict(enumerate(NAMES))
    config.label2id = {name: number for number, name in enumerate(NAMES)}
    config.pad_token_id = 0
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    config.classifier_dropout = 0.0
    architecture(config).save_pretrained(folder)


def example_batch(folder: Path, records: list[dict[str, Any]]) -> dict[str, Tensor]:
    """A batch as transformers' run_ner.py makes it."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rows = []
    for record in records:
        encoded = tokenizer(record["tokens"], is_split_into_words=True)
        labels, previous = [], None
        for word in encoded.word_ids():
            is_first = word is not None and word != previous
            tag = record["ner_tags"][word] if is_first else -100
            labels.append(-100 if tag == -100 else NAMES.index(tag))
            previous = word
        ids = encoded["input_ids"]
        rows.append({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels})
    longest = max(len(row["input_ids"]) for row in rows)
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {
        name: torch.tensor([row[name] + [pad] * (longest - len(row[name])) for row in rows])
        for name, pad in fill.items()
    }


@pytest.mark.parametrize("kind", representatives(["bert", "llama"], kept=["bert"]))
def test_a_step_is_that_of_transformers_example(colotrain: Colotrain, kind: str) -> None:
    """Eight records are the step; ranks and micro-batches have other numbers of labels."""
    folder = colotrain.cwd / "model"
    make_model(folder, kind)
    records = write_words(colotrain.cwd / "train.jsonl", 8, seed=5)
    held = write_words(colotrain.cwd / "validation.jsonl", 6, seed=6)
    words = (*SETTINGS, *DESCENT, "data.path=train.jsonl", "data.validation_path=validation.jsonl")
    words = (*words, "optim.lr=1", "optim.schedule.name=constant", "train.max_steps=1")
    found = colotrain.run(*words, "name=run", "plugin=zero3", "train.eval_every=1")
    model = transformers.AutoModelForTokenClassification.from_pretrained(folder).double()
    output = model(**example_batch(folder, records))
    assert losses(found) == pytest.approx([output.loss.item()], abs=1e-6)
    output.loss.backward()
    result = colotrain("export", "run", "--to", "out", "--check")
    assert result.code == 0, result.out + result.err
    trained = load_file(colotrain.cwd / "out/model.safetensors")
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            wanted = parameter.detach() - parameter.grad
            assert (trained[name].double() - wanted).abs().max().item() < 1e-6, name
    own = transformers.AutoModelForTokenClassification.from_pretrained(colotrain.cwd / "out")
    assert own.config.id2label == dict(enumerate(NAMES))
    batch = example_batch(colotrain.cwd / "out", held)
    with torch.no_grad():
        output = own(**batch)
    counted = batch["labels"] != -100
    right = (output.logits.argmax(-1) == batch["labels"])[counted].double().mean().item()
    assert found["metrics"]["accuracy"] == pytest.approx(right, abs=1e-9)
    assert found["validation_loss"] == pytest.approx(output.loss.item(), abs=1e-5)


def verified(colotrain: Colotrain, *words: str) -> None:
    result = colotrain("verify", *SETTINGS, *words, "--freeze", "none", "--json")
    assert result.code == 0, result.out + result.err
    # verify's limit is 1e-6 of the largest gradient, which is above 1 here
    assert all(0.0 < case["max_abs_gradient"] < 1e-5 for case in result.json["cases"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_every_plugin_and_division_has_the_same_steps(colotrain: Colotrain, kind: str) -> None:
    make_model(colotrain.cwd / "model", kind)
    write_words(colotrain.cwd / "words.jsonl", 60, seed=7)
    options = ("--world-sizes", "1,2", "--accumulation", "1,4", "--plugins", ",".join(ROWS))
    verified(colotrain, *DESCENT, *options)


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [False, True])
def test_a_new_head_is_resumed_and_exported(colotrain: Colotrain, adapter: bool) -> None:
    make_chat_directory(colotrain.cwd / "model")
    write_words(colotrain.cwd / "words.jsonl", 60, seed=8)
    lora = ("adapter.name=lora", "adapter.targets=[q_proj]") if adapter else ()
    rules = "optim.rules=[{match: 'score.*', lr_scale: 10.0}]"
    words = (*SETTINGS, *lora, rules, "train.max_steps=4", "checkpoint.every=2", "name=run")
    found = colotrain.run(*words, "checkpoint.keep=9", "train.eval_every=2")
    assert 0.0 <= found["metrics"]["accuracy"] <= 1.0
    shutil.rmtree(colotrain.rundir("run").checkpoint(4))
    again = colotrain.resume("run")
    assert losses(again)[-2:] == losses(found)[-2:]
    assert again["metrics"] == found["metrics"]
    renamed = "train.classify_tokens.classes=[I-PER,O,B-PER]"
    other = colotrain("resume", "run", "train.max_steps=6", renamed)
    assert "its head knows B-PER, I-PER, O, not I-PER, O, B-PER" in other.err
    alone = ("--adapter",) if adapter else ()
    result = colotrain("export", "run", "--to", "out", "--check", *alone)
    assert result.code == 0, result.out + result.err
    if adapter:
        settings = json.loads((colotrain.cwd / "out/adapter_config.json").read_text())
        assert (settings["task_type"], settings["modules_to_save"]) == ("TOKEN_CLS", ["score"])
        return
    config = json.loads((colotrain.cwd / "out/config.json").read_text())
    assert config["architectures"] == ["LlamaForTokenClassification"]
    assert [*config["id2label"].values()] == ["B-PER", "I-PER", "O"]


def test_what_is_no_data_of_words_is_said_at_once(colotrain: Colotrain) -> None:
    make_model(colotrain.cwd / "model", "bert")
    write_words(colotrain.cwd / "words.jsonl", 20, seed=9)
    result = colotrain("plan", *SETTINGS, "train.loss=mine:fn", "data.packing=stream")
    assert result.code == 2
    for key in ("train.loss", "data.packing"):
        assert key in result.err
    result = colotrain("plan", *SETTINGS, "data.tokenizer=bytes")
    assert result.code == 2
    assert "expected the tokenizer of a directory" in result.err
    (colotrain.cwd / "words.jsonl").write_text('{"tokens": ["a"], "ner_tags": ["B-LOC"]}\n' * 9)
    result = colotrain("plan", *SETTINGS)
    assert result.code == 2
    assert "B-LOC is none of its classes: O, B-PER, I-PER" in result.err
    assert "train.classify_tokens.classes" in result.err
