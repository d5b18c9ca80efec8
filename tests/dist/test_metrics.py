"""What a model returns beside its loss is averaged over the validation data."""

from __future__ import annotations

import json

import pytest
import torch

from tests.representatives import representatives
from tests.running import Colotrain, losses

PROGRAM = """
import torch
from torch import nn

class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 32), nn.Linear(32, 3)

    def forward(self, x, labels):
        logits = self.outer(torch.tanh(self.inner(x)))
        right = (logits.argmax(-1) == labels).float()
        of_first = labels == 0
        return {
            "loss": nn.functional.cross_entropy(logits, labels),
            "logits": logits,
            "accuracy": right.mean(),
            "recall": (right[of_first].sum(), of_first.sum()),
        }

class LossAlone(Classifier):
    def forward(self, x, labels):
        return super().forward(x, labels)["loss"]

def samples(split="train"):
    draw = torch.Generator().manual_seed(1 if split == "train" else 2)
    x = torch.randn(64, 6, generator=draw)
    return [{"x": row, "labels": row[:3].argmax()} for row in x]
"""
SETTINGS = (
    "data.target=metrics_mine:samples",
    "train.global_batch=16",
    "train.micro_batch=4",
    "train.max_steps=20",
    "train.eval_every=10",
    "train.eval_steps=4",
    "optim.lr=0.02",
    "cluster.procs_per_node=2",
)


@pytest.mark.parametrize("plugin", representatives(["zero2", "zero3"], kept=["zero3"]))
def test_metrics_of_the_last_evaluation_are_those_of_the_exported_model(
    colotrain: Colotrain, plugin: str
) -> None:
    (colotrain.cwd / "metrics_mine.py").write_text(PROGRAM)
    plain = colotrain.run(
        *SETTINGS, "model.target=metrics_mine:LossAlone", f"plugin={plugin}", "name=plain"
    )
    result = colotrain(
        "run", *SETTINGS, "model.target=metrics_mine:Classifier", f"plugin={plugin}", "name=full"
    )
    assert result.code == 0, result.err
    summary = json.loads(colotrain.rundir("full").summary_file.read_text())
    assert losses(summary) == losses(plain)
    assert "metrics" not in plain
    exported = colotrain("export", "full", "--to", "weights")
    assert exported.code == 0, exported.err
    from safetensors.torch import load_file

    scope: dict = {}
    exec(PROGRAM, scope)
    model = scope["Classifier"]()
    (file,) = (colotrain.cwd / "weights").glob("*.safetensors")
    model.load_state_dict(load_file(file))
    batch = scope["samples"]("validation")
    x, labels = (torch.stack([sample[name] for sample in batch]) for name in ("x", "labels"))
    with torch.no_grad():
        whole = model(x, labels)
    right, number = whole["recall"]
    assert summary["metrics"]["accuracy"] == pytest.approx(whole["accuracy"].item(), abs=1e-6)
    assert summary["metrics"]["recall"] == pytest.approx((right / number).item(), abs=1e-6)
    assert summary["validation_loss"] == pytest.approx(whole["loss"].item(), rel=1e-5)
    (event,) = (e for e in colotrain.events("full") if e.kind == "eval" and e.fields["step"] == 20)
    assert set(event.fields["metrics"]) == {"accuracy", "recall"}
    (line,) = (s for s in result.err.splitlines() if s.startswith("event=eval step=20"))
    assert f"accuracy={whole['accuracy'].item():.6g} recall=" in line


def test_verify_takes_the_loss_of_a_dict(colotrain: Colotrain) -> None:
    (colotrain.cwd / "metrics_mine.py").write_text(PROGRAM)
    words = (*SETTINGS, "model.target=metrics_mine:Classifier", "plugin=zero2")
    result = colotrain("verify", *words, "--plugins", "zero2", "--world-sizes", "2")
    assert result.code == 0, result.out + result.err


def test_the_checkpoint_of_the_best_evaluation_is_kept_also_across_a_resume(
    colotrain: Colotrain,
) -> None:
    (colotrain.cwd / "metrics_mine.py").write_text(PROGRAM + RISING)
    words = (
        *SETTINGS,
        "model.target=metrics_mine:Scripted",
        "train.eval_every=2",
        "checkpoint.keep=1",
        "checkpoint.best.metric=score",
        "checkpoint.best.mode=max",
        "plugin=zero3",
    )
    colotrain.run(*words, "name=best", "train.max_steps=12")
    rundir = colotrain.rundir("best")
    kept = sorted(path.name for path in rundir.checkpoints.glob("step-*"))
    assert kept == ["step-00000006", "step-00000012"]
    marked = [e.fields["step"] for e in colotrain.events("best") if e.fields.get("best")]
    assert marked == [2, 4, 6]
    colotrain.resume("best", "train.max_steps=16")
    kept = sorted(path.name for path in rundir.checkpoints.glob("step-*"))
    assert kept == ["step-00000006", "step-00000016"]
    rows = colotrain("checkpoints", "best", "--json").json
    assert {row["step"]: row["best"] for row in rows} == {16: False, 6: True}
    wrong = colotrain("run", *words, "name=wrong", "checkpoint.best.metric=bleu")
    assert wrong.code == 2
    assert "checkpoint.best.metric=bleu: the evaluation has no such value" in wrong.err
    assert "name one of validation_loss, accuracy, recall, score" in wrong.err


RISING = """

class Scripted(Classifier):
    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x, labels):
        if self.training:
            self.steps += 0.5  # two micro-batches a step
        return {**super().forward(x, labels), "score": -(self.steps - 6).abs()}
"""
