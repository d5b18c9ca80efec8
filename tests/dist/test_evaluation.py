"""An evaluation is the mean over the validation samples, each counted once, as in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

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

class Weighted(Tokens):
    def forward(self, x, weight):
        norms = self.logits(x).square().mean((1, 2))
        loss = (norms * weight).sum(), weight.sum()
        return {"loss": loss, "largest": norms.sqrt().mean()}

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
NAMES["Weighted"] = NAMES["Pairs"]
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
    loss = output["loss"]
    loss = loss[0] / loss[1] if isinstance(loss, tuple) else loss
    return float(loss), {n: float(v) for n, v in output.items() if n != "loss"}


@pytest.mark.parametrize(
    ("kind", "ranks", "count", "more"),
    [
        ("Tokens", 1, 17, ("train.eval_steps=all",)),
        ("Tokens", 3, 17, ("train.eval_steps=all", "data.num_workers=1")),
        ("Samples", 2, 5, ()),  # rank 1 has no sample in its second micro-batch
        ("Samples", 3, 7, ()),
        ("Weighted", 1, 7, ("train.micro_batch=4",)),
        ("Weighted", 2, 7, ("train.micro_batch=1",)),
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


NORMALIZED = """
import torch
from torch import nn

class Normalized(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.norm, self.last = nn.BatchNorm1d(4, momentum=0.5), nn.Linear(4, 1)

    def forward(self, x, y):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return (self.last(self.norm(x)).squeeze(-1) - y).square().mean()

def samples(split="train"):
    draw = torch.Generator().manual_seed(1 if split == "train" else 2)
    x = torch.randn(48 if split == "train" else 10, 4, generator=draw)
    return [{"x": (at % 5) * row + at % 3, "y": row.sum()} for at, row in enumerate(x)]
"""


def test_batch_norms_of_all_ranks_evaluate_as_the_export_does(colotrain: Colotrain) -> None:
    """The running statistics are the mean of those that each rank would have by itself."""
    (colotrain.cwd / "normalized.py").write_text(NORMALIZED)
    batch = ("train.global_batch=8", "train.micro_batch=2", "train.max_steps=3", "optim.name=sgd")
    batch += ("optim.lr=1e-30", "data.shuffle=false")
    names = ("model.target=normalized:Normalized", "data.target=normalized:samples", "name=bn")
    colotrain.run(*names, *batch, "train.eval_steps=all", "cluster.procs_per_node=2")
    last = [e for e in colotrain.events("bn") if e.kind == "eval"][-1].fields["loss"]
    colotrain("export", "bn", "--to", "exported", "--format", "safetensors")
    scope: dict[str, Any] = {}
    exec(NORMALIZED, scope)
    model = scope["Normalized"]()
    model.load_state_dict(load_file(next((colotrain.cwd / "exported").glob("*.safetensors"))))
    exported = {name: tensor.clone() for name, tensor in model.norm.named_buffers()}
    statistics = [after_training(model, scope["samples"](), rank) for rank in range(2)]
    for name in ("running_mean", "running_var"):
        mean = (statistics[0][name] + statistics[1][name]) / 2
        torch.testing.assert_close(exported[name], mean)
        assert not torch.allclose(statistics[0][name], mean)
        model.norm.get_buffer(name).copy_(exported[name])
    drawn = scope["samples"](split="validation")
    batch_of = {name: torch.stack([sample[name] for sample in drawn]) for name in ("x", "y")}
    with torch.no_grad():
        assert model.eval()(**batch_of).item() == pytest.approx(last, rel=1e-5)


def after_training(model: Any, drawn: list[dict[str, Any]], rank: int) -> dict[str, torch.Tensor]:
    """Running statistics after three steps of two micro-batches of two samples on one rank."""
    model.norm.reset_running_stats()
    for block in range(rank, 12, 2):
        rows = drawn[2 * block : 2 * block + 2]
        model.train()(**{name: torch.stack([row[name] for row in rows]) for name in ("x", "y")})
    return {name: buffer.clone() for name, buffer in model.norm.named_buffers()}
