"""Causal attention within the documents of a sample, one document after the other.

A mask would have a number for each pair of a sample's tokens, most of them of two documents.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

DOCUMENT_IDS = "document_ids"
"""Entry of a batch with the number of each token's document in its sample, [batch, seq]."""
ON_HOST = "colotrain_on_host"
"""Attribute of document ids on a GPU with their copy on the host."""


@dataclass(frozen=True, slots=True)
class Documents:
    """The documents of a micro-batch; padding at the end of a sample is one as well."""

    lengths: tuple[int, ...]
    """Tokens of each document, sample after sample."""


def documents_in(document_ids: Tensor) -> Documents:
    """The documents of `document_ids` [batch, seq]; on the meta device each sample is one.

    A GPU is not waited for where the ids know their copy on the host.
    """
    batch, seq_len = document_ids.shape
    if document_ids.is_meta:
        return Documents((seq_len,) * batch)
    ids = getattr(document_ids, ON_HOST, document_ids).cpu()
    ends = torch.ones_like(ids, dtype=torch.bool)
    ends[:, :-1] = ids[:, 1:] != ids[:, :-1]
    last = ends.flatten().nonzero().flatten()
    return Documents(tuple(last.diff(prepend=last.new_tensor([-1])).tolist()))


def run_eagerly(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call the function; a compiled model leaves its graph for it."""
    return _call(function, *args, **options)


def _call(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    return function(*args, **options)


@functools.cache
def leave_graphs_for_documents() -> None:
    """Hide attention by documents from torch's compiler; call it before a model is compiled.

    A decorator would load the compiler in every process, which takes 30 MiB and 0.3 s.
    """
    global _call
    _call = torch.compiler.disable(_call)


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
