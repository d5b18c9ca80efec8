"""Half precision: which inputs are cast, and loss scaling for fp16.

Loss scaling is dynamic (Micikevicius et al. 2018).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from colotrain import module_tree
from colotrain.spec.precisions import PRECISIONS

KEPT = ("labels", "label", "targets", "target", "y", "reference_log_probs")
"""Entries of a batch that are never cast: the output is compared with them."""
INITIAL_SCALE = 2.0**16
GROWTH_INTERVAL = 2000


def dtype_of(precision: str) -> torch.dtype:
    """Return the dtype that `train.precision` computes in."""
    dtype: torch.dtype = getattr(torch, PRECISIONS[precision].dtype)
    return dtype


def cast_dtype(precision: str) -> torch.dtype | None:
    """Return the dtype that parameters and inputs are cast to; None where they are not cast."""
    return dtype_of(precision) if PRECISIONS[precision].is_cast else None


@dataclass(slots=True, kw_only=True)
class LossScale:
    """The loss scale, the same on every rank, because ranks agree on what they update it with."""

    scale: float = 1.0
    dynamic: bool = False
    clean_steps: int = 0

    @staticmethod
    def for_precision(precision: str) -> LossScale:
        if PRECISIONS[precision].scales_loss:
            return LossScale(scale=INITIAL_SCALE, dynamic=True)
        return LossScale()

    @property
    def can_fall(self) -> bool:
        """Whether a lower scale may prevent an overflow."""
        return self.dynamic and self.scale > 1.0

    def update(self, *, overflow: bool) -> None:
        """Update after each step: halve on overflow, double after 2,000 clean steps."""
        if not self.dynamic:
            return
        self.clean_steps = 0 if overflow else self.clean_steps + 1
        if overflow:
            self.scale = max(self.scale / 2, 1.0)
        elif self.clean_steps == GROWTH_INTERVAL:
            self.scale, self.clean_steps = self.scale * 2, 0


def cast_of(name: str, tensor: object, dtype: torch.dtype | None) -> bool:
    """Whether an entry of a batch is cast to the compute dtype: float inputs, but no labels."""
    if dtype is None or name in KEPT or not isinstance(tensor, Tensor):
        return False
    return tensor.is_floating_point() and tensor.dtype != dtype


def cast_inputs(
    batch: Mapping[str, Tensor], dtype: torch.dtype | None
) -> tuple[str, tuple[str, str] | None]:
    """Return a message on the cast of a batch (or ""), and a problem with its fix (or None)."""
    cast = {name: t for name, t in batch.items() if cast_of(name, t, dtype)}
    if dtype is None or not cast:
        return "", None
    known = str(dtype).removeprefix("torch.")
    note = f"casts {', '.join(cast)} to {known} before forward"
    for name, values in cast.items():
        rounded = values.to(dtype)
        lost = values.isfinite() & ~rounded.isfinite()
        if lost.any():
            problem = f"data: {name} holds {values[lost][0].item():g}, which is infinite in {known}"
            return note, (problem, "scale it, or choose another train.precision")
        whole = values.isfinite() & (values == values.round()) & (rounded.double() != values)
        if whole.any():
            changed = f"{values[whole][0].item():.9g} becomes {rounded[whole][0].item():.9g}"
            note += f"; {name}: {changed} (integers are not cast, nor are {', '.join(KEPT)})"
    return note, None


def keep_statistics_exact_(model: nn.Module) -> None:
    """Let modules with running statistics in float32 compute with float32 weights, too.

    torch's batch normalisation supports half-precision inputs only with all the rest in float32.
    """
    for module in module_tree.modules(model):
        statistics = getattr(module, "running_mean", None)
        if isinstance(statistics, Tensor) and statistics.dtype == torch.float32:
            module.forward = partial(_with_exact_weights, module, module.forward)


def _with_exact_weights(module: nn.Module, forward: Callable[..., Tensor], *inputs: Any) -> Tensor:
    own = dict(module._parameters)
    exact = {name: None if p is None else p.float() for name, p in own.items()}
    module._parameters.update(exact)  # type: ignore[arg-type]
    try:
        return forward(*inputs)
    finally:
        module._parameters.update(own)
