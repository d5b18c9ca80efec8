"""A model of a number for each sample, with metrics: a mean, a pair, and one that is neither."""

from typing import Any

import torch
from torch import Tensor, nn


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = block(x).tanh()
        found = self.head(x)
        return {"loss": (found - y).square().mean(), "found": found}


class Samples(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return {"x": x, "y": x.sum(0, keepdim=True)}


def _errors(batch: dict[str, Tensor], output: Any) -> Tensor:
    return (output["found"] - batch["y"]).abs()


def means(batch: dict[str, Tensor], output: Any) -> dict[str, Any]:
    errors = _errors(batch, output)
    return {"mean": errors.mean(), "large": ((errors > 1).sum(), errors.numel())}


def largest(batch: dict[str, Tensor], output: Any) -> dict[str, Any]:
    return {"largest": _errors(batch, output).max()}
