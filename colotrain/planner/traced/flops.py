"""FLOPs of the operations of a traced micro-batch, by torch's own formulas."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from colotrain.torch_internals import arguments_of

ATTENTION = ("attention", "sdpa")
"""Words in the names of attention's operations."""


class Flops(NamedTuple):
    """FLOPs of one operation."""

    matmul: float = 0.0
    attention: float = 0.0


def count_flops(func: Any, args: Any, kwargs: Any, out: Any) -> Flops | None:
    """Return the FLOPs of a matmul, a convolution or an attention; None of anything else.

    torch's formulas count all pairs of a query and a key. Of causal attention half of them count
    here, for its kernels pass over the blocks that are masked whole.
    """
    formula: Any = flop_registry.get(func.overloadpacket) or flop_registry.get(func)
    formula = formula or NOT_IN_TORCH.get(func.overloadpacket)
    if formula is None:
        return None
    flops = formula(*args, **kwargs, out_val=out)
    if not any(word in str(func) for word in ATTENTION):
        return Flops(matmul=flops)
    names = [argument.name for argument in arguments_of(func)]
    given = dict(zip(names, args, strict=False)) | kwargs
    return Flops(attention=flops / 2 if given.get("is_causal") else flops)


def _attention_on_cpu(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _attention_on_cpu_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> int:
    return int(sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape))


NOT_IN_TORCH = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_on_cpu,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_on_cpu_backward,
}
"""FLOP formulas of operations that torch's own counter lacks."""
