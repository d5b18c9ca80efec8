"""Blocks that run as a sample's values or random numbers decide train as in plain torch."""

from __future__ import annotations

import pytest
import torch

from tests.running import Colotrain, losses

PROGRAM = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.linear(x).tanh()

class Deciding(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how, self.head = how, nn.Linear(8, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.double()

    def forward(self, x):
        blocks, values, hidden = list(self.blocks), x[0].tolist(), x
        if self.how == "sorts":
            blocks = [blocks[n] for n in sorted(range(4), key=values.__getitem__)]
        for number, block in enumerate(blocks):
            if self.how == "skips" and values[number] > 1.0:
                continue
            if self.how == "exits" and number and hidden.mean().item() > 0.3:
                break
            for _ in range(2 if self.how == "loops" and values[number] > 1.0 else 1):
                hidden = block(hidden)
        return self.head(hidden).square().mean()

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        draw = torch.Generator().manual_seed(index)
        return {"x": torch.randn(8, generator=draw, dtype=torch.float64)}
"""


STEPS, GLOBAL, RATE = 5, 4, 0.1
SETTINGS = (
    *("data.target=deciding:Rows", "data.shuffle=false", "data.validation_fraction=0"),
    *("train.micro_batch=1", f"train.global_batch={GLOBAL}", f"train.max_steps={STEPS}"),
    *("optim.name=sgd", "optim.momentum=0", f"optim.lr={RATE}", "optim.schedule.name=constant"),
    *("optim.weight_decay=0", "train.grad_clip=null", "cluster.procs_per_node=2"),
)


def plain(how: str) -> list[float]:
    """Losses of one process, sample by sample."""
    namespace: dict[str, object] = {}
    exec(PROGRAM, namespace)
    torch.manual_seed(0)
    model, rows = namespace["Deciding"](how), namespace["Rows"]()  # type: ignore[operator]
    optimizer, found = torch.optim.SGD(model.parameters(), lr=RATE), []
    for step in range(STEPS):
        optimizer.zero_grad()
        each = [model(rows[step * GLOBAL + n]["x"][None]) / GLOBAL for n in range(GLOBAL)]
        sum(each).backward()  # type: ignore[union-attr]
        optimizer.step()
        found.append(sum(each).item())  # type: ignore[union-attr]
    return found


@pytest.mark.parametrize(
    ("how", "plugin"),
    [("skips", "zero3"), ("exits", "zero2"), ("loops", "gemini"), ("sorts", "zero1")],
)
def test_a_forward_that_looks_at_values_trains(how: str, plugin: str, colotrain: Colotrain) -> None:
    (colotrain.cwd / "deciding.py").write_text(PROGRAM)
    words = ("model.target=deciding:Deciding", f"model.args={{how:{how}}}", "train.seed=0")
    summary = colotrain.run(*words, *SETTINGS, f"plugin={plugin}", "name=one")
    assert losses(summary) == pytest.approx(plain(how), rel=1e-12)
