"""Losses, metrics and objectives where ranks have some of a model's blocks each."""

from __future__ import annotations

from json import loads
from pathlib import Path

import pytest

from colotrain.cli.main import guarded
from colotrain.verify import runner
from tests.dist import test_objectives_on_axes as on_axes
from tests.dist.hf import make_directory
from tests.dist.test_distillation import DISTILL
from tests.dist.test_masked import BERT_, MASKED, make
from tests.masked import write_texts
from tests.representatives import of_each_day
from tests.running import SMALL, Colotrain, losses

pytest.importorskip("transformers")
OWN = """
import torch

def loss(batch, outputs):
    labels = batch["labels"]
    counted = (labels != 32) & (labels != -100)  # no label of a space counts
    logs = outputs.logits.log_softmax(-1)
    each = -logs.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return (each * counted).sum(), counted.sum()

def mean(batch, outputs):
    labels = batch["labels"]
    logs = outputs.logits.log_softmax(-1)
    counted = labels != -7
    each = -logs.gather(-1, labels.where(counted, 0).unsqueeze(-1)).squeeze(-1)
    return each[counted].mean()

def metrics(batch, outputs):
    of_labels = outputs.logits.gather(-1, batch["labels"].clamp(min=0).unsqueeze(-1))
    right = of_labels.squeeze(-1) > outputs.logits.mean(-1)
    counted = batch["labels"] != -100
    return {
        "right": (right.sum(), counted.sum()),
        "share": right[counted].double().mean(),
        "size": (outputs.logits.double().mean((1, 2)) + batch["input_ids"][:, 0]).mean(),
    }

def samples(split="train"):
    draw = torch.Generator().manual_seed(3 if split == "train" else 4)
    found = []
    for index in range(40 if split == "train" else 9):
        ids = torch.randint(1, 250, (17,), generator=draw)
        labels = ids[1:].clone()
        labels[: index % 12] = IGNORED
        found.append({"input_ids": ids[:-1], "labels": labels})
    return found
"""
STAGED = {
    "one": ("cluster.procs_per_node=1",),
    "two": ("cluster.procs_per_node=2", "mesh.pp=2"),
    "chunks": ("cluster.procs_per_node=2", "mesh.pp=2", "mesh.pp_schedule=interleaved"),
    "four": ("cluster.procs_per_node=4", "mesh.pp=2", "train.micro_batch=1"),
}


@pytest.mark.parametrize(
    ("loss", "ignored", "kind"),
    [
        ("train.loss=staged:loss", -100, "chunks"),
        pytest.param("train.loss=staged:mean", -7, "two", marks=pytest.mark.slow),
        pytest.param("train.loss=null", -100, "two", marks=pytest.mark.slow),
        pytest.param("train.loss=null", -100, "four", marks=pytest.mark.slow),
    ],
)
def test_steps_and_evaluations_of_an_own_loss_are_those_of_one_process(
    loss: str, ignored: int, kind: str, colotrain: Colotrain
) -> None:
    sizes = {**on_axes.OF_BYTES, "num_hidden_layers": 4}
    made = make_directory("llama", colotrain.cwd / "model", **sizes)
    (colotrain.cwd / "staged.py").write_text(OWN.replace("IGNORED", str(ignored)))
    options = (f"model.hf={made}", "data.target=staged:samples", "train.metrics=staged:metrics")
    options += ("train.global_batch=8", "train.micro_batch=2", "train.max_steps=3", loss)
    options += ("train.eval_steps=all", "train.eval_every=2", "optim.name=sgd", "optim.lr=0.1")
    steps, evaluations = {}, {}
    for name in ("one", kind):
        found = colotrain.run(*options, "plugin=zero3", *STAGED[name], f"name={name}")
        steps[name] = losses(found)
        events = [e.fields for e in colotrain.events(name) if e.kind == "eval"]
        evaluations[name] = [{"loss": e["loss"], **e["metrics"]} for e in events]
    assert steps[kind] == pytest.approx(steps["one"], abs=1e-6)
    assert [*evaluations["one"][0]] == ["loss", "right", "share", "size"]
    assert len(evaluations["one"]) == 3
    for one, staged in zip(evaluations["one"], evaluations[kind], strict=True):
        assert staged == pytest.approx(one, rel=1e-5)


INTERLEAVED = "mesh.pp_schedule=interleaved"
OBJECTIVES = ("dpo", "kto", "orpo", "simpo", "reward", "classify", "classify_tokens")


@pytest.mark.parametrize("objective", of_each_day(OBJECTIVES, kept=["reward"]))
def test_verify_passes_where_two_stages_divide_the_model(
    objective: str, colotrain: Colotrain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(on_axes.OF_BYTES, "num_hidden_layers", 4)
    settings = on_axes.settings_of(objective, colotrain.cwd)
    options = ("--world-sizes", "2", "--pp", "2", "--plugins", "zero3", "--accumulation", "4")
    check(colotrain, *settings, INTERLEAVED, *options)


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["kto", "embed"])
def test_each_sample_knows_those_of_the_other_stages_ranks(
    objective: str, colotrain: Colotrain
) -> None:
    """Two ranks of the last stage exchange what the whole global batch says."""
    settings = on_axes.settings_of(objective, colotrain.cwd)
    options = ("--world-sizes", "4", "--pp", "2", "--plugins", "zero2", "--accumulation", "2")
    check(colotrain, *settings, *options)


@pytest.mark.slow
def test_a_student_on_two_stages_learns_as_on_one_process(colotrain: Colotrain) -> None:
    make_directory("llama", colotrain.cwd / "teacher", **on_axes.OF_BYTES)
    options = ("--world-sizes", "2", "--pp", "2", "--plugins", "zero3", "--accumulation", "4")
    check(colotrain, *SMALL, "model.args.num_layers=4", *DISTILL, INTERLEAVED, *options)


@pytest.mark.slow
def test_hidden_tokens_train_an_encoder_whose_head_shares_the_embedding(
    colotrain: Colotrain,
) -> None:
    """The head, on the last stage, has a bias beside the weight that the first stage has, too."""
    write_texts(colotrain.cwd / "text.jsonl", 120)
    made = make(BERT_, colotrain.cwd / "model")
    options = ("--world-sizes", "2", "--pp", "2", "--plugins", "zero1,gemini")
    check(colotrain, f"model.hf={made}", *MASKED, *options, "--accumulation", "4")


def check(colotrain: Colotrain, *words: str) -> None:
    result = colotrain("verify", *words, "--freeze", "none", "--steps", "2", "--json")
    assert result.code == 0, result.out + result.err
    assert all(case["max_abs_gradient"] > 0.0 for case in result.json["cases"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutant", ["takes_labels_of_another_micro_batch", "weighs_micro_batches_equally"]
)
def test_a_fault_of_the_last_stage_is_found(
    mutant: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner, "WORKER", f"tests.dist.mutants.{mutant}")
    monkeypatch.chdir(tmp_path)
    settings = on_axes.settings_of("classify_tokens", tmp_path)
    options = ("--world-sizes", "2", "--pp", "2", "--plugins", "zero3", "--accumulation", "4")
    guarded(["verify", *settings, *options, "--freeze", "none", "--steps", "2", "--json"])
    (case,) = loads(capsys.readouterr().out)["cases"]
    assert not case["passed"]
    assert "loss of step 1" in case["difference"]
