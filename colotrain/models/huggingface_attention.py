"""Context parallelism of transformers' models: their attention through its public registry."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from colotrain.errors import ColotrainError, UsageError
from colotrain.models.context_parallel import (
    ATTRIBUTE,
    SequenceShard,
    attend,
    of_first_rank,
    whole_output,
)
from colotrain.models.facts import facts_of
from colotrain.models.huggingface_images import modules_of_images

CHANGES = ("s_aux", "softcap", "position_bias", "indices")
"""Arguments of attention that change its result and that `attend` does not know."""
HEADS = ("score", "classifier")
"""Names that transformers gives the layer of a classifier behind its backbone."""
IMAGES_SEE_THEMSELVES = "token_type_ids"
"""Input of image-text models in which the tokens of an image attend to those behind them."""
NAME = "colotrain_context_parallel"


def allow_division_(model: nn.Module, config: Any) -> None:
    """Declare that ranks may divide the sequences of `model`, unless its settings are against it.

    Whether its layers mix tokens in attention alone, a comparison says (`huggingface_check`).
    """
    is_image_text = config.get_text_config() is not config
    against = why_whole(config.get_text_config(), sees_all=facts_of(model).sees_all)
    sees = IMAGES_SEE_THEMSELVES in inspect.signature(type(model).forward).parameters
    sees |= hasattr(config.get_text_config(), "use_bidirectional_attention")
    if is_image_text and sees:
        against = "the tokens of an image see one another"
    elif is_image_text and not modules_of_images(model):
        against = "it reads more than texts, and not as an image-text model"
    facts_of(model).whole_sequences = against
    if not against:
        setattr(model, ATTRIBUTE, None)
        facts_of(model).divide = _divide_decoder_ if is_image_text else None


def _divide_decoder_(model: Any) -> None:
    """Let the decoder of an image-text model compute this rank's tokens.

    The features of images take their places among the embeddings of whole samples before it. Each
    rank reads all images; the gradients of what reads them are those of the rank's own tokens.
    """
    decoder = model.get_decoder()
    decoder.forward = functools.partial(_decoder_of_part, model, decoder.forward)


def _decoder_of_part(
    model: Any,
    forward: Callable[..., Any],
    *,
    inputs_embeds: Tensor,
    attention_mask: Any = None,
    position_ids: Tensor | None = None,
    **options: Any,
) -> Any:
    """The decoder's output for this rank's tokens of `inputs_embeds` [batch, seq, d]."""
    shard: SequenceShard = getattr(model, ATTRIBUTE)
    length = inputs_embeds.shape[1]
    is_padding = isinstance(attention_mask, Tensor) and attention_mask.ndim == 2
    wrong = "" if length == shard.length else f"{length} embeddings for {shard.length} tokens"
    if attention_mask is not None and not is_padding:
        wrong = "a mask that depends on images"
    elif is_padding and not attention_mask.is_meta and bool((attention_mask.diff() > 0).any()):
        wrong = "padding before tokens, which would see it"
    if wrong:
        raise UsageError(
            f"mesh.cp={shard.size}: {type(model).__name__} gives its decoder {wrong}",
            "set mesh.cp=1",
        )
    if position_ids is None:
        position_ids = torch.arange(length, device=inputs_embeds.device)[None]
    own = shard.own(inputs_embeds.mT).mT.contiguous()
    return forward(inputs_embeds=own, position_ids=shard.own(position_ids), **options)


def why_whole(config: Any, *, sees_all: bool = False) -> str:
    """Why settings do not let ranks divide samples; "" where they do."""
    text = config.get_text_config()
    for kind in _ropes(text):
        if "dynamic" in kind or kind == "longrope":  # the kinds that transformers updates
            return f"its {kind} positions depend on the longest one in a forward"
    if getattr(text, "attn_logit_softcapping", None) is not None:
        return "attention has a soft cap on its scores (attn_logit_softcapping)"
    sees_later = getattr(text, "use_bidirectional_attention", False)
    if not sees_all and (sees_later or not getattr(text, "is_causal", True)):
        return "attention is not causal"
    if getattr(text, "layerdrop", 0):
        return "layers are left out at random (layerdrop)"
    if getattr(text, "output_router_logits", False):
        return "the routers' auxiliary loss is of whole samples (output_router_logits)"
    return ""


def allow_division_inside_(model: Any, config: Any, *, sees_all: bool) -> None:
    """Declare the same of a model that is no causal language model.

    It is one of vectors, of hidden tokens, or has a new head. `sees_all`: it is an encoder, whose
    tokens attend to those behind them, too.
    """
    if config.get_text_config() is not config:
        facts_of(model).whole_sequences = "its samples may have images, and it predicts no tokens"
        return
    facts_of(model).sees_all = sees_all
    allow_division_(model, config)
    if hasattr(model, ATTRIBUTE):
        facts_of(model).divide = _divide_inside_


def _divide_inside_(model: Any) -> None:
    """Let the backbone compute this rank's tokens; a classifier's outputs are gathered.

    The pooling of a text comes after a decoder's head, and is then that of one process. An encoder
    pools the first token before its head, so that the first rank's outputs are those of the text.
    """
    backbone = model.base_model
    backbone.forward = functools.partial(_forward_of_part, model, backbone.forward)
    for name in HEADS if backbone is not model else ():
        if (head := getattr(model, name, None)) is not None:
            head.register_forward_hook(_gather)
            facts_of(model).gathers_outputs = True


def _forward_of_part(
    model: Any, forward: Callable[..., Any], input_ids: Tensor, **inputs: Any
) -> Any:
    """The backbone's output for this rank's tokens. Padding is at the end: no decoder sees it."""
    mask = inputs.pop("attention_mask", None)
    given = {name: value for name, value in inputs.items() if value is not None}
    before, batch = num_calls(model), {"input_ids": input_ids}
    if "position_ids" in given:
        batch["position_ids"] = given.pop("position_ids")
    embeddings: Any = getattr(model.base_model, "embeddings", None)
    positions = getattr(embeddings, "create_position_ids_from_input_ids", None)
    if positions is not None and "position_ids" not in batch:
        batch["position_ids"] = positions(input_ids, embeddings.padding_idx)
    seen = mask.bool() if mask is not None and facts_of(model).sees_all else None
    own, shard = divided(model, batch, seen=seen), getattr(model, ATTRIBUTE)
    if "token_type_ids" in given:
        own["token_type_ids"] = shard.own(given.pop("token_type_ids"))
    if left := sorted(name for name, value in given.items() if isinstance(value, Tensor)):
        raise UsageError(
            f"mesh.cp={shard.size}: {', '.join(left)} cannot be divided among ranks",
            "leave it out of the samples, or set mesh.cp=1",
        )
    output = forward(**own, **given | {"use_cache": False})
    check_calls(model, before)
    is_backbone = model.base_model is model and not isinstance(output, Tensor)  # of a stage
    return (output[0],) if is_backbone else output  # not what it pools


def _gather(head: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    if output.ndim == 2:
        return of_first_rank(output, getattr(head, ATTRIBUTE))
    whole: Tensor = whole_output(head, output)
    return whole


def _ropes(config: Any) -> Iterator[str]:
    """The kinds of rotary positions, of all layers or by kind of layer."""
    found = getattr(config, "rope_parameters", None) or {}
    for each in (found, *found.values()):
        if isinstance(each, dict) and "rope_type" in each:
            yield each["rope_type"]


def divided(
    model: Any, batch: dict[str, Tensor], *, seen: Tensor | None = None
) -> dict[str, Tensor]:
    """Return this rank's part of the samples that `model` divides; without that, the batch itself.

    `batch` has input_ids, and perhaps labels, position_ids and document_ids, all [batch, seq], as
    is `seen`, False for padding that an encoder's tokens would see.
    """
    shard: SequenceShard | None = getattr(model, ATTRIBUTE, None)
    if shard is None:
        return batch
    is_inside = facts_of(model).divide is _divide_decoder_
    if not shard.is_known_to_model:
        (model.get_decoder() if is_inside else model).set_attn_implementation(_register())
        shard.is_known_to_model = True
    shape = batch["input_ids"].shape
    documents = batch.pop("document_ids", None)
    sees_all = facts_of(model).sees_all
    if documents is None and "position_ids" in batch and not sees_all:
        documents = _documents_of(batch["position_ids"])
    shard.begin(shape[1], documents, seen=seen, is_causal=not sees_all)
    if is_inside:
        return batch | {n: shard.own(batch[n]) for n in batch.keys() & {"labels"}}
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
    return model.config.get_text_config().num_hidden_layers if own is None else own()


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
