"""Documents of one sample kept apart in transformers' models.

Most do it by masks, which they make where positions begin at 0 again. Those that are known to mix
tokens in attention alone need none: they attend document by document.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor, nn

from colotrain.errors import ColotrainError
from colotrain.models.documents import Documents, attend_within
from colotrain.models.graphs import run_eagerly
from colotrain.models.huggingface_attention import num_layers
from colotrain.models.huggingface_internals import (
    attention_of,
    without_packed_sequence_search,
)

SEPARABLE = (
    *("gemma3_text", "gpt2", "gpt_neox", "granite", "llama", "mistral", "mixtral", "olmo2", "phi3"),
    *("qwen2", "qwen3", "qwen3_moe", "smollm3"),
    *("apertus", "arcee", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "dots1", "ernie4_5"),
    *("ernie4_5_moe", "exaone4", "flex_olmo", "gemma", "glm", "glm4", "glm4_moe", "gpt_bigcode"),
    *("granitemoe", "granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe"),
    *("internlm3", "minimax_m2", "ministral", "ministral3", "nanochat", "olmo", "olmo3", "olmoe"),
    *("persimmon", "phi", "qwen2_moe", "seed_oss", "starcoder2"),
)
"""Model types, of config.json, whose attention may be computed document by document."""
MASKED = ("codegen", "diffllama", "doge", "gemma2", "gptj", "nemotron", "phimoe")
"""Model types whose masks keep documents apart, and whose attention needs them.

The logits of both kinds are compared with those of each document by itself in
tests/unit/models/test_documents.py. Other types are refused: with the same positions some of them,
such as Bloom, Falcon and Qwen3-Next, let documents see one another.
"""
NAME = "colotrain_documents"
KEYWORD = "colotrain_documents"
"""Argument that transformers hands on from a model's forward to its attention."""
_calls: ContextVar[list[nn.Module] | None] = ContextVar("calls", default=None)
"""Layers that have attended document by document in the present forward; None: there is none."""


def can_keep_documents_apart(model: Any) -> bool:
    """Whether the architecture is known to keep documents apart, by masks or without."""
    return _attends_backwards(model) and model.config.model_type in (*SEPARABLE, *MASKED)


def needs_no_mask(model: Any) -> bool:
    """Whether the model's attention may be computed document by document."""
    config = model.config
    ours = attention_of(model) in ("sdpa", NAME)
    ours &= getattr(config, "attn_logit_softcapping", None) is None
    return ours and config.model_type in SEPARABLE and _attends_backwards(model)


def _attends_backwards(model: Any) -> bool:
    config = model.config
    sees_future = getattr(config, "use_bidirectional_attention", False)
    return getattr(config, "is_causal", True) and not sees_future


@contextmanager
def attending_within(model: Any, documents: Documents | None) -> Iterator[dict[str, Any]]:
    """Context of a forward in which no masks are made; gives the arguments that it also needs.

    Raises `ColotrainError` where a layer has not attended document by document.
    """
    if documents is None:
        yield {}
        return
    if attention_of(model) != NAME:
        model.set_attn_implementation(_register())
    calls: list[nn.Module] = []
    before = _calls.set(calls)
    try:
        with without_packed_sequence_search():
            yield {KEYWORD: documents}
    finally:
        _calls.reset(before)
    layers = num_layers(model)
    if len(calls) != layers:
        raise ColotrainError(
            f"data.isolate: {len(calls)} of {layers} layers kept documents apart",
            "set data.isolate=false: this version of transformers does not use a registered "
            "attention",
        )


@functools.cache
def _register() -> str:
    """Register the attention and its masks, which without documents are those of `sdpa`."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, functools.partial(_attention, AttentionInterface()["sdpa"]))
    masks = functools.partial(_mask, AttentionMaskInterface()["sdpa"])
    AttentionMaskInterface.register(NAME, masks)
    return NAME


def _mask(sdpa: Any, *args: Any, **options: Any) -> Tensor | None:
    mask: Tensor | None = None if _calls.get() is not None else sdpa(*args, **options)
    return mask


def _within(module: nn.Module, *inputs: Any, **options: Any) -> Tensor:
    calls = _calls.get()
    if calls is not None:  # not when backward computes a layer again
        calls.append(module)
    return attend_within(*inputs, **options)


def _attention(
    sdpa: Any,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Return [batch, seq, heads, size] for query, key and value [batch, heads, seq, size]."""
    documents = more.pop(KEYWORD, None)
    if documents is None:
        more["sliding_window"] = sliding_window
        found: tuple[Tensor, None] = sdpa(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **more
        )
        return found
    assert attention_mask is None, "transformers made a mask of its own"
    mixed = run_eagerly(
        _within,
        module,
        *(query, key, value, documents),
        window=sliding_window,
        dropout_p=dropout,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return mixed.transpose(1, 2).contiguous(), None
