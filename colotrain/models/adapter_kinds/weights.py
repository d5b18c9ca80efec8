"""The weight of a linear layer as one matrix, whatever way the layer holds it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def is_transposed(module: nn.Module) -> bool:
    """Whether the weight is [inputs, outputs], as in transformers' Conv1D."""
    known = type(module).__name__ == "Conv1D"
    return known and type(module).__module__.startswith("transformers.")


class PackedLayer:
    """A linear layer that holds no weight, but blocks of which it makes one when it computes."""

    def whole(self, dtype: torch.dtype) -> Tensor:
        """Return the weight [outputs, inputs]."""
        raise NotImplementedError

    def product(self, x: Tensor) -> Tensor:
        """Return the product of `x` and the weight, without the bias."""
        raise NotImplementedError


def whole_weight(layer: Any, read: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the layer's weight as [outputs, inputs], outside of a forward.

    `read` gives the whole value of a parameter of the layer, of which ranks hold parts or blocks.
    """
    weight = read(cast(Tensor, layer.weight))
    return weight.T if is_transposed(layer) else weight


def weight_in_forward(layer: Any, dtype: torch.dtype) -> Tensor:
    """Return the weight that the layer computes with as [outputs, inputs], in a forward.

    `dtype` is that of the computation, for a weight that is made of blocks.
    """
    if isinstance(layer, PackedLayer):
        return layer.whole(dtype)
    return whole_weight(layer, lambda held: held)


def base_product(layer: Any, x: Tensor) -> Tensor:
    """Return the product of `x` and the layer's weight, without adapter and bias, in a forward."""
    if isinstance(layer, PackedLayer):
        return layer.product(x)
    return F.linear(x, whole_weight(layer, lambda held: held))
