"""What a slow rank does to the times of all."""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colotrain.events.kinds import Step
from tests.running import Colotrain

SLEEP_S = 0.02
SAMPLES = 4  # of a rank in a step


class Numbers(torch.utils.data.Dataset):
    """Samples that take longer on rank 1."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if os.environ.get("RANK") == "1":
            time.sleep(SLEEP_S)
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return {"x": x, "y": x.sum(0, keepdim=True)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.blocks(x), y)


@pytest.mark.parametrize(
    ("plugin", "more"),
    [
        ("zero1", ()),
        ("zero3", ()),
        ("fsdp-hybrid", ("plugin.shard_size=1",)),  # through the process group
    ],
)
def test_other_ranks_wait_for_the_slow_one(
    colotrain: Colotrain, plugin: str, more: tuple[str, ...]
) -> None:
    colotrain.run(
        *(f"model.target={__name__}:Net", f"data.target={__name__}:Numbers", f"plugin={plugin}"),
        *("cluster.procs_per_node=2", f"train.global_batch={2 * SAMPLES}", "name=slow"),
        *("train.micro_batch=2", "train.max_steps=8", "train.eval_every=0", "optim.lr=0.01"),
        *more,
    )
    steps = [(e.rank, Step.of(e)) for e in colotrain.events("slow") if e.kind == Step.KIND]

    def typical(rank: int, name: str) -> Any:
        return statistics.median(getattr(step, name) for at, step in steps if at == rank)

    assert typical(0, "wait_s") > 0.5 * SAMPLES * SLEEP_S
    assert typical(1, "wait_s") < typical(0, "wait_s")
    assert typical(1, "busy_s") > typical(0, "busy_s")
    assert all(0.0 <= (step.wait_s or 0.0) <= (step.step_s or 0.0) for _, step in steps)
