"""Schedule-free AdamW against the paper's three points, each kept, in float64."""

from __future__ import annotations

import secrets
from typing import Any

import pytest
import torch
from torch import nn

from colotrain.engine.optim.schedule_free import ScheduleFreeAdamW, averaged
from colotrain.verify.optimizers import PlainScheduleFree

SETTINGS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.5, 0.999)])
def test_steps_and_the_mean_are_those_of_the_paper(betas: tuple[float, float]) -> None:
    """A warm-up of the rate, which gives early steps little weight; then it is halved."""
    seed = secrets.randbits(32)
    print(f"drawn from {seed}")
    draw = torch.Generator().manual_seed(seed)
    start = torch.randn(7, 5, generator=draw)
    ours, exact = nn.Parameter(start.clone()), nn.Parameter(start.double())
    made = ScheduleFreeAdamW([ours], betas=betas, eps=1e-8, **SETTINGS)
    plain = PlainScheduleFree([{"params": [exact], **SETTINGS}], {"betas": betas, "eps": 1e-8})
    for share in (0.25, 0.5, 0.75, 1.0, 1.0, 0.5, 0.5, 1.0):
        grad = torch.randn(7, 5, generator=draw)
        ours.grad, exact.grad = grad, grad.double()
        for optimizer in (made, plain):
            optimizer.param_groups[0]["lr"] = share * SETTINGS["lr"]
            optimizer.step()
        assert torch.allclose(ours.double(), exact, rtol=0, atol=1e-6)
        mean = averaged(ours.detach(), made.state[ours]["z"], betas[0])
        assert torch.allclose(mean.double(), plain.state[exact]["x"], rtol=0, atol=1e-5)
    assert not torch.allclose(mean, ours, rtol=0, atol=1e-3), "else a mix-up would not show"
