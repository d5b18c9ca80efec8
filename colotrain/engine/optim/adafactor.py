"""Adafactor: moments of rows and columns, which are summed over the ranks that divide these."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from colotrain.engine.optim.base import OverShards, with_gradients
from colotrain.spec.axes import COPY, Axis

Sums = list[tuple[Tensor, tuple[Axis, ...]]]
"""Parts of sums, and the axes along which the ranks have the others."""


class Adafactor(OverShards):
    """torch.optim.Adafactor (Shazeer and Stern 2018) over parts of parameters.

    A matrix's second moments are kept per row and per column. A rank has those of its own rows and
    columns, which are sums over the ranks that divide a row or a column, and the same on each of
    them. All ranks must step alike.
    """

    BETA2_DECAY, EPS, LARGEST_RMS = -0.8, 1e-3, 1.0

    def _update(self) -> None:
        for group in self.param_groups:
            found = list(with_gradients(self, group))
            rows = [self._begun(parameter, grad, state) for parameter, grad, state in found]
            self._total(rows)
            sums = [
                self._moments(parameter, grad, state, row)
                for (parameter, grad, state), (row, _) in zip(found, rows, strict=True)
            ]
            self._total([each for part in sums for each in part])
            updates = [
                self._direction(p, grad, state, part)
                for (p, grad, state), part in zip(found, sums, strict=True)
            ]
            squares: Sums = [
                (update.double().square().sum().reshape(1), self._across(p))
                for (p, *_), update in zip(found, updates, strict=True)
            ]
            self._total(squares)
            for (p, _, state), update, part, (square, _) in zip(
                found, updates, sums, squares, strict=True
            ):
                self._apply(p, update, group, state, part[0][0], square)

    def _begun(
        self, parameter: nn.Parameter, grad: Tensor, state: dict[str, Any]
    ) -> tuple[Tensor, tuple[Axis, ...]]:
        """Begin a step of this rank's state; returns its part of the mean of g² over each row."""
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            if grad.ndim > 1:
                state["row_var"] = torch.zeros_like(grad[..., :1])
                state["col_var"] = grad.new_zeros((*grad.shape[:-2], 1, grad.shape[-1]))
            else:
                state["variance"] = torch.zeros_like(grad)
        state["step"] += 1
        if grad.ndim < 2:
            return grad.new_zeros(0), ()
        axes, whole = self._across(parameter, -1), self.layout.whole_shape(parameter)[-1]
        if not axes:
            return grad.square().mean(-1, True), axes
        return grad.double().square().sum(-1, True) / whole, axes

    def _moments(
        self, parameter: nn.Parameter, grad: Tensor, state: dict[str, Any], row: Tensor
    ) -> Sums:
        """Update row moments; returns parts of Σ p², Σ row moments, Σ over rows of g²."""
        norm = parameter.double().square().sum().reshape(1), self._across(parameter)
        if grad.ndim < 2:
            state["variance"].lerp_(grad.square(), self._weight(state))
            return [norm]
        state["row_var"].lerp_(row.to(grad.dtype), self._weight(state))
        columns = grad.double().square().sum(-2).flatten()
        rows = state["row_var"].double().sum(-2).flatten()
        across = self._across(parameter, -2)
        return [norm, (rows, across), (columns, across)]

    def _across(self, parameter: nn.Parameter, *dims: int) -> tuple[Axis, ...]:
        """Return the axes along which ranks divide dimensions, counted from the end; or any."""
        divided = self.layout.divided(parameter)
        return tuple(
            axis
            for axis in COPY
            if axis in divided and (not dims or divided[axis] - parameter.ndim in dims)
        )

    def _weight(self, state: dict[str, Any]) -> float:
        return float(state["step"].item() ** self.BETA2_DECAY)

    def _total(self, sums: Sequence[tuple[Tensor, tuple[Axis, ...]]]) -> None:
        """Replace parts by their sums over the ranks, in one collective for the same axes."""
        for axes in sorted({axes for _, axes in sums if axes}):
            shared = [part for part, across in sums if across == axes]
            flat = torch.cat([part.reshape(-1) for part in shared])
            self.layout.sum_(flat, axes)
            for part, total in zip(shared, flat.split([p.numel() for p in shared]), strict=True):
                part.copy_(total.view_as(part))

    def _direction(
        self, parameter: nn.Parameter, grad: Tensor, state: dict[str, Any], sums: Sums
    ) -> Tensor:
        """Return the gradient divided by the root of its estimated second moment."""
        tiny = torch.finfo(parameter.dtype).eps
        if grad.ndim < 2:
            estimate = state["variance"].clone()
        else:
            rows, shape = self.layout.whole_shape(parameter)[-2], state["col_var"].shape
            _, (row_sum, _), (columns, _) = sums
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
        numel = max(1, math.prod(self.layout.whole_shape(parameter)))
        rate = (norm / numel).sqrt().clamp(min=self.EPS)  # on the device: the host need not wait
        rate *= min(group["lr"], state["step"].item() ** -0.5)
        rate /= ((square / numel).sqrt() / self.LARGEST_RMS).clamp(min=1.0)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.sub_(update.mul_(rate.squeeze(0)))
