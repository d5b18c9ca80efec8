"""The weight of a linear layer as one matrix, whatever way the layer holds it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn


def is_transposed(module: nn.Module) -> bool:
    """Whether the weight is [inputs, outputs], as in transformers' Conv1D."""
    known = type(module).__name__ == "Conv1D"
    return known and type(module).__module__.startswith("transformers.")


def whole_weight(layer: Any, read: Callable[[Tensor], Tensor] = lambda held: held) -> Tensor:
    """Return the layer's weight as [outputs, inputs].

    `read` gives the value of a parameter of the layer: outside of a forward, ranks hold parts.
    """
    weight = read(cast(Tensor, layer.weight))
    return weight.T if is_transposed(layer) else weight
