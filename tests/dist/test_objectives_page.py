"""The models of docs/objectives.md against plain torch loops, interrupted in mid-epoch."""

from __future__ import annotations

import math
import sys
from importlib import import_module
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from colotrain.models.loading import build
from colotrain.spec.plan import ModelPlan
from tests.pages import ROOT, blocks
from tests.representatives import representatives
from tests.running import Colotrain, losses

TARGETS = {
    "tabular": ("tabular:Net", "rows"),
    "pictures": ("pictures:Net", "images"),
    "turning": ("turning:Turner", "numbers"),
}
GLOBAL, EPOCHS = 16, 3


@pytest.fixture
def page(colotrain: Colotrain, monkeypatch: pytest.MonkeyPatch) -> Colotrain:
    """A folder with the files of the page, whose modules can be imported here."""
    for block in blocks(ROOT / "docs" / "objectives.md"):
        if block.path:
            place = colotrain.cwd / block.path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(block.body)
    monkeypatch.syspath_prepend(colotrain.cwd)
    for name in TARGETS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    return colotrain


def plain(kind: str) -> tuple[list[float], dict[str, float]]:
    """Losses of all steps, and loss and metrics on the validation samples after the last."""
    target, data = TARGETS[kind]
    module = import_module(kind)
    model = build(ModelPlan(target=target), seed=0)
    samples, held = getattr(module, data)("train"), getattr(module, data)("validation")
    total = math.ceil(EPOCHS * len(samples) / GLOBAL)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    found = []
    for step in range(total):
        rows = [samples[(GLOBAL * step + i) % len(samples)] for i in range(GLOBAL)]
        loss, _ = mean_loss(module, model, rows)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (0.1 + 0.45 * (1 + math.cos(math.pi * step / (total - 1))))
        optimizer.step()
        found.append(loss.item())
    with torch.no_grad():
        value, numbers = mean_loss(module, model, held)
    return found, {"validation_loss": value.item(), **numbers}


def mean_loss(module: Any, model: Any, rows: list[Any]) -> tuple[torch.Tensor, dict[str, float]]:
    if hasattr(module, "pad"):
        batch = module.pad(rows)
        logits = model(batch["source"], batch["target"])
    else:
        batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        logits = model(next(value for name, value in batch.items() if name != "labels"))
    labels = batch["labels"]
    loss = functional.cross_entropy(logits.flatten(0, -2), labels.flatten())  # of all but -100
    counted = labels != -100
    right = (logits.argmax(-1) == labels) & counted
    numbers = {"accuracy": (right.sum() / counted.sum()).item()}
    if labels.ndim > 1:
        whole = right.sum(-1) == counted.sum(-1)
        numbers["exact_match"] = whole.float().mean().item()
    return loss, numbers


@pytest.mark.parametrize("kind", representatives(list(TARGETS), kept=["turning"]))
def test_a_model_of_the_page_is_trained_as_by_a_plain_loop_also_if_interrupted(
    page: Colotrain, kind: str
) -> None:
    words = (
        f"recipe={kind}",
        "data.shuffle=false",
        "checkpoint.every=1",
        "checkpoint.keep=100",
        "cluster.procs_per_node=2",
        "plugin=zero3",
    )
    expected, numbers = plain(kind)
    whole = page.run(*words, "train.stop_early.metric=null", "name=whole")
    assert losses(whole) == pytest.approx(expected, abs=2e-5)
    assert expected[-1] < expected[0]
    found = {"validation_loss": whole["validation_loss"], **whole["metrics"]}
    assert found == pytest.approx(numbers, abs=1e-4)
    middle = 8  # in the second epoch
    path = page.rundir("whole").checkpoints / f"step-{middle:08d}"
    rest = page.run(
        *words, "train.stop_early.metric=null", "name=rest", f"checkpoint.resume={path}"
    )
    assert losses(rest)[-(len(expected) - middle) :] == losses(whole)[middle:]
    assert {"validation_loss": rest["validation_loss"], **rest["metrics"]} == found


@pytest.mark.parametrize("kind", representatives(list(TARGETS), kept=["tabular"]))
def test_the_export_of_a_model_of_the_page_is_checked(page: Colotrain, kind: str) -> None:
    page.run(f"recipe={kind}", "name=run", "cluster.procs_per_node=1")
    done = page("export", "run", "--to", "out", "--check", "--json")
    assert done.code == 0, done.out + done.err
    receipt = done.json["receipt"]
    assert receipt["validation_loss"]["difference"] < 1e-6
    assert receipt["outputs"]["largest_difference"] < 1e-6
    weights = page.cwd / "out" / "model.safetensors"
    tensors = load_file(weights)
    save_file({name: tensor + 0.1 for name, tensor in tensors.items()}, weights)
    assert page("export", "run", "--to", "out", "--check").code == 4


def test_the_recipes_are_short() -> None:
    recipes = [b for b in blocks(ROOT / "docs" / "objectives.md") if b.language == "yaml"]
    assert len(recipes) == 11
    assert max(len(block.body.splitlines()) for block in recipes) <= 20
