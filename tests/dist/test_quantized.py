"""Runs over packed weights: those of plain torch on what the blocks stand for, in and out."""

from __future__ import annotations

from typing import Any

import pytest

from colotrain.cli.main import guarded
from colotrain.spec.plugins import ROWS
from colotrain.verify import runner
from tests.dist.hf import GPT_OSS, make_chat_directory, make_directory, store_quantized
from tests.representatives import half_of_the_day, representatives
from tests.running import SMALL, Colotrain, losses

pytest.importorskip("transformers")
OF_BYTES = {"vocab_size": 256, "max_position_embeddings": 64}
LORA = ("model.quantize=nf4", "adapter.name=lora", "optim.lr=0.01")
OF_LLM = (*SMALL, *LORA, "adapter.targets=[query,value,down]")
OF_LLAMA = ("model.hf=model", *LORA, "adapter.targets=[q_proj,down_proj]", "data.corpus=stdlib")
OF_LLAMA = (*OF_LLAMA, "data.tokenizer=bytes", "data.seq_len=32", "train.global_batch=8")
WHOLE_BLOCKS = ("model.args.d_model=128", "model.args.d_hidden=256")
"""Sizes with which halves of a row have whole blocks of 64."""
LEVEL = "optim.schedule.name=constant"
OF_LLAMA = (*OF_LLAMA, "train.micro_batch=2", "train.eval_steps=1", "cluster.procs_per_node=2")


@pytest.fixture
def tuned(colotrain: Colotrain) -> Colotrain:
    make_directory("llama", colotrain.cwd / "model", **OF_BYTES)
    return colotrain


@pytest.mark.parametrize("kind", representatives(["llm", "llama"], kept=["llama"]))
def test_verify_compares_with_plain_torch_on_whole_weights(tuned: Colotrain, kind: str) -> None:
    words = OF_LLM if kind == "llm" else OF_LLAMA
    options = ("--world-sizes", "2", "--plugins", ",".join(ROWS), "--accumulation", "4")
    result = tuned("verify", *words, *options, "--steps", "2", "--json")
    assert result.code == 0, result.out + result.err
    assert 0.0 < max(case["max_abs_gradient"] for case in result.json["cases"]) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("scheme", half_of_the_day(["int8", "mxfp4"]))
def test_verify_and_exports_of_other_schemes(tuned: Colotrain, scheme: str) -> None:
    words = (*OF_LLAMA, f"model.quantize={scheme}", "train.max_steps=2")
    options = ("--world-sizes", "2", "--plugins", "zero2,zero3", "--accumulation", "2", "--json")
    result = tuned("verify", *words, *options)
    assert result.code == 0, result.out + result.err
    tuned.run(*words, "plugin=zero3", "name=rows")
    for flags in ((), ("--adapter",)):
        result = tuned("export", "rows", "--to", f"out{len(flags)}", *flags, "--check")
        assert result.code == 0, result.out + result.err


@pytest.mark.slow
@pytest.mark.parametrize("method", ["mxfp4", "nf4"])
def test_verify_and_exports_of_what_is_stored_quantized(colotrain: Colotrain, method: str) -> None:
    folder, words = colotrain.cwd / "model", (*OF_LLAMA, f"model.quantize={method}")
    if method == "mxfp4":  # ranks divide the packed experts, and their adapters
        make_chat_directory(folder, "gpt_oss", **{**GPT_OSS, "num_local_experts": 4})
        words = (*words, "mesh.ep=2")
        words = (*words, "adapter.targets=[q_proj]", "adapter.parameters=[gate_up_proj,down_proj]")
    else:
        make_directory("llama", folder, **OF_BYTES)
    store_quantized(folder, method)
    options = ("--world-sizes", "2", "--plugins", "zero3", "--accumulation", "2", "--json")
    result = colotrain("verify", *words, *options, "--steps", "2")
    assert result.code == 0, result.out + result.err
    assert 0.0 < max(case["max_abs_gradient"] for case in result.json["cases"]) < 1e-6
    colotrain.run(*words, "plugin=zero3", "name=stored", "train.max_steps=2", LEVEL)
    rest = losses(colotrain.resume("stored", "train.max_steps=4"))
    assert rest == losses(
        colotrain.run(*words, "plugin=zero3", "name=four", "train.max_steps=4", LEVEL)
    )
    for flags in ((), ("--adapter",)):
        to = f"out{len(flags)}"
        result = colotrain("export", "stored", "--to", to, *flags, "--check", "--json")
        assert result.code == 0, result.out + result.err
    held = result.json["receipt"]["base_quantized"]
    assert set(held.values()) == {f"{method} of float32"}
    stacks = [name for name in held if name.endswith(("experts.down_proj", "experts.gate_up_proj"))]
    assert len(stacks) == (4 if method == "mxfp4" else 0)
    assert "quantization_config" not in (colotrain.cwd / "out0" / "config.json").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ("train.precision=bf16",),
        ("train.precision=fp16",),
        ("mesh.cp=2",),
        ("mesh.pp=2",),
        ("mesh.tp=2", *WHOLE_BLOCKS),
        ("mesh.tp=2", *WHOLE_BLOCKS, "model.quantize=int8", "adapter.name=dora"),
        ("adapter.name=dora",),
        ("adapter.name=dora", "adapter.dropout=0.2", "train.activation_checkpointing=full"),
    ],
)
def test_verify_passes_in_half_precision_and_with_other_axes(
    tuned: Colotrain, more: tuple[str, ...]
) -> None:
    options = ("--world-sizes", "2", "--plugins", "zero3", "--accumulation", "2", "--json")
    result = tuned("verify", *OF_LLM, *more, *options)
    assert result.code == 0, result.out + result.err


@pytest.mark.parametrize("plugin", representatives(["zero2", "gemini"], kept=["gemini"]))
def test_a_wrong_scale_of_one_block_is_found_by_name(
    plugin: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "WORKER", "tests.dist.mutants.scales_a_block_wrong")
    assert guarded(["verify", *OF_LLM, "--plugins", plugin, "--steps", "1"]) == 4
    assert "initial value of blocks.1.mlp.up.weight" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutant", "named"),
    [
        ("scales_an_experts_block_wrong", "initial value of model.layers.1.mlp.experts.down_proj"),
        ("swaps_experts", "gradient of model.layers.0.self_attn.q_proj.lora_B.weight"),
    ],
)
def test_wrong_experts_are_found_by_name(
    tuned: Colotrain,
    mutant: str,
    named: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tuned.cwd / "oss"
    make_chat_directory(folder, "gpt_oss", **GPT_OSS)
    store_quantized(folder, "mxfp4")
    monkeypatch.setattr(runner, "WORKER", f"tests.dist.mutants.{mutant}")
    words = [*OF_LLAMA, f"model.hf={folder}", "model.quantize=mxfp4", "adapter.targets=[q_proj]"]
    assert guarded(["verify", *words, "--plugins", "zero2", "--steps", "2"]) == 4
    assert named in capsys.readouterr().err


def test_dora_whose_scale_counts_twice_is_found_by_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "WORKER", "tests.dist.mutants.scales_dora_twice")
    words = [*OF_LLM, "adapter.name=dora", "adapter.alpha=6"]
    assert guarded(["verify", *words, "--plugins", "zero2", "--steps", "2"]) == 4
    assert "gradient of blocks.0.attention.query.lora_" in capsys.readouterr().err


def test_a_run_resumes_and_its_exports_are_what_was_trained(tuned: Colotrain) -> None:
    words = (*OF_LLAMA, "checkpoint.content=trained", "optim.schedule.name=constant")
    whole = losses(tuned.run(*words, "plugin=zero3", "name=whole", "train.max_steps=4"))
    tuned.run(*words, "plugin=zero3", "name=half", "train.max_steps=2")
    rest = tuned.resume("half", "train.max_steps=4", "plugin=gemini")
    assert losses(rest) == pytest.approx(whole, abs=1e-6)
    other = tuned("resume", "half", "train.max_steps=5", "model.quantize=int8")
    assert other.code == 2
    assert "began with another model" in other.err
    for flags in ((), ("--adapter",)):
        to = "adapter" if flags else "merged"
        result = tuned("export", "half", "--to", to, *flags, "--check", "--json")
        assert result.code == 0, result.out + result.err
        receipt: dict[str, Any] = result.json["receipt"]
        assert bool(receipt["base_quantized"]) is bool(flags)
    again = tuned("export", "adapter", "--check", "--trust-code")
    assert again.code == 0, again.out + again.err


@pytest.mark.slow
@pytest.mark.parametrize("content", ["all", "trained"])
def test_an_own_model_resumes_on_other_ranks_and_exports(
    colotrain: Colotrain, content: str
) -> None:
    words = (*OF_LLM, f"checkpoint.content={content}", "train.max_steps=2", "plugin=zero2")
    colotrain.run(*words, "name=half")
    found = colotrain.resume("half", "train.max_steps=4", "cluster.procs_per_node=1")
    assert len(losses(found)) == 4
    result = colotrain("export", "half", "--to", "out", "--check")
    assert result.code == 0, result.out + result.err


@pytest.mark.slow
def test_the_plan_counts_packed_bytes(colotrain: Colotrain) -> None:
    """It is 10 % too high here: malloc keeps less of what unpacking frees than is planned."""
    sizes = ("model.args.d_model=512", "model.args.d_hidden=2048", "model.args.num_layers=8")
    words = (*OF_LLM, *sizes, "plugin=zero3", "cluster.procs_per_node=1", "train.max_steps=2")
    memory = colotrain.run(*words, "train.eval_steps=0", "name=planned")["memory"]
    assert memory["measured_peak"] == pytest.approx(memory["predicted_peak"], rel=0.12)
    assert memory["measured"]["parameters"] == memory["ledger"]["parameters"]
