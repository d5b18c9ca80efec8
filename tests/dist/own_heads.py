"""A model that knows nothing of tensor parallelism, with everything a plan can name in it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEAD = 16, 4


class Block(nn.Module):
    """Attention whose heads follow from the size of a projection, a norm of each head, an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(WIDTH, 6 * HEAD), nn.Linear(6 * HEAD, WIDTH)
        self.norm = nn.LayerNorm(HEAD)
        self.up, self.down = nn.Linear(WIDTH, 40), nn.Linear(20, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.norm(self.query(x).unflatten(-1, (-1, HEAD))).transpose(-2, -3)
        mixed = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        x = x + self.out(mixed.transpose(-2, -3).flatten(-2))
        gate, up = self.up(x).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class OwnHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, -2), labels.flatten())


def make() -> nn.Module:
    model = OwnHeads()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms, too
            parameter.add_(torch.randn_like(parameter) / 5)
    return model


def samples(count: int = 64) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count, 6, WIDTH, generator=generator)
    labels = torch.randint(5, (count, 6), generator=generator)
    return [{"x": a, "labels": b} for a, b in zip(x, labels, strict=True)]
