"""The gradient of a micro-batch by plain autograd, beside the script's own backward.

`torch.autograd.grad` captures gradients before they are accumulated: engines that reduce or
partition gradients in hooks on the accumulation do not notice. Where a second backward could change
the script, there is a reason instead.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from colotrain.audit import model
from colotrain.audit.sketch import sketch

SHARDED = ("FullyShardedDataParallel", "fully_shard", "ZeRO-3")


def why_not(
    loss: Tensor | None, roots: list[nn.Module], parameters: dict[str, nn.Parameter]
) -> str:
    """Return why the reference cannot be computed; empty if it can."""
    if loss is None or loss.grad_fn is None:
        return "the loss has no graph"
    if not parameters:
        return "no module with trainable parameters ran before the backward"
    framework = model.framework(roots)
    if framework in SHARDED:
        return f"{framework} frees and gathers parameters in its own backward, which runs only once"
    if any(getattr(root, "static_graph", False) for root in roots):
        return "DistributedDataParallel with static_graph counts the first backward"
    return ""


def gradients(loss: Tensor, parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return sketches of the loss's gradients; the graph stays as it was."""
    found = torch.autograd.grad(
        loss, list(parameters.values()), retain_graph=True, allow_unused=True
    )
    return {
        name: sketch(gradient.to_dense() if gradient.is_sparse else gradient)
        for name, gradient in zip(parameters, found, strict=True)
        if gradient is not None
    }
