"""Models and data in other people's idioms, for runs that train or refuse but never differ."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, WIDTH, LENGTH = 11, 8, 64


def tokens(num: int = 64, length: int = LENGTH) -> list[dict[str, Tensor]]:
    """Random tokens as inputs and, unshifted, as labels."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(0, VOCAB, (num, length), generator=generator)
    return [{"input_ids": row, "labels": row.clone()} for row in rows]


class HalfLoss(nn.Module):
    """Returns the mean loss in the precision that it computes in."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB)

    def logits(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return self.head(x)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        return F.cross_entropy(self.logits(input_ids).flatten(0, 1), labels.flatten())
