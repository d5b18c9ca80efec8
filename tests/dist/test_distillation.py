"""Distillation: that of plain torch with both models, and exact after a stop in the first pass."""

from __future__ import annotations

import time

import pytest

from colotrain.spec.plugins import ROWS
from tests.dist.hf import make_directory
from tests.masked import make_tokenizer
from tests.representatives import representatives
from tests.running import SMALL, Colotrain, losses

pytest.importorskip("transformers")
OF_BYTES = {"vocab_size": 256, "max_position_embeddings": 64}
DISTILL = ("train.objective=distill", "train.distill.teacher=teacher", "train.distill.top_k=8")
DISTILL = (*DISTILL, "train.distill.alpha=0.6", "train.distill.temperature=1.5")


@pytest.fixture
def taught(colotrain: Colotrain) -> Colotrain:
    make_directory("llama", colotrain.cwd / "teacher", **OF_BYTES)
    return colotrain


@pytest.mark.parametrize("kind", representatives(["llm", "llama"], kept=["llm"]))
def test_verify_compares_with_both_models_in_plain_torch(taught: Colotrain, kind: str) -> None:
    model, plugins = SMALL, "zero3"
    if kind == "llama":
        student = make_directory("llama", taught.cwd / "student", **OF_BYTES, intermediate_size=32)
        model = (f"model.hf={student}", "train.global_batch=8", "data.corpus=stdlib")
        model, plugins = (*model, "data.seq_len=32", "data.tokenizer=bytes"), ",".join(ROWS)
    options = ("--world-sizes", "2", "--plugins", plugins, "--accumulation", "2")
    result = taught("verify", *model, *DISTILL, *options, "--json")
    assert result.code == 0, result.out + result.err
    assert 0.0 < max(case["max_abs_gradient"] for case in result.json["cases"]) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("axes", [("--tp", "2"), ("--cp", "2"), ("--tp", "2", "--cp", "2")])
def test_verify_passes_where_ranks_divide_matrices_or_samples(
    taught: Colotrain, axes: tuple[str, ...]
) -> None:
    ranks = str(2 ** axes.count("2"))
    options = ("--world-sizes", ranks, "--plugins", "zero2", "--accumulation", "1,4", *axes)
    more = ("model.args.num_heads=4", "model.args.num_kv_heads=2")
    result = taught("verify", *SMALL, *more, *DISTILL, *options, "--json")
    assert result.code == 0, result.out + result.err
    assert max(case["max_abs_gradient"] for case in result.json["cases"]) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_verify_passes_in_half_precision(taught: Colotrain, precision: str) -> None:
    options = ("--world-sizes", "2", "--plugins", "zero3", "--accumulation", "2")
    result = taught("verify", *SMALL, *DISTILL, f"train.precision={precision}", *options, "--json")
    assert result.code == 0, result.out + result.err
    assert 1e-6 < max(case["max_abs_gradient"] for case in result.json["cases"]) < 0.1


@pytest.mark.slow
def test_the_plan_knows_the_teachers_pass(colotrain: Colotrain) -> None:
    """The teacher's weights, and their files while they are read, are most of a run's memory."""
    large = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4}
    make_directory("llama", colotrain.cwd / "teacher", **OF_BYTES, **large)
    words = (*SMALL, *DISTILL, "train.max_steps=1", "cluster.procs_per_node=1", "plugin=zero2")
    memory = colotrain.run(*words, "train.eval_steps=0", "name=taught")["memory"]
    assert memory["measured_peak"] == pytest.approx(memory["predicted_peak"], rel=0.1)
    plan = colotrain("plan", *words, "train.eval_steps=0")
    assert "is that of the teacher's pass" in " ".join(plan.out.split())


@pytest.mark.slow
def test_a_run_that_is_stopped_in_the_teachers_pass_continues_there(taught: Colotrain) -> None:
    words = (*SMALL, *DISTILL, "plugin=zero2", "train.micro_batch=1", "optim.lr=0.01")
    started = taught.start("run", *words, "name=long", "train.max_steps=3000")
    deadline = time.monotonic() + 120
    while not taught.rundir("long").events.is_dir() or not any(
        "are computed once" in str(event.fields) for event in taught.events("long")
    ):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert taught("stop", "long").code == 0
    started.communicate(timeout=120)
    assert started.returncode == 75
    assert not any(event.kind == "step" for event in taught.events("long"))
    found = losses(taught.resume("long", "train.max_steps=4"))
    words = (*words, "data.num_workers=1", "train.max_steps=4", "train.eval_every=2")
    whole = taught.run(*words, "name=whole")
    assert losses(whole) == found
    assert len([e for e in taught.events("whole") if e.kind == "eval"]) == 3


def test_what_cannot_teach_is_said_at_once(taught: Colotrain) -> None:
    def error(*words: str) -> str:
        result = taught("plan", *SMALL, *DISTILL, *words)
        assert result.code == 2
        return result.err

    assert "train.distill.teacher: expected a teacher" in error("train.distill.teacher=null")
    make_directory("llama", taught.cwd / "other")
    assert "expected a vocabulary of 256 tokens" in error("train.distill.teacher=other")
    assert "at least data.seq_len=65 positions" in error("data.seq_len=65")
    assert "train.distill.teacher" in error("train.distill.teacher=nowhere")
    assert "at most 256, the size of the vocabulary" in error("train.distill.top_k=300")
    found = error("train.loss=mine:fn", "train.distill.alpha=2")
    for key in ("train.loss", "train.distill.alpha"):
        assert f"error: {key}=" in found
    make_tokenizer(taught.cwd / "teacher")
    make_tokenizer(taught.cwd / "mine", "roberta")
    assert "(its tokenizer.json has others)" in error("data.tokenizer=mine")
