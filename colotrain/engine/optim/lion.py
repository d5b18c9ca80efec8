"""Lion: one moment per element, of which a step is the sign."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from colotrain.engine.optim.base import batches
from colotrain.torch_internals import interpolate, interpolate_, multiply_, signs_, subtract_


class Lion(torch.optim.Optimizer):
    """Sign of interpolated momentum, with decoupled weight decay (Chen et al. 2023)."""

    def __init__(
        self, params: Any, *, lr: float, betas: tuple[float, float], weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "gradients are there already"
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameters, grads, states in batches(self, group):
                for parameter, state in zip(parameters, states, strict=True):
                    if not state:
                        state["exp_avg"] = torch.zeros_like(parameter)
                averages = [state["exp_avg"] for state in states]
                multiply_([*parameters], 1 - group["lr"] * group["weight_decay"])
                signs_(updates := interpolate(averages, grads, 1 - beta1))
                subtract_([*parameters], updates, alpha=group["lr"])
                interpolate_(averages, grads, 1 - beta2)
