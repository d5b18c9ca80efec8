"""An evaluation is the mean over the validation samples, each counted once, as in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.running import Colotrain

PROGRAM = """
import torch
from torch import nn
from torch.nn import functional as F

WIDTH, CLASSES, LENGTH = 6, 5, 7

class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        draw = torch.Generator().manual_seed(5)
        self.inner, self.outer = nn.Linear(WIDTH, 32), nn.Linear(32, CLASSES)
        for parameter in self.parameters():
            parameter.data.copy_(torch.randn(parameter.shape, generator=draw))

    def logits(self, x):
        return self.outer(torch.tanh(self.inner(x)))

    def forward(self, x, labels):
        logits = self.logits(x).flatten(0, 1)
        right = (logits.argmax(-1) == labels.flatten())[labels.flatten() != -100]
        loss = F.cross_entropy(logits, labels.flatten())
        return {"loss": loss, "accuracy": right.float().mean()}

class Samples(Tokens):
    def forward(self, x):
        norms = self.logits(x).square().mean((1, 2))
        return {"loss": norms.mean(), "largest": norms.sqrt().mean()}

class Pairs(Tokens):
    def forward(self, x, weight):
        norms = self.logits(x).square().mean((1, 2))
        return (norms * weight).sum(), weight.sum()

def samples(count, names, split="train"):
    draw = torch.Generator().manual_seed(1 if split == "train" else 2)
    found = []
    for index in range(40 if split == "train" else count):
        x = torch.randn(LENGTH, WIDTH, generator=draw) * (index + 1)
        labels = torch.randint(0, CLASSES, (LENGTH,), generator=draw)
        labels[: index % (LENGTH + 1)] = -100
        both = {"x": x, "labels": labels, "weight": torch.tensor(float(index % 3))}
        found.append({name: both[name] for name in names})
    return found
"""
NAMES = {"Tokens": ["x", "labels"], "Samples": ["x"], "Pairs": ["x", "weight"]}
BATCH = ("train.global_batch=12", "train.micro_batch=2", "train.max_steps=1")


def expected(kind: str, count: int) -> tuple[float, dict[str, float]]:
    """Loss and metrics of one forward of all samples, in float64."""
    scope: dict[str, Any] = {}
    exec(PROGRAM, scope)
    drawn = scope["samples"](count, NAMES[kind], split="validation")
    batch = {name: torch.stack([sample[name] for sample in drawn]) for name in NAMES[kind]}
    batch = {n: t.double() if t.is_floating_point() else t for n, t in batch.items()}
    with torch.no_grad():
        output = scope[kind]().double()(**batch)
    if isinstance(output, tuple):
        return float(output[0] / output[1]), {}
    return float(output["loss"]), {n: float(v) for n, v in output.items() if n != "loss"}


@pytest.mark.parametrize(
    ("kind", "ranks", "count", "more"),
    [
        ("Tokens", 1, 17, ("train.eval_steps=all",)),
        ("Tokens", 3, 17, ("train.eval_steps=all", "data.num_workers=1")),
        ("Samples", 2, 5, ()),  # rank 1 has no sample in its second micro-batch
        ("Samples", 3, 7, ()),
        ("Pairs", 3, 13, ("plugin=gemini", "train.eval_steps=all")),
    ],
)
def test_each_validation_sample_counts_once(
    colotrain: Colotrain, kind: str, ranks: int, count: int, more: tuple[str, ...]
) -> None:
    (colotrain.cwd / "evaluated.py").write_text(PROGRAM)
    data = (f"data.args={{count: {count}, names: [{', '.join(NAMES[kind])}]}}",)
    data += (f"model.target=evaluated:{kind}", "data.target=evaluated:samples")
    where = ("name=once", "plugin=zero3", f"cluster.procs_per_node={ranks}")
    colotrain.run(*BATCH, *data, *where, *more)
    event = next(e for e in colotrain.events("once") if e.kind == "eval")
    loss, metrics = expected(kind, count)
    assert event.fields["step"] == 0
    assert event.fields["loss"] == pytest.approx(loss, rel=1e-5)
    assert event.fields.get("metrics", {}) == pytest.approx(metrics, rel=1e-5)
