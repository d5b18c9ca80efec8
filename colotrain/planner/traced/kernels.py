"""Operations of the meta device that save and move the bytes of the run's device.

torch takes some operations apart on CPU and on the meta device that CUDA runs as one kernel:
RMSNorm, dropout and attention. While a model is traced for CUDA, autograd sees CUDA's kernel.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.library import Library
from torch.nn.attention import SDPBackend

from colotrain.torch_internals import choose_attention, operations_instead

RMS_NORM = "(Tensor x, Tensor? weight, int width) -> (Tensor, Tensor)"
RMS_NORM_BACKWARD = (
    "(Tensor grad, Tensor x, Tensor rstd, Tensor? weight, bool[2] needed) -> Tensor[]"
)
aten = torch.ops.aten


@contextmanager
def kernels_of(device: str) -> Iterator[None]:
    """Run attention, RMSNorm and dropout of meta tensors as the kernels of `device`.

    This holds in every thread, and for blocks that backward computes again.
    """
    attend = functools.partial(_attend, device)
    instead: dict[str, Callable[..., Tensor]] = {"scaled_dot_product_attention": attend}
    if device == "cuda":
        instead |= {"rms_norm": _rms_norm, "dropout": _dropout}
    with operations_instead(instead):
        yield


def _rms_norm(
    x: Tensor, normalized: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """RMSNorm is one kernel if weight and input have one dtype (ATen/native/layer_norm.cpp)."""
    if weight is not None and weight.dtype != x.dtype:
        return aten.rms_norm.default.decompose(x, normalized, weight, eps)
    out: Tensor = _RMSNorm.apply(x, weight, math.prod(normalized))
    return out


class _RMSNorm(torch.autograd.Function):
    """Saves its input, its weight and one factor per row in fp32, as `aten._fused_rms_norm`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, width: int) -> Tensor:
        out, rstd = torch.ops.colotrain.rms_norm(x, weight, width)
        ctx.save_for_backward(x, rstd, weight)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, rstd, weight = ctx.saved_tensors
        needed = ctx.needs_input_grad[:2]
        found = iter(torch.ops.colotrain.rms_norm_backward(grad, x, rstd, weight, needed))
        return *(next(found) if need else None for need in needed), None


def _meta_rms_norm(x: Tensor, weight: Tensor | None, width: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(x.numel() // width, dtype=torch.float32)


def _meta_rms_norm_backward(
    grad: Tensor, x: Tensor, rstd: Tensor, weight: Tensor | None, needed: Sequence[bool]
) -> list[Tensor]:
    each = zip((x, weight), needed, strict=True)
    return [torch.empty_like(tensor) for tensor, need in each if need and tensor is not None]


_own = Library("colotrain", "DEF")
_own.define(f"rms_norm{RMS_NORM}")
_own.define(f"rms_norm_backward{RMS_NORM_BACKWARD}")
_own.impl("rms_norm", _meta_rms_norm, "Meta")
_own.impl("rms_norm_backward", _meta_rms_norm_backward, "Meta")


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """Dropout is one kernel with a mask of one byte per element (ATen/native/Dropout.cpp)."""
    if not train or not 0 < p < 1 or not x.numel():
        return aten.dropout.default.decompose(x, p, train)
    return aten.native_dropout(x, p, train)[0]


def _attend(
    device: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention as the kernel of `device`, because kernels save different tensors.

    On CPU torch chooses the kernel, given tensors whose memory is never touched. On CUDA it is
    flash attention for 16-bit inputs without a mask and heads of at most 256, else the
    memory-efficient or the math kernel (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp).
    """
    backend = _backend(device, query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    if backend == "flash" and device == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )[0]
    if backend == "flash":
        return aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
    if backend == "efficient":
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
        )[0]
    options = {"scale": scale, "enable_gqa": enable_gqa}
    whole = aten.scaled_dot_product_attention.default
    return whole.decompose(query, key, value, attn_mask, dropout_p, is_causal, **options)


def _backend(
    device: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
) -> str:
    if device == "cpu":
        found = choose_attention(
            _untouched(query),
            _untouched(key),
            _untouched(value),
            None if mask is None else _untouched(mask),
            dropout_p,
            is_causal,
            enable_gqa=enable_gqa,
        )
        return "flash" if SDPBackend(found) == SDPBackend.FLASH_ATTENTION else "math"
    half = query.dtype in (torch.float16, torch.bfloat16)
    if half and mask is None and query.shape[-1] <= 256:
        return "flash"
    return "math" if enable_gqa else "efficient"


def _untouched(tensor: Tensor) -> Tensor:
    """A real tensor like `tensor` whose memory is allocated but never touched."""
    return torch.empty_strided(
        tensor.shape,
        tensor.stride(),
        dtype=tensor.dtype,
        requires_grad=tensor.requires_grad,
        device="cpu",
    )
