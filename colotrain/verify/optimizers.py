"""The reference's optimizers: torch's own wherever it has one, one for each parameter."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from colotrain.dotted import import_target
from colotrain.spec.plan import OptimPlan


def optimizer_of(name: str, parameter: nn.Parameter, plan: OptimPlan) -> torch.optim.Optimizer:
    """Optimizer of one parameter. Its learning rate is `plan.lr` times `lr_scale` of a rule."""
    lr, decay = plan.lr, plan.weight_decay if parameter.ndim >= 2 else 0.0
    for rule in plan.rules:
        if fnmatch.fnmatch(name, rule.match):
            lr = plan.lr * rule.lr_scale if rule.lr_scale is not None else lr
            decay = rule.weight_decay if rule.weight_decay is not None else decay
    group: dict[str, Any] = {"params": [parameter], "lr": lr, "weight_decay": decay}
    betas = (plan.betas[0], plan.betas[-1])
    if plan.name == "sgd":
        return torch.optim.SGD([group], momentum=plan.betas[0])
    if plan.name == "adafactor":
        return torch.optim.Adafactor([group])
    if plan.name == "lion":
        return PlainLion([group], {"betas": betas})
    if plan.name == "muon" and parameter.ndim == 2 and re.search(r"(^|\.)[0-9]+\.", name):
        return torch.optim.Muon([group], momentum=betas[1], adjust_lr_fn="match_rms_adamw")
    if plan.name in ("adamw", "muon"):
        return torch.optim.AdamW([group], betas=betas, eps=plan.eps)
    own = import_target("optim.name", plan.name)([group], lr=lr, **plan.args)
    assert isinstance(own, torch.optim.Optimizer), "checked when the plan was made"
    return own


class PlainLion(torch.optim.Optimizer):
    """Lion as in its paper (Chen et al. 2023, algorithm 2), since torch has none."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (beta1, beta2), rate, decay = group["betas"], group["lr"], group["weight_decay"]
            for weight in group["params"]:
                gradient: Tensor = weight.grad
                if gradient is None:
                    continue
                moment = self.state[weight].get("m", torch.zeros_like(weight))
                direction = torch.sign(beta1 * moment + (1 - beta1) * gradient)
                weight.copy_(weight - rate * (direction + decay * weight))
                self.state[weight]["m"] = beta2 * moment + (1 - beta2) * gradient
