"""Schedule-free AdamW: gradients at one point, and the average of all iterates to be evaluated."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from colotrain.engine.optim.base import OverShards


class ScheduleFreeAdamW(OverShards):
    """AdamW without a schedule (Defazio et al. 2024, "The Road Less Scheduled").

    Three points in the paper's words: `z` takes AdamW's steps, x is the weighted mean of all z, and
    the parameter is y, between them, where gradients are taken: y = β1 x + (1 - β1) z. A step's
    weight is the square of the largest rate so far, so that a warm-up counts little.
    """

    def _update(self) -> None:
        for parameter, grad, state, group in self._updated():
            _move(parameter, grad, state, group)

    def _begin(self, parameter: nn.Parameter, state: dict[str, Any]) -> None:
        state["largest_lr"] = torch.zeros((), dtype=torch.float64)
        state["weight_sum"] = torch.zeros((), dtype=torch.float64)
        state["z"] = parameter.detach().clone()
        state["exp_avg_sq"] = torch.zeros_like(parameter)


def _move(parameter: Tensor, grad: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """Move y and z by one step, and y towards the new mean."""
    (beta1, beta2), lr, z = group["betas"], group["lr"], state["z"]
    share = _share_of_step(state, lr)
    square = state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    root = square.div(1 - beta2 ** state["step"].item()).sqrt_().add_(group["eps"])
    direction = grad / root
    direction.add_(parameter, alpha=group["weight_decay"])
    parameter.lerp_(z, share).add_(direction, alpha=lr * (beta1 * (1 - share) - 1))
    z.sub_(direction, alpha=lr)


def _share_of_step(state: dict[str, Any], lr: float) -> float:
    """Return the weight of this step's z in the mean of all."""
    largest = max(lr, state["largest_lr"].item())
    state["largest_lr"].fill_(largest)
    state["weight_sum"] += largest**2
    return largest**2 / (state["weight_sum"].item() or 1.0)


def averaged(parameter: Tensor, z: Tensor, beta1: float) -> Tensor:
    """Return x, the mean of all iterates, from y and z."""
    return torch.lerp(parameter, z, 1 - 1 / beta1)
