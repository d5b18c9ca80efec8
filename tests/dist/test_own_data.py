"""Batches, metrics, schedules and an early end of the user's own, against a plain torch loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from colotrain.engine.state.manifest import read_manifest
from tests.running import Colotrain, losses

PROGRAM = """
import torch
from torch import nn
from torch.nn import functional

class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 3)

    def forward(self, ids, mask):
        x = torch.tanh(self.embed(ids)) * mask[..., None]
        return self.head(x.sum(1) / mask.sum(1, keepdim=True))

def loss(batch, logits):
    return functional.cross_entropy(logits, batch["labels"], reduction="sum"), len(logits)

def accuracy(batch, logits):
    right = logits.argmax(-1) == batch["labels"]
    return {"accuracy": (right.sum(), len(logits)), "certainty": logits.softmax(-1).amax(-1).mean()}

def wrong_metrics(batch, logits):
    return {"validation_loss": 0.0}

def texts(split="train"):
    draw = torch.Generator().manual_seed(1 if split == "train" else 2)
    found = []
    for index in range(42 if split == "train" else 11):
        length = 2 + int(torch.randint(9, (), generator=draw))
        ids = torch.randint(20, (length,), generator=draw).tolist()
        found.append((ids, max(set(ids), key=ids.count) % 3))
    return found

def pad(samples):
    longest = max(len(ids) for ids, _ in samples)
    rows = [ids + [0] * (longest - len(ids)) for ids, _ in samples]
    mask = [[1.0] * len(ids) + [0.0] * (longest - len(ids)) for ids, _ in samples]
    labels = [label for _, label in samples]
    return {"ids": torch.tensor(rows), "mask": torch.tensor(mask), "labels": torch.tensor(labels)}

def pad_too_little(samples):
    return {"ids": torch.zeros(1, 3), "labels": torch.zeros(len(samples))}

def rate(step, total):
    return 0.25 if step < 2 else 1.0 - step / (2 * total)

def broken(step, total):
    return 1.0 / abs(step - 7) if step != 7 else float("nan")

def by_label(dataset):
    return [3.0 if label == 0 else 0.5 for _, label in dataset]
"""
SETTINGS = (
    "model.target=own_data:Reader",
    "data.target=own_data:texts",
    "data.collate=own_data:pad",
    "data.shuffle=false",
    "train.loss=own_data:loss",
    "train.metrics=own_data:accuracy",
    "train.global_batch=8",
    "train.micro_batch=2",
    "train.epochs=9",
    "train.eval_every=3",
    "train.eval_steps=all",
    "train.stop_early={metric: validation_loss, patience: 2, min_delta: 0.003}",
    "train.grad_clip=null",
    "optim.name=sgd",
    "optim.momentum=0",
    "optim.weight_decay=0",
    "optim.lr=0.8",
    "optim.schedule.name=own_data:rate",
    "checkpoint.every=1",
    "checkpoint.keep=100",
    "cluster.procs_per_node=2",
    "plugin=zero3",
)
TOTAL = 48
"""Steps of nine epochs of 42 samples in global batches of 8."""


def make() -> Any:
    scope: dict[str, Any] = {}
    exec(PROGRAM, scope)
    return scope["Reader"]()


@pytest.fixture
def mine(colotrain: Colotrain) -> dict[str, Any]:
    (colotrain.cwd / "own_data.py").write_text(PROGRAM)
    scope: dict[str, Any] = {}
    exec(PROGRAM, scope)
    return scope


def plain(mine: dict[str, Any], *, min_delta: float = 0.003) -> dict[str, Any]:
    """The run as a plain loop: losses, evaluations, and the step after which it ends."""
    from colotrain.models.loading import build
    from colotrain.spec.plan import ModelPlan

    model = build(ModelPlan(target="tests.dist.test_own_data:make"), seed=0)
    samples, held = mine["texts"](), mine["pad"](mine["texts"]("validation"))
    found, evaluations, best, waited = [], [], float("inf"), 0
    for step in range(TOTAL):
        batch = mine["pad"]([samples[(8 * step + i) % len(samples)] for i in range(8)])
        loss = functional.cross_entropy(model(batch["ids"], batch["mask"]), batch["labels"])
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.8 * mine["rate"](step, TOTAL) * parameter.grad
        found.append(loss.item())
        if (step + 1) % 3 and step + 1 < TOTAL:
            continue
        with torch.no_grad():
            logits = model(held["ids"], held["mask"])
        value = functional.cross_entropy(logits, held["labels"]).item()
        right = (logits.argmax(-1) == held["labels"]).float().mean().item()
        certainty = logits.softmax(-1).amax(-1).mean().item()
        evaluations.append((step + 1, value, right, certainty))
        waited = 0 if value < best - min_delta else waited + 1
        best = min(best, value) if waited == 0 else best
        if waited == 2:
            break
    return {"losses": found, "evaluations": evaluations}


def test_padded_batches_metrics_schedule_and_early_end_are_those_of_a_plain_loop(
    colotrain: Colotrain, mine: dict[str, Any]
) -> None:
    expected = plain(mine)
    assert len(expected["losses"]) < TOTAL - 3, "the plain loop has to end early"
    result = colotrain("run", *SETTINGS, "name=whole", "--json")
    assert result.code == 0, result.err
    summary = result.json
    assert summary["status"] == "finished"
    assert summary["steps"] == len(expected["losses"])
    assert losses(summary) == pytest.approx(expected["losses"], abs=2e-6)
    events = [e for e in colotrain.events("whole") if e.kind == "eval" and e.fields["step"]]
    seen = [(e.fields["step"], e.fields["loss"], *e.fields["metrics"].values()) for e in events]
    assert list(events[0].fields["metrics"]) == ["accuracy", "certainty"]
    for one, other in zip(seen, expected["evaluations"], strict=True):
        assert one == pytest.approx(other, abs=1e-5)
    reason = summary["stopped_early"]
    assert reason.startswith("stopped early: validation_loss did not improve in 2 evaluations")
    assert reason in result.err
    # done is done; with more patience it goes on
    again = colotrain("run", *SETTINGS, "name=whole")
    assert again.code == 0
    assert "has finished its" in again.err
    assert "stopped early" in again.err

    # interrupted in the middle of an epoch, before and after an evaluation: bit for bit
    middle = colotrain.rundir("whole").checkpoints / f"step-{summary['steps'] - 2:08d}"
    resumed = colotrain.run(*SETTINGS, "name=resumed", f"checkpoint.resume={middle}")
    assert resumed["stopped_early"] == reason
    rest = losses(summary)[summary["steps"] - 2 :]
    assert losses(resumed)[-2:] == rest
    assert weights(colotrain, "resumed") == weights(colotrain, "whole")

    # read ahead by other processes: the same
    ahead = colotrain.run(*SETTINGS, "name=ahead", "data.num_workers=1")
    assert losses(ahead) == losses(summary)
    patient = colotrain("resume", "whole", "train.stop_early.patience=50", "--json")
    assert patient.code == 0, patient.err
    assert patient.json["steps"] == TOTAL
    assert "stopped_early" not in patient.json

    # a run that begins from one that was stopped early trains
    ended = middle.with_name(f"step-{summary['steps']:08d}")
    words = (*SETTINGS, "name=branch", f"checkpoint.resume={ended}", "checkpoint.best.mode=max")
    branch = colotrain("run", *words, "checkpoint.best.metric=accuracy", "--json")
    assert branch.code == 0, branch.err
    assert "train.stop_early counts afresh" in branch.err
    assert branch.json["steps"] > summary["steps"]
    last = colotrain.rundir("branch").checkpoints / f"step-{branch.json['steps']:08d}"
    assert summary["steps"] < (read_manifest(last).best_step or 0)  # of its own evaluations

    # another metric is not compared with the best loss so far
    rule = "{metric: certainty, mode: max, patience: 2, min_delta: 0}"
    words = (*SETTINGS, "name=other", f"checkpoint.resume={middle}", f"train.stop_early={rule}")
    other = colotrain("run", *words, "--json")
    assert other.code == 0, other.err
    assert "train.stop_early starts afresh: the checkpoint was made with another" in other.err
    assert other.json["steps"] == end_by_certainty(mine, after=summary["steps"] - 2)


def end_by_certainty(mine: dict[str, Any], *, after: int) -> int:
    """The step after which two evaluations in a row had no higher certainty, from `after` on."""
    best, waited = 0.0, 0
    for step, _, _, certainty in plain(mine, min_delta=-1e9)["evaluations"]:
        if step > after:
            best, waited = max(best, certainty), 0 if certainty > best else waited + 1
        if waited == 2:
            return step
    return TOTAL


def weights(colotrain: Colotrain, name: str) -> dict[str, list[float]]:
    from safetensors.torch import load_file

    exported = colotrain("export", name, "--to", f"weights-{name}")
    assert exported.code == 0, exported.err
    (file,) = (colotrain.cwd / f"weights-{name}").glob("*.safetensors")
    return {key: tensor.flatten().tolist() for key, tensor in load_file(file).items()}


def test_a_run_stopped_between_a_step_and_its_evaluation_makes_the_evaluation_later(
    colotrain: Colotrain, mine: dict[str, Any]
) -> None:
    text = PROGRAM + STOPPING
    (colotrain.cwd / "own_data.py").write_text(text)
    words = (*SETTINGS, "train.on_gradients=own_data:stop_at_six", "name=stopped")
    first = colotrain("run", *words)
    assert first.code == 75, first.err
    second = colotrain("resume", "stopped", "--json")
    assert second.code == 0, second.err
    evaluated = [e.fields["step"] for e in colotrain.events("stopped") if e.kind == "eval"]
    expected = plain(mine)
    assert evaluated == [0, *(step for step, *_ in expected["evaluations"])]
    assert losses(second.json) == pytest.approx(expected["losses"], abs=2e-6)


STOPPING = """
from pathlib import Path

def stop_at_six(model, step):
    if step == 5 and not Path("was-here").exists():
        Path("was-here").touch()
        Path("runs/stopped/control").mkdir(exist_ok=True)
        import os, signal
        os.kill(os.getpid(), signal.SIGTERM)
"""


def test_verify_has_batches_losses_and_schedules_of_ones_own(
    colotrain: Colotrain, mine: dict[str, Any]
) -> None:
    words = [w for w in SETTINGS if not w.startswith(("plugin", "train.micro_batch", "data.sh"))]
    words += ["data.sampler=own_data:by_label", "--world-sizes", "2", "--optimizer", "recipe"]
    result = colotrain("verify", *words, "--json")
    assert result.code == 0, result.out + result.err
    assert len({case["plugin"] for case in result.json["cases"]}) == 5
    assert max(case["max_abs_gradient"] for case in result.json["cases"]) < 1e-6


def test_what_cannot_be_is_refused_before_the_first_step(
    colotrain: Colotrain, mine: dict[str, Any]
) -> None:
    def refused(*words: str, by: str = "plan") -> str:
        result = colotrain(by, *SETTINGS, *words)
        assert result.code in (1, 2), result.out
        return " ".join(result.err.split())

    assert "of step 7 it returned nan" in refused("optim.schedule.name=own_data:broken")
    text = refused("optim.schedule.warmup_steps=3")
    assert "optim.schedule.warmup_steps=3: expected nothing but for a schedule" in text
    text = refused("data.collate=own_data:pad_too_little", by="run")
    assert "data.collate: expected tensors of" in text
    assert "ids: shape [1, 3]" in text
    text = refused("train.metrics=own_data:wrong_metrics", by="run")
    assert "train.metrics=own_data:wrong_metrics returned validation_loss" in text
    text = refused("train.stop_early.metric=bleu", by="run")
    assert "name one of validation_loss, accuracy, certainty" in text
    text = refused("train.eval_every=0")
    assert "train.stop_early.metric=validation_loss: expected null with train.eval_every=0" in text
    text = refused("data.isolate=true")
    assert "data.isolate=true: expected false, or samples with document_ids" in text
    text = refused("data.packing=whole")
    assert "data.packing=whole: expected auto with data.target" in text
    text = refused("data.collate=own_data:pad", "data.target=null", "data.corpus=stdlib")
    assert "data.collate=own_data:pad: expected null without data.target" in text
    text = refused("data.sampler=own_data:by_label")
    assert "data.shuffle=false: expected true under data.sampler" in text


def test_what_is_kept_for_validation_is_said(colotrain: Colotrain, tmp_path: Path) -> None:
    (colotrain.cwd / "own_data.py").write_text(PROGRAM.replace("split", "split_"))
    words = [w for w in SETTINGS if "split" not in w]
    planned = colotrain("plan", *words, "train.eval_steps=2", "train.stop_early.metric=null")
    assert "the last 5 % of the dataset, unless its function takes `split`" in " ".join(
        planned.out.replace("│", " ").split()
    )
    result = colotrain(
        "run",
        *words,
        "data.args.split_=train",
        "train.epochs=null",
        "train.max_steps=1",
        "train.eval_every=null",
        "train.stop_early.metric=null",
        "name=kept",
    )
    assert result.code == 0, result.err
    notes = [e.fields["text"] for e in colotrain.events("kept") if e.kind == "note"]
    assert any("the last 2 of the 42 samples of data.target are for validation" in n for n in notes)
    assert json.loads(colotrain.rundir("kept").plan_file.read_text())["data"]["collate"]


SUMMED = """
import torch
from torch import nn

class Summed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm, self.drop = nn.Linear(4, 2), nn.BatchNorm1d(2), nn.Dropout(0.5)

    def forward(self, x, labels):
        rows = self.drop(self.norm(self.layer(x)))
        return nn.functional.cross_entropy(rows, labels, reduction="sum")

def samples(target):
    rows = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
    return [{"x": row, "labels": torch.tensor(target)} for row in rows]
"""


def test_a_sum_for_a_loss_and_steps_without_targets_are_told(colotrain: Colotrain) -> None:
    """The forwards that find it out leave buffers and random numbers as they were."""
    (colotrain.cwd / "summed.py").write_text(SUMMED)
    options = ("model.target=summed:Summed", "data.target=summed:samples", "train.max_steps=3")
    options += ("train.global_batch=8", "train.micro_batch=2", "cluster.procs_per_node=2")
    options += ("plugin=zero3", "data.validation_fraction=0.2", "optim.name=sgd")
    quiet = ("train.eval_steps=0", "+data.args.target=1")
    told = colotrain.run(*options, "+data.args.target=1", "train.eval_every=10", "name=told")
    assert losses(told) == losses(colotrain.run(*options, *quiet, "name=quiet"))
    few = [word for word in options if not word.startswith("train.global_batch")]
    colotrain.run(*few, "train.global_batch=48", "+data.args.target=-100", "name=none")
    notes = [e.fields["text"] for e in colotrain.events("none") if e.kind == "note"]
    for name in ("told", "quiet"):  # evaluations or not
        plan = json.loads((colotrain.cwd / "runs" / name / "plan.json").read_text())
        assert [text for text in plan["warnings"] if "twice the mean" in text]
    assert [text for text in notes if "step 1 has no target" in text]
    twice = "there are 32 samples to train on, fewer than train.global_batch=48"
    assert [twice in text for text in notes].count(True) == 1
