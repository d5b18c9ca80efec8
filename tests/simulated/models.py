"""Models of users, for cases on the simulated device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Mean(nn.Module):
    """Returns its mean loss, which the engine multiplies by the number of targets."""

    def __init__(self, vocab_size: int = 256, **_: object) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.register_buffer("scale", torch.tensor([1.0, 0.5, 0.25]))
        self.head = nn.Linear(32, vocab_size)

    def forward(self, input_ids: Tensor, labels: Tensor, **_: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for index, layer in enumerate(self.layers):
            x = x + self.scale[index] * F.silu(layer(x))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Explodes(Mean):
    """Its loss is not finite in the second step: a weight of its own has grown too large."""

    def __init__(self, **settings: object) -> None:
        super().__init__(**settings)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, input_ids: Tensor, labels: Tensor, **batch: Tensor) -> Tensor:
        loss = super().forward(input_ids, labels, **batch)
        if self.training:
            self.calls += 1
        return loss / (self.calls != 6)
