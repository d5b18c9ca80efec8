"""The language model's head and its loss, without holding all logits of a micro-batch at once."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

IGNORE_INDEX = -100
CHUNK_LOGITS = 1 << 22
"""Logits that exist at a time: 16 MiB in float32."""


class Head(nn.Linear):
    """Hidden states to logits, or with `labels` to the summed cross-entropy."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        """Logits [..., vocab] of `x` [..., d]; with `labels` [...] (-100: none) a scalar."""
        if labels is None:
            return F.linear(x, self.weight)
        return cross_entropy(x.flatten(0, -2), self.weight, labels.flatten())


def cross_entropy(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """Σ cross-entropy of the logits `x @ weight.T` over the rows whose label is not -100.

    `x` [rows, d], `weight` [vocab, d], `labels` int64 [rows]; float32, or float64 as `x`.
    Gradients are computed in the forward pass, chunk by chunk, as in "Cut Your Losses in
    Large-Vocabulary Language Models" (Wijmans et al. 2024) and Liger Kernel (Hsu et al. 2024):
    a separate backward pass would compute every logit again.
    """
    total: Tensor = _CrossEntropy.apply(x, weight, labels, torch.is_grad_enabled())
    return total


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, with_grad: bool) -> Tensor:
        exact = torch.promote_types(x.dtype, torch.float32)
        needs_x, needs_weight = (with_grad and needed for needed in ctx.needs_input_grad[:2])
        grad_x = torch.empty_like(x) if needs_x else None
        grad_weight = torch.zeros_like(weight, dtype=exact) if needs_weight else None
        total = torch.zeros((), dtype=exact, device=x.device)
        step = max(1, CHUNK_LOGITS // weight.shape[0])
        for start in range(0, x.shape[0], step):
            rows = slice(start, start + step)
            loss, slope = _chunk(x[rows], weight, labels[rows], exact)
            total += loss
            if grad_x is not None:
                torch.mm(slope, weight, out=grad_x[rows])
            if grad_weight is not None:
                _add_product_(grad_weight, slope.t(), x[rows])
        ctx.gradients, ctx.dtype = (grad_x, grad_weight), weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        grad_x, grad_weight = ctx.gradients
        ctx.gradients = None  # scaled in place to save a copy, so only one backward
        if grad_weight is not None:
            grad_weight = grad_weight.mul_(scale).to(ctx.dtype)
        return None if grad_x is None else grad_x * scale, grad_weight, None, None


def _chunk(x: Tensor, weight: Tensor, labels: Tensor, exact: torch.dtype) -> tuple[Tensor, Tensor]:
    """Summed loss of some rows, and its gradient with respect to their logits, in `x`'s dtype."""
    logits = F.linear(x, weight).to(exact)
    valid = labels != IGNORE_INDEX
    index = labels.where(valid, 0).unsqueeze(1)
    logits -= logits.amax(1, keepdim=True)
    picked = logits.gather(1, index)
    sums = logits.exp_().sum(1, keepdim=True)
    loss = ((sums.log() - picked).squeeze(1) * valid).sum()
    slope = logits.div_(sums)
    slope.scatter_add_(1, index, torch.full_like(picked, -1.0))
    slope *= valid.unsqueeze(1)
    return loss, slope.to(x.dtype)


def _add_product_(out: Tensor, left: Tensor, right: Tensor) -> None:
    if left.dtype == out.dtype:
        out.addmm_(left, right)
    else:
        out += left @ right
