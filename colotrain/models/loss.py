"""The language model's head and its loss, without holding all logits of a micro-batch at once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from colotrain.spec.objectives import IGNORE_INDEX

CHUNK_LOGITS = 1 << 22
"""Logits that exist at a time on the CPU: 16 MiB in float32, which its caches almost hold."""
LEAST_ROWS = 0.25
"""Least rows of a chunk on the CPU, as a multiple of the head's width. Each chunk reads the head
and adds to its gradient, which with fewer rows takes longer than the products; this many take a
quarter of that gradient's memory (`benchmarks/loss.py`)."""
GPU_CHUNK_LOGITS = 1 << 26
"""Logits that exist at a time on a GPU, 256 MiB in float32: 2,048 rows of 32,768. With few rows
each matmul reads all of the head's weight, and adds to all of its gradient, for little work."""
_device_type: ContextVar[str | None] = ContextVar("device_type", default=None)
_by_token: ContextVar[bool] = ContextVar("by_token", default=False)
Compute = Callable[[Tensor, Tensor, Tensor | None, Tensor, "Logits", "Vocabulary | None"], Tensor]
"""(hidden states, head's weight, its bias, labels, what logits are, the rank's part of the
vocabulary) → what stands for the loss."""
_compute: ContextVar[Compute | None] = ContextVar("compute", default=None)


@contextmanager
def computing_as(device_type: str) -> Iterator[None]:
    """Divide the loss into the chunks of a device of this type, on the meta device too."""
    before = _device_type.set(device_type)
    try:
        yield
    finally:
        _device_type.reset(before)


def device_type_of(tensor: Tensor) -> str:
    """The type of the tensor's device, within `computing_as` of the one that stands for."""
    return _device_type.get() or tensor.device.type


@contextmanager
def by_token() -> Iterator[None]:
    """Let `cross_entropy` return the loss of each row instead of their sum."""
    before = _by_token.set(True)
    try:
        yield
    finally:
        _by_token.reset(before)


@contextmanager
def computing(compute: Compute) -> Iterator[None]:
    """Let `cross_entropy` return what `compute` makes of its arguments."""
    before = _compute.set(compute)
    try:
        yield
    finally:
        _compute.reset(before)


def computed_by() -> Compute | None:
    """What computes in place of `cross_entropy`."""
    return _compute.get()


def is_by_token() -> bool:
    return _by_token.get()


def reduction() -> str:
    """What torch's `cross_entropy` calls the sum, or within `by_token` no sum."""
    assert _compute.get() is None, "this model computes all logits, which is refused"
    return "none" if is_by_token() else "sum"


def rows_at_once(weight: Tensor) -> int:
    """Return the rows of a chunk for a head of weight [vocab, d]."""
    vocab_size, width = weight.shape
    if device_type_of(weight) != "cpu":
        return max(1, GPU_CHUNK_LOGITS // vocab_size)
    return max(1, CHUNK_LOGITS // vocab_size, int(LEAST_ROWS * width))


@dataclass(frozen=True, slots=True, kw_only=True)
class Logits:
    """What a model does with the products of its head before they are logits."""

    scale: float = 1.0
    """Factor of the products."""
    cap: float | None = None
    """The scaled products x become cap · tanh(x / cap)."""


class Vocabulary(Protocol):
    """The part of the vocabulary that a rank has logits of, where ranks divide it."""

    def at(self, values: Tensor, tokens: Tensor) -> Tensor:
        """Values [rows, n] of `tokens` [rows, n] of the whole vocabulary; all ranks must call."""

    def put_(self, values: Tensor, tokens: Tensor, given: Tensor) -> Tensor:
        """Write `given` [rows, n] to those of the tokens that are in the part."""

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the whole vocabulary [rows]; all ranks must call."""

    def log_softmax(self, logits: Tensor) -> Tensor:
        """Log-probabilities of the part's tokens; all ranks must call."""


PRODUCTS = Logits()
"""The products themselves are the logits."""


class Head(nn.Linear):
    """Hidden states to logits, or with `labels` to the cross-entropy."""

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        """Logits [..., vocab] of `x` [..., d]; with `labels` [...] (-100: none) `cross_entropy`."""
        if labels is None:
            return F.linear(x, self.weight)
        return cross_entropy(x.flatten(0, -2), self.weight, labels.flatten())


def cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    logits: Logits = PRODUCTS,
) -> Tensor:
    """Σ cross-entropy of the logits of `x @ weight.T + bias` over the rows whose label is not -100.

    Within `by_token` the result is [rows], 0 where the label is -100.
    `x` [rows, d], `weight` [vocab, d], `labels` int64 [rows]; float32, or float64 as `x`.
    Gradients are computed in the forward pass, chunk by chunk, as in "Cut Your Losses in
    Large-Vocabulary Language Models" (Wijmans et al. 2024) and Liger Kernel (Hsu et al. 2024):
    a separate backward pass would compute every logit again.
    """
    if (compute := computed_by()) is not None:
        return compute(x, weight, bias, labels, logits, None)
    chunk = functools.partial(_chunk, shape=logits)
    if is_by_token():
        losses_of = functools.partial(_losses, shape=logits)
        return each_in_chunks(x, weight, bias, labels, losses_of, chunk)
    return in_chunks(x, weight, bias, labels, chunk)


Chunk = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(products of some rows, in the dtype of the hidden states, which it may overwrite, labels) → loss
of each row, gradient of the products."""


def in_chunks(x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, of: Chunk) -> Tensor:
    """Σ of the losses that `of` computes for a few rows of `x @ weight.T + bias` at a time."""
    total: Tensor = _InChunks.apply(x, weight, bias, labels, of, torch.is_grad_enabled())
    return total


class _InChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        loss_of: Chunk,
        with_grad: bool,
    ) -> Tensor:
        exact = exact_dtype(x)
        needs_x, needs_weight, needs_bias = (with_grad and n for n in ctx.needs_input_grad[:3])
        grad_x = torch.empty_like(x) if needs_x else None
        grad_weight = torch.zeros_like(weight, dtype=exact) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=exact) if needs_bias else None  # type: ignore
        total = torch.zeros((), dtype=exact, device=x.device)
        step = rows_at_once(weight)
        for start in range(0, x.shape[0], step):
            rows = slice(start, start + step)
            products = F.linear(x[rows], weight, bias)
            losses, slope = loss_of(products, labels[rows])
            total += losses.sum()
            into = None if grad_x is None else grad_x[rows]
            _add_gradients_(slope.to(x.dtype), x[rows], weight, into, grad_weight, grad_bias)
            del products, slope  # before the next chunk's exist
        ctx.gradients, ctx.dtype = (grad_x, grad_weight, grad_bias), weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, *of_parameters = ctx.gradients
        ctx.gradients = None  # scaled in place to save a copy, so only one backward
        scaled = (None if g is None else g.mul_(scale).to(ctx.dtype) for g in of_parameters)
        return None if grad_x is None else grad_x.mul_(scale), *scaled, None, None, None


Losses = Callable[[Tensor, Tensor], Tensor]
"""(products of some rows, labels) → loss of each row in float64, 0 where there is no label."""


def each_in_chunks(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, losses_of: Losses, of: Chunk
) -> Tensor:
    """The loss of each row of `x @ weight.T + bias`, in float64, for a few rows at a time.

    Float64, for what is made of it are differences of long sums. Backward, which knows the rows'
    weights, computes the logits again; gradients are those that `of` computes of them.
    """
    each: Tensor = _EachInChunks.apply(x, weight, bias, labels, losses_of, of)
    return each


class _EachInChunks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        losses_of: Losses,
        of: Chunk,
    ) -> Tensor:
        losses = torch.empty(len(x), dtype=torch.float64, device=x.device)
        step = rows_at_once(weight)
        for start in range(0, len(x), step):
            rows = slice(start, start + step)
            losses[rows] = losses_of(F.linear(x[rows], weight, bias), labels[rows])
        ctx.save_for_backward(x, weight, bias, labels)
        ctx.slope_of = of
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scales: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, labels = ctx.saved_tensors
        exact = exact_dtype(x)
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_x = torch.empty_like(x) if needs_x else None
        grad_weight = torch.zeros_like(weight, dtype=exact) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=exact) if needs_bias else None
        step = rows_at_once(weight)
        for start in range(0, len(x), step):
            rows = slice(start, start + step)
            products = F.linear(x[rows], weight, bias).to(exact)  # so that the slope is exact
            _, slope = ctx.slope_of(products, labels[rows])
            slope *= scales[rows].unsqueeze(1).to(slope.dtype)
            into = None if grad_x is None else grad_x[rows]
            _add_gradients_(slope.to(x.dtype), x[rows], weight, into, grad_weight, grad_bias)
            del products, slope
        of_parameters = (g if g is None else g.to(weight.dtype) for g in (grad_weight, grad_bias))
        return grad_x, *of_parameters, None, None, None


def _losses(products: Tensor, labels: Tensor, shape: Logits) -> Tensor:
    """Losses of some rows; the products are lost."""
    logits, _ = shape_(products.to(exact_dtype(products)), shape)
    valid = labels != IGNORE_INDEX
    picked = logits.gather(1, labels.where(valid, 0).unsqueeze(1)).squeeze(1)
    top = logits.amax(1)
    logits -= top.unsqueeze(1)
    sums = logits.exp_().sum(1)
    return (sums.double().log() + (top.double() - picked.double())) * valid


def _add_gradients_(
    slope: Tensor,
    x: Tensor,
    weight: Tensor,
    grad_x: Tensor | None,
    grad_weight: Tensor | None,
    grad_bias: Tensor | None,
) -> None:
    """From the gradient of some rows' products write `grad_x`, and add to the other two."""
    if grad_x is not None:
        torch.mm(slope, weight, out=grad_x)
    if grad_weight is not None:
        _add_product_(grad_weight, slope.t(), x)
    if grad_bias is not None:
        grad_bias += slope.sum(0, dtype=grad_bias.dtype)


def _chunk(products: Tensor, labels: Tensor, shape: Logits) -> tuple[Tensor, Tensor]:
    """Losses of some rows, and their gradients with respect to the products, which are lost.

    A GPU spends its time here on reading and writing all logits. So in half precision few
    operations do: a cast, the log-probabilities, and the gradient, which takes the place of the
    products. In full precision logarithms would triple the rounding of probabilities.
    """
    logits, damping = shape_(products.to(exact_dtype(products)), shape)
    valid = labels != IGNORE_INDEX
    index = labels.where(valid, 0).unsqueeze(1)
    if logits.dtype == products.dtype:  # nothing rounds the gradient afterwards
        logits -= logits.amax(1, keepdim=True)
        picked = logits.gather(1, index)
        sums = logits.exp_().sum(1, keepdim=True)
        picked -= sums.log()
        slope = logits.div_(sums)
    else:
        logs = torch.log_softmax(logits, 1, out=logits)
        picked = logs.gather(1, index)
        slope = torch.exp(logs, out=products if shape == PRODUCTS else logs)
    losses = torch.where(valid, -picked.squeeze(1), 0.0)
    slope.scatter_(1, index, picked.expm1_().to(slope.dtype))  # p - 1, exact where p is near 1
    slope.masked_fill_(~valid.unsqueeze(1), 0.0)
    if damping is not None:
        slope *= damping
    return losses, slope if shape.scale == 1.0 else slope.mul_(shape.scale)


def exact_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype that losses of `tensor` are computed in: float32, or its own if that is wider."""
    return torch.promote_types(tensor.dtype, torch.float32)


def shape_(products: Tensor, shape: Logits) -> tuple[Tensor, Tensor | None]:
    """The logits, in the memory of the products, and the derivative of the cap if there is one."""
    if shape.cap is None:
        return products if shape.scale == 1.0 else products.mul_(shape.scale), None
    bent = products.mul_(shape.scale / shape.cap).tanh_()
    damping = torch.addcmul(bent.new_ones(()), bent, bent, value=-1.0)
    return bent.mul_(shape.cap), damping


def _add_product_(out: Tensor, left: Tensor, right: Tensor) -> None:
    if left.dtype == out.dtype:
        out.addmm_(left, right)
    else:
        out += left @ right
