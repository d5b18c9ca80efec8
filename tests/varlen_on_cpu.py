"""The kernels of `torch.nn.attention.varlen` on the CPU, by a loop over documents.

torch has them for CUDA alone. What is around them is torch's own: the operations' names, their
autograd formula, and what they are on the meta device.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


@functools.cache
def register() -> None:
    """From here on, in this process."""
    from torch.nn.attention import varlen

    varlen._varlen_attn.register_kernel("cpu")(_forward)
    varlen._varlen_attn_backward.register_kernel("cpu")(_backward)


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    assert torch.equal(cu_seq_q, cu_seq_k)
    assert cu_seq_q.dtype == torch.int32
    assert window_size is not None
    assert is_causal == (window_size == [-1, 0])
    out, lse = torch.empty_like(query), query.new_empty(query.shape[1], len(query)).float()
    for part in _parts(cu_seq_q, min(max_q, max_k)):
        own = (tensor[part] for tensor in (query, key, value))
        out[part], lse[:, part] = _of_one(*own, scale, *window_size)
    return out, lse, torch.zeros(2, dtype=torch.uint64)


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: Tensor,
    scale: float | None = None,
    window_size: list[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    assert window_size is not None
    grads = [torch.empty_like(tensor) for tensor in (query, key, value)]
    for part in _parts(cu_seq_q, max_q):
        own = [tensor[part] for tensor in (query, key, value, grad_out)]
        for grad, found in zip(grads, _grads_of_one(*own, scale, *window_size), strict=True):
            grad[part] = found
    return grads[0], grads[1], grads[2]


def _parts(bounds: Tensor, longest: int) -> Iterator[slice]:
    for begin, end in itertools.pairwise(bounds.tolist()):
        assert 0 < end - begin <= longest
        yield slice(begin, end)


def _of_one(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, before: int, after: int
) -> tuple[Tensor, Tensor]:
    """Attention of [tokens, heads, size], and the logarithm of the sum of its exponentials."""
    scores = _scores(query, key, scale, before, after)
    mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), _repeated(value, query))
    return mixed.to(query.dtype), scores.logsumexp(-1).float()


def _grads_of_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad: Tensor,
    scale: float | None,
    before: int,
    after: int,
) -> Iterator[Tensor]:
    """By the chain rule: autograd does not run inside an operation."""
    weights = _scores(query, key, scale, before, after).softmax(-1)
    grad, size = grad.to(weights.dtype), query.shape[-1]
    of_weights = torch.einsum("qhd,khd->hqk", grad, _repeated(value, query))
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True))
    of_scores = of_scores * (size**-0.5 if scale is None else scale)
    yield torch.einsum("hqk,khd->qhd", of_scores, _repeated(key, query)).to(query.dtype)
    of_key = torch.einsum("hqk,qhd->khd", of_scores, query.to(weights.dtype))
    of_value = torch.einsum("hqk,qhd->khd", weights, grad)
    for like, found in ((key, of_key), (value, of_value)):
        yield found.unflatten(1, (like.shape[1], -1)).sum(2).to(like.dtype)


def _scores(query: Tensor, key: Tensor, scale: float | None, before: int, after: int) -> Tensor:
    """[heads, queries, keys]; minus infinity where a token does not attend to the other."""
    keys = _repeated(key, query)
    scores = torch.einsum("qhd,khd->hqk", query.to(keys.dtype), keys)
    scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
    place = torch.arange(len(query))
    distance = place[:, None] - place
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    hidden |= (distance > before) if before >= 0 else hidden
    hidden |= (distance < -after) if after >= 0 else hidden
    return scores.masked_fill(hidden, -torch.inf)


def _repeated(key: Tensor, query: Tensor) -> Tensor:
    """One head of `key` for every head of `query`, in float32 at least."""
    exact = torch.promote_types(query.dtype, torch.float32)
    return key.to(exact).repeat_interleave(query.shape[1] // key.shape[1], 1)
