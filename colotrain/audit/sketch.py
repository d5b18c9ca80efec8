"""Sketches of tensors: a few linear sums by which gradients of several ranks are compared.

A sketch is linear, so the mean of the ranks' sketches is the sketch of their mean gradient, and no
rank has to communicate. Each element has a sign that is a function of its position; a sketch holds
the signed sums over `SUMS` interleaved parts. Two tensors that differ have different sketches,
unless their differences cancel in every part (Charikar, Chen, Farach-Colton 2002).
"""

from __future__ import annotations

import base64
from array import array
from functools import lru_cache

import torch
from torch import Tensor

SUMS = 64
SEED = 20_231_117


def sketch(tensor: Tensor) -> Tensor:
    """Return the sketch of a whole tensor: at most `SUMS` float64 numbers, on its device."""
    flat = tensor.detach().reshape(-1)
    if flat.numel() <= SUMS:
        return flat.to(torch.float64)
    rest = -flat.numel() % SUMS
    signed = flat.to(torch.float64) * _signs(flat.numel(), str(flat.device))
    return torch.nn.functional.pad(signed, (0, rest)).view(-1, SUMS).sum(0)


@lru_cache(maxsize=4096)
def _signs(length: int, device: str) -> Tensor:
    draw = torch.Generator().manual_seed(SEED + length)  # the script's generator is not touched
    return (torch.randint(0, 2, (length,), generator=draw, dtype=torch.int8) * 2 - 1).to(device)


def packed(values: Tensor) -> str:
    """Return a sketch as text."""
    return base64.b64encode(array("d", values.tolist()).tobytes()).decode()
