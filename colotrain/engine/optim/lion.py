"""Lion: one moment per element, of which a step is the sign."""

from __future__ import annotations

import torch

from colotrain.engine.optim.base import OverShards, batches
from colotrain.torch_internals import interpolate, interpolate_, multiply_, signs_, subtract_


class Lion(OverShards):
    """Sign of interpolated momentum, with decoupled weight decay (Chen et al. 2023)."""

    def _update(self) -> None:
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
