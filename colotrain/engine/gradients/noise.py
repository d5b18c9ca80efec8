"""Gradient noise: how far the micro-batches of a step agree, from their norms before reduction.

Let g_i be the gradient of micro-batch i alone, of b samples, and G the mean of all n of them. Then
(McCandlish et al. 2018, "An Empirical Model of Large-Batch Training", appendix A.1)
    |true gradient|² ≈ (n |G|² − mean |g_i|²) / (n − 1)
    noise = trace of the samples' covariance ≈ b n (mean |g_i|² − |G|²) / (n − 1)
    noise scale = noise / |true gradient|²: the batch, in samples, up to which more samples pay

and the mean cosine between two of the g_i is (n² |G|² − Σ |g_i|²) / ((Σ |g_i|)² − Σ |g_i|²).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from colotrain.engine.gradients.accumulation import Batch, StepTotals, accumulate
from colotrain.engine.gradients.gradients import GradientState, unsharded_parameters
from colotrain.events.gradients import NoiseColumns


class Norms:
    """Σ g² of every parameter in every micro-batch of this rank."""

    def __init__(self, state: GradientState) -> None:
        self.state = state
        self.index = {name: i for i, name in enumerate(state.names)}
        self.squares: list[Tensor] = []
        """One tensor, float64 [parameters], per micro-batch."""

    def count(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        for batch in batches:
            self.squares.append(torch.zeros(len(self.index), dtype=torch.float64))
            yield batch

    @contextmanager
    def on(self) -> Iterator[None]:
        handles = [
            whole.register_hook(self._add(self.index[name]))
            for name, whole in unsharded_parameters(self.state)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _add(self, index: int) -> Any:
        def hook(grad: Tensor) -> None:
            dtype = torch.promote_types(grad.dtype, torch.float32)
            norm = torch.linalg.vector_norm(grad, dtype=dtype)
            self.squares[-1][index] += norm.double().square().cpu()

        return hook

    def sums(self) -> Tensor:
        """Return float64 [2, parameters + 1]: Σ |g_i|² and Σ |g_i|; the last column is of all."""
        each = torch.stack(self.squares)
        each = torch.cat((each, each.sum(1, keepdim=True)), dim=1)
        return torch.stack((each.sum(0), each.sqrt().sum(0)))


def measure(
    state: GradientState, batches: Iterable[Batch], *, num: int, totals: StepTotals, samples: int
) -> dict[str, Any]:
    """Run the step's `num` micro-batches of `samples` again; returns `noise` of a gradient record.

    All ranks must call, after they agreed on the step and before its update. Afterwards the
    gradients are those of the step again.
    """
    norms = Norms(state)
    with norms.on():
        accumulate(state, norms.count(batches), num=num, totals=totals)
    device = torch.device(state.sharded.comms.device)
    shared = norms.sums().to(device)
    dist.all_reduce(shared)
    n = num * state.sharded.comms.ranks.readers
    scale = n * state.factor  # factor · stored is a micro-batch's share of the sum
    squares, lengths = (shared.cpu() * torch.tensor([[scale**2], [scale]])).tolist()
    wholes = [*(state.norms[name] for name in state.names), state.norm]
    found = [
        estimate(n=n, samples=samples, whole=whole, squares=square, lengths=length)
        for whole, square, length in zip(wholes, squares, lengths, strict=True)
    ]
    columns = NoiseColumns(
        micro_batches=n,
        samples=samples,
        scale=found[-1][0],
        cosine=found[-1][1],
        scales=[scale for scale, _ in found[:-1]],
        cosines=[cosine for _, cosine in found[:-1]],
    )
    return columns.fields()


def estimate(
    *, n: int, samples: int, whole: float, squares: float, lengths: float
) -> tuple[float | None, float | None]:
    """Return (noise scale in samples, mean cosine) of n gradients, from |G|, Σ |g_i|² and Σ |g_i|.

    None where they cannot be estimated: fewer than two gradients, all zero, or only noise.
    """
    pairs = lengths**2 - squares
    if n < 2 or not math.isfinite(squares) or pairs <= 0:
        return None, None
    signal = (n * whole**2 - squares / n) / (n - 1)
    noise = samples * n * (squares / n - whole**2) / (n - 1)
    cosine = (n**2 * whole**2 - squares) / pairs
    return (max(noise, 0.0) / signal if signal > 0 else None), max(-1.0, min(1.0, cosine))
