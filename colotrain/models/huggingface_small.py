"""A small copy of a transformers model, of the same kinds of layers, for comparisons in seconds.

Widths, the vocabulary, numbers of heads, experts and layers are smaller; whatever else a
configuration says stays, so that every kind of module is there, with the same code.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from colotrain import module_tree
from colotrain.errors import ColotrainError, message_of
from colotrain.generators import seeded
from colotrain.models.huggingface_internals import construct_in_float64

LENGTH, VOCABULARY, HEADS, HEAD, WINDOW, EXPERTS = 16, 96, 4, 16, 5, 16
MOST_LAYERS = 12
"""Layers within which every kind of layer must have come up once."""
MOST_PARAMETERS = 60_000_000
"""Largest small copy: a setting that no rule here knows has kept it large."""
OF_VOCABULARY = re.compile(r"vocab_size")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
WIDTHS = ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim")
INNER = re.compile(r"intermediate|^(n_inner|ffn_dim|d_ff|ffn_hidden_size|mlp_hidden_size)$")
WINDOWS = ("sliding_window", "attention_chunk_size")
OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 20}
HEADS_OF_LATENTS = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
TOKEN = re.compile(r"_token_(id|index)$")


def head_counts(config: Any) -> dict[str, int]:
    """Every number of heads that a configuration has, by its name."""
    known = config.to_dict().items()
    return {n: v for n, v in known if type(v) is int and v > 0 and "head" in n and _is_count(n, v)}


def _is_count(name: str, value: int) -> bool:
    words = name.split("_")
    return words[-1] in ("heads", "head") and ("num" in words or "n" in words)


def is_image_text(model: Any) -> bool:
    return model.config.get_text_config() is not model.config


def language_model(model: Any) -> tuple[type[nn.Module], Any]:
    """Return what is compared, as class and configuration.

    That is the model, or of one that reads images the causal model of its language model's type.
    """
    text = model.config.get_text_config()
    if not is_image_text(model):
        return type(model), text
    import transformers

    known: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(text) not in known:
        raise ColotrainError(f"transformers has no causal model of type {text.model_type} alone")
    return known[type(text)], text


def small_copy(model: Any) -> Any:
    """A real float64 copy of `language_model` with small sizes, and random values everywhere.

    Raises `ColotrainError` where there is none.
    """
    architecture, config = language_model(model)
    text = config
    small = copy.deepcopy(config)
    if hasattr(small, "quantization_config"):
        del small.quantization_config
    num_layers = _layers_to_keep(model, text)
    for part in _parts(small):
        _reduce_(part, num_layers if part is small.get_text_config() else 2)
    try:
        with seeded(5), torch.device("cpu"):
            made = construct_in_float64(architecture, small)
            with torch.no_grad():
                for parameter in module_tree.parameters(made):
                    width = parameter.shape[-1] if parameter.ndim > 1 else 100
                    parameter.add_(torch.randn_like(parameter), alpha=width**-0.5)
    except Exception as error:  # whatever the library raises about sizes
        raise ColotrainError(f"no small copy of it can be made: {message_of(error)}") from error
    size = sum(p.numel() for p in module_tree.parameters(made))
    if size > MOST_PARAMETERS:
        raise ColotrainError(f"its smallest copy has {size / 1e6:.0f} M parameters")
    for module in module_tree.modules(made):
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return made.train()


def _parts(config: Any) -> Iterator[Any]:
    yield config
    for value in vars(config).values():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            yield from _parts(value)


def _layers_to_keep(model: nn.Module, config: Any) -> int:
    """Number of first layers among which each kind of layer is; at least two where there are."""
    total = next((v for name in LAYERS if type(v := getattr(config, name, None)) is int), 0)
    if not total:
        raise ColotrainError("its configuration has no number of layers")
    lists = [v for v in config.to_dict().values() if isinstance(v, list) and len(v) == total]
    kinds = [repr([each[index] for each in lists]) for index in range(total)]
    for layers in _layer_lists(model, total):
        for index, layer in enumerate(layers):
            kinds[index] += repr([(n, type(m)) for n, m in module_tree.named_modules(layer)])
    needed = max(kinds.index(kind) for kind in set(kinds)) + 1
    if needed > MOST_LAYERS:
        raise ColotrainError(f"a kind of layer comes up first in layer {needed - 1}")
    return min(max(needed, 2), total)


def _layer_lists(model: nn.Module, total: int) -> Iterator[nn.ModuleList]:
    for module in module_tree.modules(model):
        if isinstance(module, nn.ModuleList) and len(module) == total:
            yield module


def _reduce_(config: Any, num_layers: int) -> None:
    known: Mapping[str, Any] = config.to_dict()
    heads, total = head_counts(config), 0
    named = (heads[name] for name in ("num_attention_heads", "n_head", "n_heads") if name in heads)
    queries = next(named, max(heads.values(), default=1))
    width = next((v for name in WIDTHS if type(v := known.get(name)) is int), 0)
    size = known.get("head_dim")
    if type(size) is not int or "qk_rope_head_dim" in known:
        size = width // queries
    small_size = size if _names_each_frequency(known) else min(size, HEAD)
    for name in LAYERS:
        if type(known.get(name)) is int:
            total = known[name]
            setattr(config, name, min(total, num_layers))
    for name, value in known.items():
        if isinstance(value, list) and total > num_layers and len(value) == total:
            setattr(config, name, value[:num_layers])
        elif isinstance(value, float) and ("drop" in name or "jitter" in name):
            setattr(config, name, 0.0)
        elif type(value) is not int:
            continue
        elif name in heads:
            fewer = 1 if value == 1 else HEADS // 2
            setattr(config, name, HEADS if value == queries else fewer)
        elif name in WIDTHS:
            ratio = 1.0 if width == queries * size else 0.5 if width < queries * size else 2.0
            setattr(config, name, max(int(HEADS * small_size * ratio), 2 * HEADS))
        elif name == "head_dim" and "qk_rope_head_dim" not in known:
            setattr(config, name, small_size)
        elif name in LATENT:
            setattr(config, name, min(value, LATENT[name]))
        elif OF_VOCABULARY.search(name):
            setattr(config, name, VOCABULARY)
        elif TOKEN.search(name):
            setattr(config, name, min(value, VOCABULARY - 1))
        elif INNER.search(name):
            setattr(config, name, min(value, 48 if "moe" in name or "expert" in name else 80))
        elif name in WINDOWS:
            setattr(config, name, min(value, WINDOW))
        elif name in OF_EXPERTS:
            setattr(config, name, min(value, EXPERTS))
    if "qk_rope_head_dim" in known:
        _reduce_heads_of_latents_(config, known)
    if getattr(config, "pad_token_id", 0) is None:
        config.pad_token_id = 0  # classifiers look for padding
    if hasattr(config, "output_router_logits"):
        config.output_router_logits = False
    chosen = getattr(config, "num_experts_per_tok", None)
    if isinstance(chosen, int):
        most = min((getattr(config, n) for n in OF_EXPERTS if n in known), default=chosen)
        config.num_experts_per_tok = min(chosen, max(most // 2, 1))


def _names_each_frequency(known: Mapping[str, Any]) -> bool:
    """Whether settings of positions have the size of a head, which must then stay."""
    rope = known.get("rope_parameters") or {}
    kinds = [rope, *(each for each in rope.values() if isinstance(each, dict))]
    lists = any(isinstance(value, list) for kind in kinds for value in kind.values())
    return lists or isinstance(known.get("rotary_dim"), int)


def _reduce_heads_of_latents_(config: Any, known: Mapping[str, Any]) -> None:
    """Smaller heads of multi-head latent attention, of which some settings are sums of others."""
    sizes = {name: min(known[name], size) for name, size in HEADS_OF_LATENTS.items()}
    whole = known["qk_rope_head_dim"] + known["qk_nope_head_dim"]
    if known["v_head_dim"] == whole:
        sizes["v_head_dim"] = sizes["qk_rope_head_dim"] + sizes["qk_nope_head_dim"]
    sums = {known["qk_rope_head_dim"]: sizes["qk_rope_head_dim"]}
    sums[whole] = sizes["qk_rope_head_dim"] + sizes["qk_nope_head_dim"]
    for name in ("head_dim", "qk_head_dim"):
        if known.get(name) in sums:
            sizes[name] = sums[known[name]]
    for name, size in sizes.items():
        setattr(config, name, size)
