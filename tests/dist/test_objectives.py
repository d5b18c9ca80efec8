"""Losses of the user's own: what `train.loss` returns is what is trained on, under every plugin."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.dist.hf import make_directory
from tests.running import Colotrain, losses

PROGRAM = """
import torch
from torch import nn
from torch.nn import functional

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x):
        return {"logits": self.outer(torch.tanh(self.inner(x)))}

def weighted(batch, outputs):
    each = functional.cross_entropy(outputs["logits"], batch["labels"], reduction="none")
    return (each * batch["weight"]).sum(), batch["weight"].sum()

def mean(batch, outputs):
    return functional.cross_entropy(outputs["logits"], batch["labels"])

def several(batch, outputs):
    return outputs["logits"]

def samples(split="train"):
    draw = torch.Generator().manual_seed(1 if split == "train" else 2)
    x, weight = torch.randn(48, 6, generator=draw), torch.rand(48, generator=draw)
    return [{"x": r, "labels": r[:3].argmax(), "weight": w} for r, w in zip(x, weight)]

def next_token(batch, outputs):
    labels = batch["labels"]
    logits = outputs.logits.flatten(0, 1)
    loss = functional.cross_entropy(logits, labels.flatten(), reduction="sum")
    return loss, (labels != -100).sum()

def pairs(split="train"):
    draw = torch.Generator().manual_seed(5)
    source = torch.randint(3, 40, (24, 7), generator=draw)
    found = []
    for index, row in enumerate(source):
        labels = row.flip(0)[:5].clone()
        labels[2 + index % 4 :] = -100
        found.append({"input_ids": row, "labels": labels})
    return found
"""
SETTINGS = (
    "model.target=objectives_mine:Net",
    "data.target=objectives_mine:samples",
    "data.shuffle=false",
    "train.global_batch=12",
    "train.micro_batch=3",
    "train.max_steps=6",
    "train.eval_steps=0",
    "train.grad_clip=null",
    "optim.name=sgd",
    "optim.momentum=0",
    "optim.weight_decay=0",
    "optim.schedule.name=constant",
    "optim.lr=0.5",
    "cluster.procs_per_node=2",
)


@pytest.fixture
def mine(colotrain: Colotrain) -> dict[str, Any]:
    (colotrain.cwd / "objectives_mine.py").write_text(PROGRAM)
    scope: dict[str, Any] = {}
    exec(PROGRAM, scope)
    return scope


def initial(colotrain: Colotrain, scope: dict[str, Any], *words: str) -> Any:
    """The model of the run as it began, whose values come from torch's generator and the seed."""
    from colotrain.models.loading import build
    from colotrain.spec.plan import ModelPlan

    model = scope["Net"]()
    given = build(ModelPlan(target="tests.dist.test_objectives:make"), seed=0)
    model.load_state_dict(given.state_dict())
    return model


def make() -> Any:
    scope: dict[str, Any] = {}
    exec(PROGRAM, scope)
    return scope["Net"]()


def plain_losses(scope: dict[str, Any], model: Any) -> list[float]:
    found, samples = [], scope["samples"]()
    for step in range(6):
        rows = [samples[(12 * step + i) % len(samples)] for i in range(12)]
        batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        logits = model(batch["x"])["logits"]
        each = functional.cross_entropy(logits, batch["labels"], reduction="none")
        loss = (each * batch["weight"]).sum() / batch["weight"].sum()
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.5 * parameter.grad
        found.append(loss.item())
    return found


def test_a_sum_and_a_count_are_weighted_over_the_whole_global_batch(
    colotrain: Colotrain, mine: dict[str, Any]
) -> None:
    summary = colotrain.run(*SETTINGS, "train.loss=objectives_mine:weighted", "plugin=zero3")
    expected = plain_losses(mine, initial(colotrain, mine))
    assert losses(summary) == pytest.approx(expected, abs=2e-6)
    assert expected[0] - expected[-1] > 0.01


def test_what_only_the_loss_takes_is_not_cast(colotrain: Colotrain, mine: dict[str, Any]) -> None:
    (colotrain.cwd / "heavy.py").write_text(
        "import objectives_mine\n"
        "def samples():\n"
        "    return [{**s, 'weight': 0 * s['weight'] + 1e5} for s in objectives_mine.samples()]\n"
    )
    words = ("train.loss=objectives_mine:weighted", "data.target=heavy:samples", "name=heavy")
    colotrain.run(*SETTINGS, *words, "train.precision=fp16")  # which has no 1e5
    notes = [e.fields["text"] for e in colotrain.events("heavy") if e.kind == "note"]
    assert [text for text in notes if "casts x to float16 before forward" in text]


def test_verify_calls_the_same_function_under_every_plugin(
    colotrain: Colotrain, mine: dict[str, Any]
) -> None:
    for loss in ("weighted", "mean"):
        words = (*SETTINGS, f"train.loss=objectives_mine:{loss}", "train.micro_batch=null")
        result = colotrain("verify", *words, "--world-sizes", "2", "--json")
        assert result.code == 0, result.out + result.err
        cases = result.json["cases"]
        assert len({case["plugin"] for case in cases}) == 5
        assert max(case["max_abs_gradient"] for case in cases) < 1e-6


def test_a_wrong_loss_is_said(colotrain: Colotrain, mine: dict[str, Any]) -> None:
    result = colotrain("run", *SETTINGS, "train.loss=objectives_mine:several")
    assert result.code == 1
    assert "train.loss=objectives_mine:several returned a tensor of shape (3, 3)" in result.err
    result = colotrain("run", *SETTINGS, "train.loss=objectives_mine:severe")
    assert result.code == 2
    assert "train.loss=objectives_mine:severe" in result.err
    assert "did you mean several" in result.err


def test_a_hugging_face_model_takes_a_loss_of_ones_own(
    colotrain: Colotrain, mine: dict[str, Any], tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    make_directory("llama", tmp_path / "llama")
    words = (
        f"model.hf={tmp_path / 'llama'}",
        "data.target=objectives_mine:pairs",
        *SETTINGS[2:],
        "data.args={}",
    )
    given = tuple(w for w in words if not w.startswith("data.args"))
    (colotrain.cwd / "objectives_mine.py").write_text(PROGRAM.replace("[:5].clone()", ".clone()"))
    by_itself = colotrain.run(*given, "name=by-itself", "plugin=zero3")
    own = colotrain.run(*given, "train.loss=objectives_mine:next_token", "name=own", "plugin=zero3")
    assert losses(own) == pytest.approx(losses(by_itself), abs=1e-6)


def test_an_encoder_decoder_gets_its_decoder_inputs_from_the_labels(
    colotrain: Colotrain, mine: dict[str, Any], tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=48, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0
    )
    config.decoder_start_token_id = config.pad_token_id
    model = transformers.T5ForConditionalGeneration(config)
    model.save_pretrained(tmp_path / "t5")
    summary = colotrain.run(
        f"model.hf={tmp_path / 't5'}",
        "data.target=objectives_mine:pairs",
        *SETTINGS[2:],
        "train.loss=objectives_mine:next_token",
        "train.max_steps=1",
        "plugin=zero2",
        "name=t5",
    )
    rows = mine["pairs"]()[:12]
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    expected = model(**batch).loss.item()  # transformers' own mean over labels that are not -100
    assert losses(summary) == pytest.approx([expected], abs=1e-5)


def test_a_loss_that_was_changed_in_a_run_directory_is_not_called(
    colotrain: Colotrain, mine: dict[str, Any]
) -> None:
    colotrain.run(*SETTINGS, "train.loss=objectives_mine:weighted", "name=own", "plugin=zero1")
    rundir = colotrain.rundir("own")
    plan = json.loads(rundir.plan_file.read_text())
    plan["model"]["loss"] = "os:system"
    rundir.plan_file.write_text(json.dumps(plan))
    result = colotrain("resume", "own")
    assert result.code == 2
    assert " train.loss=os:system " in result.err
    assert result.err.endswith(" train.loss=objectives_mine:weighted\n")
