"""Optimizers as people write them for whole tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class TrustRatio(torch.optim.Optimizer):
    """LARS's ratio of norms, as Python numbers."""

    def __init__(self, params: Iterable[Tensor], lr: float, **_: Any) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                norm, of_gradient = p.norm().item(), float(p.grad.norm())
                ratio = norm / of_gradient if norm and of_gradient and p.grad.abs().max() > 0 else 1
                p.add_(p.grad, alpha=-group["lr"] * ratio)


class Rebinding(TrustRatio):
    """Plain SGD in the old habit."""

    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = p.data - group["lr"] * p.grad


class TwoRates(torch.optim.SGD):
    """Gives vectors another rate than matrices, in groups of its own."""

    def __init__(self, params: Iterable[Any], lr: float, *, carry: bool = True) -> None:
        groups = []
        for given in params:
            kept = {k: v for k, v in given.items() if k != "params"} if carry else {}
            for factor, is_vector in ((1.0, False), (20.0, True)):
                chosen = [p for p in given["params"] if (p.ndim < 2) == is_vector]
                if chosen:
                    groups.append({**kept, "params": chosen, "lr": factor * lr})
        super().__init__(groups, lr=lr)


class OneNorm(torch.optim.SGD):
    """Clips by the norm over all of its parameters."""

    def step(self, closure: None = None) -> None:
        params = [p for group in self.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(params, 5.0)
        super().step()


class Noisy(torch.optim.SGD):
    """Adds noise to each update."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn_like(p), alpha=group["lr"])


class Counting(torch.optim.SGD):
    """Counts its steps in its groups."""

    def step(self, closure: None = None) -> None:
        super().step()
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1


class NeverEmpty(torch.optim.SGD):
    """Looks at its first parameter."""

    def step(self, closure: None = None) -> None:
        assert self.param_groups[0]["params"][0].ndim
        super().step()
