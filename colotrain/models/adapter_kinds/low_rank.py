"""Low-rank adapters (LoRA, Hu et al. 2021): the product of two matrices is added to the output."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from colotrain.models.tensor_parallel import TensorShard

A, B, DROPOUT = "lora_A", "lora_B", "lora_dropout"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterKind:
    """How an adapter changes the output of a linear layer."""

    add: Callable[[Any, Tensor, Tensor, Tensor | None], Tensor]
    """`add(layer, x, output, bias)`: the layer's output with its adapter; `output` has the bias."""
    attach_: Callable[[Any, int, dict[str, Any]], None] = lambda layer, outputs, like: None
    """`attach_(layer, outputs, like)` gives the layer what it needs beside A and B."""


class InputDropout(nn.Dropout):
    """Dropout of a layer's input, of which a rank may have a part of the features.

    The ranks of a tensor-parallel group draw the same numbers, for all features as one process
    does, and use those of their own part.
    """

    tensor_shard: TensorShard | None = None

    def __init__(self, p: float, num_features: int) -> None:
        super().__init__(p)
        self.num_features = num_features

    def forward(self, x: Tensor) -> Tensor:
        shard = self.tensor_shard
        if shard is None or not self.draws or x.shape[-1] == self.num_features:
            return super().forward(x)
        kept = super().forward(x.new_ones(*x.shape[:-1], self.num_features))
        return x * kept.chunk(shard.size, dim=-1)[shard.rank]

    @property
    def draws(self) -> bool:
        """Whether it changes its input."""
        return self.training and self.p > 0


def product(layer: Any, x: Tensor) -> Tensor:
    """The product of `x` and the adapter's matrices.

    The scale multiplies the few features between the matrices: the output is read and written less.
    """
    scaled: Tensor = layer.lora_B(layer.lora_A(x) * layer.lora_scale)
    return scaled


def _add(layer: Any, x: Tensor, output: Tensor, bias: Tensor | None) -> Tensor:
    return output + product(layer, layer.lora_dropout(x))


LORA = AdapterKind(add=_add)
