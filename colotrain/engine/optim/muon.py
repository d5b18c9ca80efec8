"""Muon: matrices of layers get an orthogonal update, for which each is put together on one rank."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from colotrain.engine.optim.base import OverShards, batches, with_gradients
from colotrain.engine.optim.matrix_owners import Exchange
from colotrain.spec.optimizers import NEWTON_SCHULZ_STEPS, rounds_of
from colotrain.torch_internals import interpolate_

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic iteration (Jordan et al. 2024), as in torch's Muon."""
MUON_EPS = 1e-7
Hidden = tuple[nn.Parameter, Tensor, dict[str, Any]]
"""A matrix of a layer, its gradient and its parameter group."""


class Muon(OverShards):
    """Orthogonalised momentum (Jordan et al. 2024) for hidden matrices, AdamW for the others.

    Momentum is divided like the parameter. Each matrix is put together on one rank, which iterates
    and sends every rank its part of the result, both in bfloat16. Steps are scaled to AdamW's size
    (0.2 √ of the larger side; Liu et al. 2025), so that one learning rate serves both. All ranks
    must step alike.
    """

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, is_hidden=False, **settings)

    def _update(self) -> None:
        hidden: list[Hidden] = []
        for group in self.param_groups:
            if group["is_hidden"]:
                self._average(group)
                hidden += [(p, grad, group) for p, grad, _ in with_gradients(self, group)]
            else:
                self._adamw(group)
        self._update_hidden(hidden)

    def _average(self, group: dict[str, Any]) -> None:
        """Update the momentum of a group's matrices."""
        for _, grads, states in batches(self, group):
            for grad, state in zip(grads, states, strict=True):
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(grad)
            buffers = [state["momentum_buffer"] for state in states]
            interpolate_(buffers, grads, 1 - group["betas"][1])

    def _update_hidden(self, hidden: list[Hidden]) -> None:
        """Update matrices, each of which one of the ranks that divide it makes orthogonal."""
        hidden = [each for each in hidden if self.layout.whole_shape(each[0]).numel()]
        shapes = [self.layout.whole_shape(parameter) for parameter, *_ in hidden]
        ranks = self.layout.group()
        for pairs in rounds_of(shapes, 1 if ranks is None else ranks.size()):
            chosen = [hidden[index] for index, _ in pairs]
            parts = [self.layout.parts(parameter) for parameter, *_ in chosen]
            self._update_round(chosen, Exchange(ranks, parts, [owner for _, owner in pairs]))

    def _update_round(self, chosen: list[Hidden], exchange: Exchange) -> None:
        """torch.optim.Muon's update, Nesterov momentum included, of one round's matrices."""
        parts = [
            torch.lerp(grad, self.state[p]["momentum_buffer"], group["betas"][1]).bfloat16()
            for p, grad, group in chosen
        ]
        like = parts[0].new_empty(0)
        whole = exchange.to_owners(parts)
        del parts  # before what is computed from them exists
        if whole is not None:
            whole = orthogonalise(whole)
        updates = exchange.to_ranks(whole, like)
        del whole
        for (parameter, _, group), update in zip(chosen, updates, strict=True):
            scale = 0.2 * math.sqrt(max(self.layout.whole_shape(parameter)))
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
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
