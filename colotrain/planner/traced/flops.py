"""FLOPs of the operations of a traced micro-batch, by torch's own formulas."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from colotrain.torch_internals import arguments_of, without_modes

ATTENTION = ("attention", "sdpa", "varlen_attn")
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
    formula = formula or NOT_IN_TORCH.get(str(func.overloadpacket))
    if formula is None:
        return None
    if not any(word in str(func) for word in ATTENTION):
        return Flops(matmul=formula(*args, **kwargs, out_val=out))
    names = [argument.name for argument in arguments_of(func)]
    given = dict(zip(names, args, strict=False)) | kwargs
    heads = 1 if "scaled_dot_product" in str(func) else -2
    for name in ("key", "value"):
        given[name] = _for_every_head(given[name], given["query"], heads)
    positional = [given[name] for name, _ in zip(names, args, strict=False)]
    flops = formula(*positional, **{name: given[name] for name in kwargs}, out_val=out)
    return Flops(attention=flops / 2 if given.get("is_causal") else flops)


def _for_every_head(key: Tensor, query: Tensor, dim: int) -> Tensor:
    """Keys or values as if each head had its own: up to torch 2.12 formulas refuse fewer."""
    sizes = list(key.shape)
    sizes[dim] = query.shape[dim]
    with without_modes():
        return torch.empty(sizes, dtype=key.dtype, device="meta")


def _attention_on_cpu(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _attention_on_cpu_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any
) -> int:
    return int(sdpa_backward_flop_count(grad.shape, query.shape, key.shape, value.shape))


IN_TORCH: dict[str, Any] = {str(operation): formula for operation, formula in flop_registry.items()}
NOT_IN_TORCH = {
    "aten._scaled_dot_product_flash_attention_for_cpu": _attention_on_cpu,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": _attention_on_cpu_backward,
    "torch_attn._varlen_attn": IN_TORCH["aten._flash_attention_forward"],
    "torch_attn._varlen_attn_backward": IN_TORCH["aten._flash_attention_backward"],
}
"""FLOP formulas of operations that torch's own counter lacks (those of documents up to 2.12)."""
