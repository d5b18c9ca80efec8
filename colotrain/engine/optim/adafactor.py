"""Adafactor: moments of rows and columns, of which the latter are summed over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from colotrain.engine.optim.base import Layout, with_gradients


class Adafactor(torch.optim.Optimizer):
    """torch.optim.Adafactor (Shazeer and Stern 2018) over shards of rows.

    A matrix's second moments are kept per row, where a rank has those of its own rows, and per
    column, where they are sums over all ranks and the same on each. All ranks must step alike.
    """

    BETA2_DECAY, EPS, LARGEST_RMS = -0.8, 1e-3, 1.0

    def __init__(
        self, params: Any, *, lr: float, layout: Layout, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self.layout = layout

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "gradients are there already"
        for group in self.param_groups:
            found = list(with_gradients(self, group))
            if not found:
                continue
            sums = [self._moments(parameter, grad, state) for parameter, grad, state in found]
            self._total([p for p, *_ in found], [tensor for part in sums for tensor in part], 3)
            updates = [
                self._direction(p, grad, state, part)
                for (p, grad, state), part in zip(found, sums, strict=True)
            ]
            squares = [update.double().square().sum().reshape(1) for update in updates]
            self._total([p for p, *_ in found], squares, 1)
            for (p, _, state), update, part, square in zip(
                found, updates, sums, squares, strict=True
            ):
                self._apply(p, update, group, state, part[0], square)

    def _moments(
        self, parameter: nn.Parameter, grad: Tensor, state: dict[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Update this rank's state; returns its part of Σ p², Σ row moments, Σ over rows of g²."""
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            if grad.ndim > 1:
                state["row_var"] = torch.zeros_like(grad[..., :1])
                state["col_var"] = grad.new_zeros((*self._leading(grad), 1, grad.shape[-1]))
            else:
                state["variance"] = torch.zeros_like(grad)
        state["step"] += 1
        norm = parameter.double().square().sum().reshape(1)
        nothing = norm.new_zeros(0)
        if grad.ndim < 2:
            state["variance"].lerp_(grad.square(), self._weight(state))
            return norm, nothing, nothing
        state["row_var"].lerp_(grad.square().mean(-1, keepdim=True), self._weight(state))
        columns = grad.double().square().sum(-2).flatten()
        return norm, state["row_var"].double().sum(-2).flatten(), columns

    @staticmethod
    def _leading(grad: Tensor) -> tuple[int, ...]:
        """Return the dimensions before the matrix; if there are any, the first one is sharded."""
        return tuple(grad.shape[:-2])

    def _weight(self, state: dict[str, Any]) -> float:
        return float(state["step"].item() ** self.BETA2_DECAY)

    def _total(self, parameters: list[nn.Parameter], parts: list[Tensor], each: int) -> None:
        """Sum `parts`, `each` per parameter, over the ranks, in one collective.

        Parts that are complete on this rank stay as they are (unsharded, or of its own rows).
        """
        shared = []
        for index, part in enumerate(parts):
            parameter = parameters[index // each]
            within = index % each > 0 and parameter.ndim > 2
            if self.layout.num_rows(parameter) is not None and not within:
                shared.append(part)
        if shared:
            flat = torch.cat(shared)
            self.layout.sum_(flat)
            for part, total in zip(shared, flat.split([p.numel() for p in shared]), strict=True):
                part.copy_(total)

    def _direction(
        self,
        parameter: nn.Parameter,
        grad: Tensor,
        state: dict[str, Any],
        sums: tuple[Tensor, Tensor, Tensor],
    ) -> Tensor:
        """Return the gradient divided by the root of its estimated second moment."""
        tiny = torch.finfo(parameter.dtype).eps
        if grad.ndim < 2:
            estimate = state["variance"].clone()
        else:
            rows = grad.shape[-2]
            if grad.ndim == 2:
                rows = self.layout.num_rows(parameter) or rows
            _, row_sum, columns = sums
            shape = state["col_var"].shape
            state["col_var"].lerp_((columns / rows).view(shape).to(grad.dtype), self._weight(state))
            mean = (row_sum / rows).view(*shape[:-1], 1).to(grad.dtype)
            estimate = state["row_var"] @ state["col_var"] / mean.clamp(min=tiny)
        return estimate.clamp_(min=tiny * tiny).rsqrt_().mul_(grad)

    def _apply(
        self,
        parameter: nn.Parameter,
        update: Tensor,
        group: dict[str, Any],
        state: dict[str, Any],
        norm: Tensor,
        square: Tensor,
    ) -> None:
        rows = self.layout.num_rows(parameter)
        numel = max(1, parameter.numel())  # a rank may hold no row
        if rows is not None:
            numel = rows * math.prod(parameter.shape[1:])
        rate = (norm / numel).sqrt().clamp(min=self.EPS)  # on the device: the host need not wait
        rate *= min(group["lr"], state["step"].item() ** -0.5)
        rate /= ((square / numel).sqrt() / self.LARGEST_RMS).clamp(min=1.0)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.sub_(update.mul_(rate.squeeze(0)))
