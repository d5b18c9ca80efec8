"""Sketches and table rows of a model's whole gradients and weights, gathered where sharded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from colotrain.audit import model
from colotrain.audit.sketch import sketch


def gradients(
    roots: model.Roots, gradient_of: Any = None, *, scale: float = 1.0
) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
    """Return sketches and table rows of all gradients: collective where they are sharded.

    `gradient_of` returns a parameter's gradient where an engine has it; `scale` is a GradScaler's
    that the optimizer takes off by itself.
    """
    found, rows = {}, {}
    with model.gathered(roots.all()):
        for name, parameter in roots.parameters().items():
            gradient = parameter.grad if gradient_of is None else gradient_of(parameter)
            gradient = model.whole(gradient) if parameter.requires_grad else None
            if gradient is not None:
                gradient = gradient.to_dense() if gradient.is_sparse else gradient
                gradient = gradient if scale == 1.0 else gradient / scale
            rows[name] = model.row(parameter, gradient, "no backward of this step reached it")
            if gradient is not None and gradient.layout == torch.strided:
                found[name] = sketch(gradient)
    return found, rows


def weights(roots: model.Roots, value_of: Any = None) -> dict[str, Tensor]:
    """Return sketches of all parameters: collective where they are sharded."""
    found = {}
    with model.gathered(roots.all()):
        for name, parameter in roots.parameters().items():
            own = parameter.detach()
            value = model.whole(own) if value_of is None else value_of(parameter)
            if value is not None:
                found[name] = sketch(value)
    return found
