"""A mixture of experts that knows nothing of expert parallelism, with a balancing loss."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HIDDEN, EXPERTS, CHOSEN, LABELS = 16, 12, 4, 2, 5


class Experts(nn.Module):
    """Each token's experts one after the other; how many there are, its parameters say."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 4)
        self.up_bias = nn.Parameter(torch.randn(EXPERTS, HIDDEN) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / 4)

    def forward(self, tokens: Tensor, index: Tensor, gates: Tensor) -> Tensor:
        out = torch.zeros_like(tokens)
        for expert in range(len(self.up)):
            token, place = (index == expert).nonzero(as_tuple=True)
            hidden = F.gelu(tokens[token] @ self.up[expert].T + self.up_bias[expert])
            out = out.index_add(0, token, hidden @ self.down[expert].T * gates[token, place, None])
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), Experts()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return activations [batch, seq, d], and each sample's balancing loss."""
        x = x + torch.tanh(self.mix(x)).cumsum(1) / 4
        normed = self.norm(x)
        chances = self.router(normed).softmax(-1)
        gates, index = chances.topk(CHOSEN)
        out = self.experts(normed.flatten(0, 1), index.flatten(0, 1), gates.flatten(0, 1))
        return x + out.view(x.shape), chances.mean(1).square().sum(-1) * EXPERTS


class OwnExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, LABELS)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of the tokens' losses, with balancing losses, and their number."""
        counts = (labels != -100).sum(1)
        balance = torch.zeros(())
        for block in self.blocks:
            x, unbalanced = block(x)
            balance = balance + (unbalanced * counts).sum()
        logits = self.head(x)
        loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")
        return loss + 0.1 * balance, counts.sum()


def make() -> nn.Module:
    return OwnExperts()


def samples(count: int = 64) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count, 6, WIDTH, generator=generator)
    labels = torch.randint(LABELS, (count, 6), generator=generator)
    return [{"x": a, "labels": b} for a, b in zip(x, labels, strict=True)]
