"""Causal attention within the documents of a sample: one kernel for all, or one after the other.

A mask would have a number for each pair of a sample's tokens, most of them of two documents.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from colotrain.models.graphs import run_eagerly
from colotrain.models.loss import device_type_of

DOCUMENT_IDS = "document_ids"
"""Entry of a batch with the number of each token's document in its sample, [batch, seq]."""
ON_HOST = "colotrain_on_host"
"""Attribute of document ids on a GPU with their copy on the host."""
LARGEST_HEAD, LARGEST_ELSEWHERE = 256, 192
"""Size of a head up to which flash attention has a backward: on `LARGE` devices, and on others."""
LARGE = ((8, 0), (9, 0), (10, 0))
"""Compute capabilities of GPUs for data centers."""


@dataclass(frozen=True, slots=True)
class Documents:
    """The documents of a micro-batch; padding at the end of a sample is one as well."""

    lengths: tuple[int, ...]
    """Tokens of each document, sample after sample."""
    bounds: Tensor
    """Where each document begins among all tokens, and the end; int32, where the tokens are."""


def documents_in(document_ids: Tensor) -> Documents:
    """The documents of `document_ids` [batch, seq]; on the meta device each sample is one.

    A GPU is not waited for where the ids know their copy on the host.
    """
    batch, seq_len = document_ids.shape
    if document_ids.is_meta:
        bounds = document_ids.new_empty(batch + 1, dtype=torch.int32)
        return Documents((seq_len,) * batch, bounds)
    ids = getattr(document_ids, ON_HOST, document_ids).cpu()
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    bounds = torch.cat([begins.flatten().nonzero().flatten(), torch.tensor([ids.numel()])])
    lengths = tuple(bounds.diff().tolist())
    bounds = bounds.int()
    if document_ids.is_cuda:
        bounds = bounds.pin_memory().to(document_ids.device, non_blocking=True)
    return Documents(lengths, bounds)


def attend_within(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents, **options: Any
) -> Tensor:
    """Return causal attention, in which tokens attend to their own document alone.

    All are [batch, heads, seq, head size]. With `window` a token attends to so many keys, itself
    included. Other `options` are those of `scaled_dot_product_attention`.
    """
    mixed: Tensor = run_eagerly(_attend_within, query, key, value, documents, **options)
    return mixed


def _attend_within(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents, **options: Any
) -> Tensor:
    takes_all = has_kernel_for_all(query, key, value, options.get("dropout_p", 0.0))
    attend = _attend_at_once if takes_all else _attend_one_by_one
    return attend(query, key, value, documents, **options)


def has_kernel_for_all(query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0) -> bool:
    """Whether one kernel computes the attention of all documents.

    It is CUDA's flash attention, in half precision and without dropout. On the meta device the
    answer is that for the device of the run.
    """
    size, half = query.shape[-1], query.dtype in (torch.float16, torch.bfloat16)
    alike = all(t.shape[-1] == size and t.dtype == query.dtype for t in (key, value))
    if dropout_p or size % 8 or not half or not alike:
        return False
    if query.is_meta:
        return device_type_of(query) == "cuda" and size <= LARGEST_HEAD
    return query.is_cuda and size <= _largest_head(query.device)


def _largest_head(device: torch.device) -> int:
    """Size of a head up to which the device computes flash attention; 0: it does not."""
    known = torch.version.hip is None and torch.backends.cuda.is_flash_attention_available()
    if not known or not torch.backends.cuda.flash_sdp_enabled():
        return 0
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return 0
    return LARGEST_HEAD if capability in LARGE else LARGEST_ELSEWHERE


def _attend_at_once(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents,
    *,
    window: int | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    dropout_p: float = 0.0,
) -> Tensor:
    from torch.nn.attention import varlen  # loads the compiler

    attend: Any = varlen.varlen_attn
    shape, longest = (query.shape[0], query.shape[2]), max(documents.lengths)
    options: dict[str, Any] = {"scale": scale}
    if "enable_gqa" in attend.__kwdefaults__:  # torch 2.11 needs no word for it
        options["enable_gqa"] = enable_gqa
    before = -1 if window is None or window >= longest else window - 1
    mixed: Tensor = attend(
        *(tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)),
        *(documents.bounds, documents.bounds, longest, longest),
        window_size=(before, 0),
        **options,
    )
    return mixed.unflatten(0, shape).transpose(1, 2)


def _attend_one_by_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents,
    *,
    window: int | None = None,
    **options: Any,
) -> Tensor:
    shape = query.shape[0], query.shape[2]
    parts = (_split(tensor, documents) for tensor in (query, key, value))
    mixed = []
    for own_query, own_key, own_value in zip(*parts, strict=True):
        length, mask = own_query.shape[2], None
        if window is not None and window < length:
            mask = _within(window, length, own_query)
        of_document = F.scaled_dot_product_attention(
            own_query, own_key, own_value, attn_mask=mask, is_causal=mask is None, **options
        )
        mixed.append(of_document.squeeze(0).transpose(0, 1))
    return torch.cat(mixed).unflatten(0, shape).transpose(1, 2)


def _split(tensor: Tensor, documents: Documents) -> list[Tensor]:
    """Each document's [1, heads, tokens, size], of [batch, heads, seq, size]."""
    tokens = tensor.transpose(1, 2).flatten(0, 1)
    return [own.transpose(0, 1).unsqueeze(0) for own in tokens.split(documents.lengths)]


def _within(window: int, length: int, like: Tensor) -> Tensor:
    """True where a token attends to a key: the last `window` keys up to its own."""
    ones = torch.ones(length, length, dtype=torch.bool, device=like.device)
    return ones.tril() & ones.triu(1 - window)
