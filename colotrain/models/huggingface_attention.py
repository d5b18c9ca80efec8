"""Context parallelism of transformers' models: their attention through its public registry."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from colotrain.errors import ColotrainError, UsageError
from colotrain.models.context_parallel import ATTRIBUTE, SequenceShard, attend
from colotrain.models.facts import facts_of

CHANGES = ("s_aux", "softcap", "position_bias", "indices")
"""Arguments of attention that change its result and that `attend` does not know."""
NAME = "colotrain_context_parallel"


def allow_division_(model: nn.Module, config: Any) -> None:
    """Declare that ranks may divide the sequences of `model`, unless its settings are against it.

    Whether its layers mix tokens in attention alone, a comparison says (`huggingface_check`).
    """
    facts_of(model).whole_sequences = against = why_whole(config)
    if not against:
        setattr(model, ATTRIBUTE, None)


def why_whole(config: Any) -> str:
    """Why settings do not let ranks divide samples; "" where they do."""
    text = config.get_text_config()
    if text is not config:
        return "its samples may have images, whose tokens see one another"
    for kind in _ropes(text):
        if "dynamic" in kind or kind == "longrope":  # the kinds that transformers updates
            return f"its {kind} positions depend on the longest one in a forward"
    if getattr(text, "attn_logit_softcapping", None) is not None:
        return "attention has a soft cap on its scores (attn_logit_softcapping)"
    if not getattr(text, "is_causal", True) or getattr(text, "use_bidirectional_attention", False):
        return "attention is not causal"
    if getattr(text, "output_router_logits", False):
        return "the routers' auxiliary loss is of whole samples (output_router_logits)"
    return ""


def _ropes(config: Any) -> Iterator[str]:
    """The kinds of rotary positions, of all layers or by kind of layer."""
    found = getattr(config, "rope_parameters", None) or {}
    for each in (found, *found.values()):
        if isinstance(each, dict) and "rope_type" in each:
            yield each["rope_type"]


def divided(model: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return this rank's part of the samples that `model` divides; without that, the batch itself.

    `batch` has input_ids, and perhaps labels, position_ids and document_ids, all [batch, seq].
    """
    shard: SequenceShard | None = getattr(model, ATTRIBUTE, None)
    if shard is None:
        return batch
    if not shard.is_known_to_model:
        model.set_attn_implementation(_register())
        shard.is_known_to_model = True
    shape = batch["input_ids"].shape
    documents = batch.pop("document_ids", None)
    if documents is None and "position_ids" in batch:
        documents = _documents_of(batch["position_ids"])
    shard.begin(shape[1], documents)
    batch.setdefault("position_ids", torch.arange(shape[1], device=batch["input_ids"].device)[None])
    other = batch.keys() - {"input_ids", "labels", "position_ids"}
    if other:
        raise UsageError(
            f"mesh.cp={shard.size}: {', '.join(sorted(other))} cannot be divided among ranks",
            "leave it out of the samples (padding needs no mask), or set mesh.cp=1",
        )
    return {name: shard.own(tensor) for name, tensor in batch.items()}


def check_calls(model: Any, before: int) -> None:
    """Raise `ColotrainError` unless every layer of a forward attended to whole samples.

    `before` is what `num_calls` was then.
    """
    if getattr(model, ATTRIBUTE, None) is None:
        return
    layers = num_layers(model)
    if num_calls(model) - before != layers:
        raise ColotrainError(
            f"mesh.cp: {num_calls(model) - before} of {layers} layers exchanged keys and values",
            "set mesh.cp=1: this version of transformers does not use a registered attention",
        )


def num_layers(model: Any) -> int:
    """Number of layers that a forward runs: on a pipeline stage its own."""
    own = facts_of(model).layers_run
    return model.config.num_hidden_layers if own is None else own()


def num_calls(model: Any) -> int:
    """Number of exchanges so far of a model that divides sequences; 0 for others."""
    shard: SequenceShard | None = getattr(model, ATTRIBUTE, None)
    return 0 if shard is None else shard.calls


def _documents_of(position_ids: Tensor) -> Tensor:
    """Document of each token, which begins where positions do not go on, as in transformers."""
    first = position_ids[:, :1] - 1
    return (position_ids.diff(dim=-1, prepend=first) != 1).cumsum(-1)


@functools.cache
def _register() -> str:
    """Register the attention; there are no masks of its name, so that transformers makes none."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, _attention)
    return NAME


def _attention(
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
    """Return [batch, own tokens, heads, size] for query, key and value [batch, heads, own, size].

    As transformers calls it: `attention_mask` is None, for no masks are registered under this name.
    """
    assert attention_mask is None, "transformers made a mask of its own"
    if given := next((name for name in CHANGES if more.get(name) is not None), ""):
        raise ColotrainError(
            f"mesh.cp: attention takes {given}, which is not computed from parts", "set mesh.cp=1"
        )
    mixed = attend(
        query,
        key,
        value,
        getattr(module, ATTRIBUTE),
        window=sliding_window,
        dropout_p=dropout,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return mixed.transpose(1, 2).contiguous(), None
