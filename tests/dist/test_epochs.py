"""Training by epochs, beside a plain loop over the same samples."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from colotrain.data.read.loader import SampleOrder
from tests.running import Colotrain, losses

PROGRAM = """
import torch
from torch import nn

class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 9), nn.Linear(9, 1)

    def init_weights(self):
        for index, parameter in enumerate(self.parameters()):
            values = torch.arange(parameter.numel(), dtype=torch.float32)
            parameter.data.copy_(torch.sin(values + index).reshape(parameter.shape) / 3)

    def forward(self, x, labels):
        return ((self.outer(torch.tanh(self.inner(x)))[:, 0] - labels) ** 2).mean()

def samples(count=29, split="train"):
    draw = torch.Generator().manual_seed(5)
    x = torch.randn(count, 6, generator=draw)
    return [{"x": row, "labels": row.square().sum()} for row in x]
"""
SETTINGS = (
    "model.target=epochs_mine:Regression",
    "model.deferred_init=true",
    "data.target=epochs_mine:samples",
    "train.global_batch=4",
    "train.micro_batch=1",
    "train.epochs=2.5",
    "train.eval_every=1ep",
    "train.seed=11",
    "train.grad_clip=null",
    "optim.name=sgd",
    "optim.lr=0.02",
    "optim.momentum=0",
    "optim.weight_decay=0",
    "optim.schedule.name=constant",
    "cluster.procs_per_node=2",
)
COUNT = 29


def plain_losses(last_batch: str, steps: int) -> list[float]:
    """One process, plain torch, float64, `steps` times the next four samples."""
    scope: dict[str, type[nn.Module]] = {}
    exec(PROGRAM, scope)
    model, samples = scope["Regression"](), scope["samples"](COUNT)
    model.init_weights()
    model.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    used = COUNT // 4 * 4 if last_batch == "drop" else COUNT
    stream = []
    for epoch in range(3):
        order = SampleOrder(COUNT, seed=11, shuffle=True)
        stream += [order.sample_at(epoch * COUNT + i) for i in range(used)]
    found = []
    for step in range(steps):
        batch = [samples[i] for i in stream[step * 4 : step * 4 + 4]]
        x = torch.stack([sample["x"] for sample in batch]).double()
        loss = model(x, torch.stack([sample["labels"] for sample in batch]).double())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize(("last_batch", "steps"), [("fill", 19), ("drop", 18)])
def test_epochs_are_those_of_a_plain_loop_also_when_stopped_within_one(
    colotrain: Colotrain, last_batch: str, steps: int
) -> None:
    (colotrain.cwd / "epochs_mine.py").write_text(PROGRAM)
    words = (*SETTINGS, f"train.last_batch={last_batch}", "plugin=zero2")
    whole = colotrain.run(*words, "name=whole")
    assert losses(whole) == pytest.approx(plain_losses(last_batch, steps), rel=1e-5)
    evaluated = [e.fields["step"] for e in colotrain.events("whole") if e.kind == "eval"]
    assert evaluated == ([0, 8, 15, 19] if last_batch == "fill" else [0, 7, 14, 18])
    part = colotrain.run(*words, "name=part", "train.epochs=null", "train.max_steps=11")
    more = colotrain.resume("part", "train.epochs=2.5")
    assert part["steps"] == 11
    assert losses(more) == losses(whole)
