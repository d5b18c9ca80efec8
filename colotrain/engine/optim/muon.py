"""Muon: matrices of layers get an orthogonal update, for which each is put together."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from colotrain.engine.optim.base import Layout, batches, with_gradients
from colotrain.torch_internals import interpolate, interpolate_, multiply_

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic iteration (Jordan et al. 2024), as in torch's Muon."""
NEWTON_SCHULZ_STEPS = 5
MUON_EPS = 1e-7


class Muon(torch.optim.Optimizer):
    """Orthogonalised momentum (Jordan et al. 2024) for hidden matrices, AdamW for the others.

    Momentum is sharded like the parameter. Every rank gathers each matrix for the iteration and
    keeps its own rows of the result. Steps are scaled to AdamW's size (0.2 √ of the larger side;
    Liu et al. 2025), so that one learning rate serves both. All ranks must step alike.
    """

    def __init__(
        self,
        params: Any,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        layout: Layout,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "is_hidden": False})
        self.layout = layout

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "gradients are there already"
        for group in self.param_groups:
            if group["is_hidden"]:
                for batch in batches(self, group):
                    self._orthogonal(*batch, group)
            else:
                self._adamw(group)

    def _orthogonal(
        self,
        parameters: list[nn.Parameter],
        grads: list[Tensor],
        states: list[dict[str, Any]],
        group: dict[str, Any],
    ) -> None:
        """torch.optim.Muon's update, Nesterov momentum included."""
        momentum = group["betas"][1]
        for grad, state in zip(grads, states, strict=True):
            if not state:
                state["momentum_buffer"] = torch.zeros_like(grad)
        buffers = [state["momentum_buffer"] for state in states]
        interpolate_(buffers, grads, 1 - momentum)
        directions = interpolate(grads, buffers, momentum)
        multiply_([*parameters], 1 - group["lr"] * group["weight_decay"])
        for parameter, direction in zip(parameters, directions, strict=True):
            whole = self.layout.gather(parameter, direction)
            update = self.layout.own_rows(parameter, orthogonalise(whole))
            scale = 0.2 * math.sqrt(max(whole.shape))
            parameter.add_(update.to(parameter.dtype), alpha=-group["lr"] * scale)

    def _adamw(self, group: dict[str, Any]) -> None:
        found = list(with_gradients(self, group))
        for parameter, _, state in found:
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        if found:
            beta1, beta2 = group["betas"]
            adamw(
                [parameter for parameter, _, _ in found],
                [grad for _, grad, _ in found],
                [state["exp_avg"] for *_, state in found],
                [state["exp_avg_sq"] for *_, state in found],
                [],
                [state["step"] for *_, state in found],
                foreach=True,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )


def orthogonalise(matrix: Tensor) -> Tensor:
    """Return U Vᵀ of `matrix` = U Σ Vᵀ, approximately, in bfloat16 as torch.optim.Muon does."""
    a, b, c = NEWTON_SCHULZ
    x = matrix.bfloat16()
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / x.norm().clamp(min=MUON_EPS)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x
