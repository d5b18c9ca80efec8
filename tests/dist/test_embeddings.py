"""Embeddings are those of plain torch, in which every text of a global batch is a candidate."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from colotrain.rundir import read_json
from colotrain.spec.plugins import ROWS
from tests.embedders import make_embedder, write_modules, write_related
from tests.representatives import representatives
from tests.running import Colotrain, losses

transformers = pytest.importorskip("transformers")
EMBED = (
    "model.hf=model",
    "data.path=related.jsonl",
    "data.seq_len=20",
    "train.objective=embed",
    "train.embed.scale=10",
    "train.global_batch=8",
    "train.micro_batch=2",
    "train.eval_steps=all",
    "cluster.procs_per_node=2",
    "optim.lr=0.01",
)
LORA = ("adapter.name=lora", "adapter.targets=[q_proj,down_proj]")


def prepared(colotrain: Colotrain, kind: str = "bert", *, negatives: bool = False) -> Colotrain:
    make_embedder(colotrain.cwd / "model", kind)
    write_related(colotrain.cwd / "related.jsonl", 60, negatives=negatives)
    return colotrain


def verified(colotrain: Colotrain, *words: str, limit: float = 1e-6) -> None:
    result = colotrain("verify", *EMBED, *words, "--freeze", "none", "--json")
    assert result.code == 0, result.out + result.err
    assert 0.0 < max(case["max_abs_gradient"] for case in result.json["cases"]) < limit


@pytest.mark.parametrize("kind", representatives(["bert", "qwen3"], kept=["bert"]))
def test_verify_compares_with_the_whole_batch_in_plain_torch(
    colotrain: Colotrain, kind: str
) -> None:
    """Positives of another sample, or negatives of one rank or micro-batch only, are found here."""
    more = ("train.embed.negatives=true", *LORA) if kind == "qwen3" else ()
    options = ("--world-sizes", "2", "--accumulation", "2", "--plugins", "zero2")
    limit = 2e-5 if more else 1e-6  # small values, which Qwen's norms enlarge, and in float32 only
    verified(prepared(colotrain, kind, negatives=bool(more)), *more, *options, limit=limit)


@pytest.mark.slow
def test_every_plugin_and_division_has_the_same_steps(colotrain: Colotrain) -> None:
    options = ("--world-sizes", "1,2", "--accumulation", "1,4", "--plugins", ",".join(ROWS))
    sgd = ("optim.name=sgd", "optim.betas=[0.0]")
    verified(prepared(colotrain), *sgd, *options, limit=1e-5)  # rounding, times the scale of 10


def test_a_resumed_run_goes_on_bit_for_bit_and_its_export_gives_the_same_vectors(
    colotrain: Colotrain,
) -> None:
    """Dropout drops the same in the pass before a step and in the step itself."""
    words = (*EMBED, "plugin=zero3", "train.max_steps=6", "train.eval_every=3")
    words = (*words, "checkpoint.every=3", "checkpoint.keep=9")
    whole = prepared(colotrain).run(*words, "name=whole")
    found = losses(whole)
    assert 0.0 <= whole["metrics"]["accuracy"] <= 1.0
    shutil.rmtree(colotrain.rundir("whole").checkpoint(6))
    again = colotrain.resume("whole")
    assert losses(again)[-3:] == found[-3:]
    assert again["metrics"] == whole["metrics"]
    result = colotrain("export", "whole", "--to", "out", "--check")
    assert result.code == 0, result.out + result.err
    before, after = (read_json(colotrain.cwd / name / "config.json") for name in ("model", "out"))
    assert before.get("use_cache") == after.get("use_cache")
    receipt = json.loads((colotrain.cwd / "out/receipt.json").read_text())
    assert receipt["validation_loss"]["export"] == pytest.approx(
        receipt["validation_loss"]["run"], abs=1e-5
    )
    assert "1_Pooling/config.json" in receipt["files"]
    model, told = transformers.AutoModel.from_pretrained(
        colotrain.cwd / "out", output_loading_info=True
    )
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    base = load_file(colotrain.cwd / "model/model.safetensors")
    trained: Any = model.get_input_embeddings().weight
    assert not torch.equal(trained, base["embeddings.word_embeddings.weight"])


@pytest.mark.slow
def test_adapters_of_a_decoder_are_exported(colotrain: Colotrain) -> None:
    pytest.importorskip("peft")
    words = (*EMBED, *LORA, "train.embed.negatives=true", "train.max_steps=4", "plugin=zero2")
    prepared(colotrain, "qwen3", negatives=True).run(*words, "name=lora", "accumulate.steps=2")
    for options in ((), ("--adapter",)):
        shutil.rmtree(colotrain.cwd / "out", ignore_errors=True)
        result = colotrain("export", "lora", "--to", "out", *options, "--check")
        assert result.code == 0, result.out + result.err
        receipt = json.loads((colotrain.cwd / "out/receipt.json").read_text())
        assert receipt["validation_loss"]["export"] is not None


def test_what_embeddings_exclude_is_said_at_once(colotrain: Colotrain) -> None:
    words = ("train.metrics=mine:fn", "data.isolate=true", "train.compile=true")
    words = (*words, "train.embed.scale=0", "train.embed.pooling=last")
    result = prepared(colotrain)("plan", *EMBED, *words)
    assert result.code == 2
    for word in words:
        assert word.partition("=")[0] in result.err
    assert "mean, as the files of model say" in result.err
    assert "head" not in result.err
    result = colotrain("plan", *EMBED, "data.tokenizer=bytes")
    assert result.code == 2
    assert "data.tokenizer=bytes: expected the tokenizer of a directory" in result.err
    result = colotrain(
        "plan", *EMBED, "train.global_batch=1", "train.micro_batch=1", "cluster.procs_per_node=1"
    )
    assert result.code == 2
    assert "train.global_batch=1: expected" in result.err
    write_modules(colotrain.cwd / "model", "mean_tokens", "Dense")
    result = colotrain("plan", *EMBED)
    assert result.code == 2
    assert "it has a Dense" in result.err
    (colotrain.cwd / "model/modules.json").unlink()
    result = colotrain("plan", *EMBED)
    assert result.code == 2
    assert "train.embed.pooling=auto: expected one of mean, last, cls" in result.err
    write_related(colotrain.cwd / "related.jsonl", 8, negatives=True)
    for advice in ("stop", "skip"):  # which would leave every record out
        words = ("train.embed.pooling=mean", f"data.on_bad={advice}")
        result = colotrain("run", *EMBED, *words)
        assert result.code == 2
        assert "set train.embed.negatives=true" in result.err
        assert "records without the column negative" in result.err
        assert "skip" not in result.err
