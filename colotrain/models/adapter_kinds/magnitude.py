"""Weight-decomposed adapters (DoRA, Liu et al. 2024): direction by LoRA, magnitude by itself.

The layer computes with m ⊙ (W + sBA) / ‖W + sBA‖, the norm of each row a constant in backward
(section 4.3 of the paper). m begins as the norms of the rows of W.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from colotrain.models.adapter_kinds.low_rank import AdapterKind, product
from colotrain.models.adapter_kinds.weights import base_product, weight_in_forward
from colotrain.models.graphs import run_eagerly
from colotrain.models.tensor_parallel import TensorShard

MAGNITUDE = "lora_magnitude_vector"


class Magnitude(nn.Module):
    """The magnitudes of a layer's outputs, a parameter of a module as PEFT has it."""

    tensor_shard: TensorShard | None = None

    def __init__(self, outputs: int, *, device: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(outputs, device=device, dtype=dtype))


def row_norms(weight: Tensor) -> Tensor:
    """Norm of each row, in float32 or wider."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return torch.linalg.vector_norm(weight, dim=1, dtype=wide)


def scaled_rows(weight: Tensor, magnitude: Tensor) -> Tensor:
    """`weight` with the norm of each row replaced by its magnitude."""
    return weight * (magnitude.to(weight.dtype) / row_norms(weight)).unsqueeze(1)


@torch.no_grad()
def _norms_of_sum(layer: Any) -> Tensor:
    """‖W + sBA‖ of each row, in float32 or wider, without the memory of the sum.

    Its square is ‖W‖² + 2s (WAᵀ)·B + s² (BAAᵀ)·B. Ranks that divide the inputs add their parts.
    """
    a, b = layer.lora_A.weight, layer.lora_B.weight
    weight = weight_in_forward(layer, a.dtype)
    squares = row_norms(weight).square()
    wide = squares.dtype
    through, between = (weight @ a.T).to(wide), a.to(wide) @ a.to(wide).T
    shard: TensorShard | None = layer.lora_magnitude_vector.tensor_shard
    if shard is not None and a.shape[1] < layer.lora_dropout.num_features:
        squares, through, between = (
            run_eagerly(shard.sum, each) for each in (squares, through, between)
        )
    b, scale = b.to(wide), layer.lora_scale
    squares += 2 * scale * (through * b).sum(1) + scale**2 * ((b @ between) * b).sum(1)
    return squares.clamp_min(0).sqrt()


def _add(layer: Any, x: Tensor, output: Tensor, bias: Tensor | None) -> Tensor:
    """The output of the scaled sum; as in PEFT, dropped inputs are those of W's change, too."""
    norms = _norms_of_sum(layer)
    factor = layer.lora_magnitude_vector.weight.to(norms.dtype) / norms
    base = output if bias is None else output - bias
    if layer.lora_dropout.draws:
        x = layer.lora_dropout(x)
        base = base_product(layer, x)
    change = (factor - 1).to(output.dtype) * base
    return output + change + factor.to(output.dtype) * product(layer, x)


def _attach_(layer: Any, outputs: int, like: dict[str, Any]) -> None:
    layer.lora_magnitude_vector = Magnitude(outputs, device=like["device"], dtype=like["dtype"])


DORA = AdapterKind(add=_add, attach_=_attach_)
