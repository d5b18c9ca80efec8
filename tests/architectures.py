"""A tiny directory of every architecture of transformers that has a task, and samples for it.

Sizes are found by the names of a configuration's settings; what an architecture needs beside them
stands in `OWN`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from colotrain.models.huggingface_task import MASKED, TASKS, Task

VOCAB, SEQ, CLASSES, PIXELS = 260, 12, 3, 32
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "decoder_vocab_size", "n_vocab"), VOCAB),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "emb_dim"), 32),
    **dict.fromkeys(("embedding_size", "encoder_hidden_size", "decoder_hidden_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "depth"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_encoder_layers", "num_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("num_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "num_encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "kv_channels", "attention_head_dim"), 8),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "encoder_ffn_dim"), 48),
    **dict.fromkeys(("decoder_ffn_dim", "d_inner", "n_inner", "ffn_hidden_size"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 64),
    **dict.fromkeys(("n_ctx", "seq_length", "max_sequence_length"), 64),
    **dict.fromkeys(("pad_token_id", "bos_token_id"), 0),
    **{"eos_token_id": 1, "decoder_start_token_id": 0, "sep_token_id": 1},
    **{"num_labels": CLASSES, "image_size": PIXELS, "patch_size": 8, "num_channels": 3},
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8},
    **{
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "v_head_dim": 8,
        "qk_head_dim": 16,
        "n_group": 1,
        "topk_group": 1,
    },
}
"""Name of a setting → value of every configuration that has it."""
ALWAYS = ("num_labels", "pad_token_id", "eos_token_id", "decoder_start_token_id")
SWIN = {"num_heads": [1, 2, 2, 4], "embed_dim": 8, "window_size": 4, "patch_size": 2}
HYBRID = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_chunk_size": 8}
OWN: dict[str, dict[str, Any]] = {
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "bit": {"num_groups": 4, "embedding_size": 8, "num_channels": 3},
    "codegen": {"rotary_dim": 4},
    "convnext": {"image_size": 64, "patch_size": 4},
    "convnextv2": {"image_size": 64, "patch_size": 4},
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_method": "greedy"},
    "donut-swin": {**SWIN, "image_size": 64},
    "dots3_note_text": {"num_key_value_heads": 4},
    "esm": {"vocab_size": VOCAB, "pad_token_id": 0, "mask_token_id": 5},
    "esmc": {"num_key_value_heads": 4},
    "gemma4_text": {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {**MAMBA, "layer_types": ["mamba", "attention"]},
    "hiera": {"image_size": [32, 32], "embed_dim": 8, "num_heads": [1, 2, 2, 4]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lilt": {"hidden_size": 48, "num_attention_heads": 4},
    "luke": {"entity_vocab_size": 16, "entity_emb_size": 16},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 16, "chunk_size": 8, "n_groups": 1},
    "ministral": {"head_dim": 8, "layer_types": ["full_attention", "sliding_attention"]},
    "mistral4": {"qk_nope_head_dim": 8, "head_dim": 16},
    "mobilevit": {"image_size": 64, "patch_size": 2},
    "mobilevitv2": {"image_size": 64, "patch_size": 2},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 8},
    "mobilebert": {"embedding_size": 24},
    "neomme": {"head_dim": 16},
    "pvt": {"num_attention_heads": [1, 2, 2, 4], "image_size": 64},
    "pvt_v2": {"num_attention_heads": [1, 2, 2, 4], "image_size": 64},
    "qwen3_5_moe_text": HYBRID,
    "qwen3_5_text": HYBRID,
    "qwen3_next": HYBRID,
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 32},
    "reformer": {"is_decoder": True, "axial_pos_embds": False, "attn_layers": ["local", "local"]},
    "roc_bert": {"pronunciation_vocab_size": 16, "shape_vocab_size": 16},
    "segformer": {"num_attention_heads": [1, 2, 2, 4], "hidden_sizes": [8, 16, 24, 32]},
    "swin": {**SWIN, "image_size": 64},
    "swinv2": {**SWIN, "image_size": 64},
    "zamba": {"num_hidden_layers": 6, "layer_types": ["mamba", "mamba", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}
"""Type → settings of its own."""
OVERWRITTEN = ("balancing_biases",)
"""Tensors that transformers reads from files and then sets to their initial values (Zaya's)."""


@dataclass(frozen=True)
class Architecture:
    """An architecture of transformers, for a task that colotrain knows."""

    kind: str
    name: str
    task: Task

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"

    def make(self, folder: Path) -> Any:
        """Save a tiny model with random weights and return it."""
        import transformers

        torch.manual_seed(3)
        model = getattr(transformers, self.name)(config_of(self.kind))
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                if tensor.is_floating_point() and not name.endswith(OVERWRITTEN):
                    tensor.add_(torch.rand(tensor.shape, dtype=tensor.dtype), alpha=0.05)
            for module in model.modules():
                if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
                    module.weight[module.padding_idx] = 0.0  # as it is in every trained model
        model.save_pretrained(folder)
        return model

    def samples(self, config: Any, count: int = 8) -> list[dict[str, Tensor]]:
        return SAMPLES[self.task.name](config, count)


@functools.cache
def architectures() -> tuple[Architecture, ...]:
    """One architecture of every type that has a task, for the first of its tasks."""
    from transformers.models.auto import modeling_auto

    found: dict[str, Architecture] = {}
    for task in (MASKED, *TASKS):  # encoders may have a causal head, too, which sees the future
        for kind, name in getattr(modeling_auto, f"{task.registry}_NAMES").items():
            name = name if isinstance(name, str) else name[0]
            found.setdefault(kind, Architecture(kind, name, task))
    return tuple(found[kind] for kind in sorted(found))


def config_of(kind: str) -> Any:
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[kind](**settings_of(CONFIG_MAPPING[kind]) | OWN.get(kind, {}))


def settings_of(made: Any) -> dict[str, Any]:
    """Settings that make a configuration small, those of its parts included."""
    default = made()
    known = default.to_dict()
    settings: dict[str, Any] = {}
    for name, value in known.items():
        if name in SIZES and type(value) is int:
            settings[name] = SIZES[name]
        elif isinstance(value, list | tuple) and value and all(isinstance(n, int) for n in value):
            settings |= _of_list(name, value)
        elif isinstance(value, float) and "drop" in name:
            settings[name] = 0.0
    heads = settings.get("num_attention_heads")
    if "qk_rope_head_dim" in settings and heads:  # multi-head latent attention
        settings["num_key_value_heads"] = heads
    settings |= {name: SIZES[name] for name in ALWAYS if hasattr(default, name)}
    if known.get("is_encoder_decoder"):
        settings["decoder_start_token_id"] = 0
    if known.get("layer_types") and not isinstance(known.get("num_hidden_layers"), int):
        settings["layer_types"] = list(dict.fromkeys(known["layer_types"]))
    for name, part in getattr(made, "sub_configs", {}).items():
        part = type(getattr(default, name, None)) if getattr(default, name, None) else part
        if hasattr(part, "model_type") and part.model_type:
            settings[name] = settings_of(part) | OWN.get(part.model_type, {})
    return settings


def _of_list(name: str, value: list[int]) -> dict[str, Any]:
    if name in ("depths", "layers", "num_blocks"):
        return {name: [1] * len(value)}
    if name in ("hidden_sizes", "embed_dims", "embed_dim", "neck_hidden_sizes", "width"):
        return {name: [8 * (n + 1) for n in range(len(value))]}
    return {}


def tokens(count: int, length: int = SEQ) -> Tensor:
    made = torch.Generator().manual_seed(5)
    return torch.randint(2, VOCAB - 10, (count, length), generator=made)


def causal(config: Any, count: int) -> list[dict[str, Tensor]]:
    """Random tokens, with labels that are shifted already."""
    return [{"input_ids": row[:-1], "labels": row[1:]} for row in tokens(count, SEQ + 1)]


def hidden(config: Any, count: int) -> list[dict[str, Tensor]]:
    """Tokens of which some are hidden, and are the labels."""
    chosen = torch.arange(SEQ) % 4 == 1
    return [
        {
            "input_ids": row.masked_fill(chosen, VOCAB - 1),
            "labels": row.masked_fill(~chosen, -100),
        }
        for row in tokens(count)
    ]


def sequences(config: Any, count: int) -> list[dict[str, Tensor]]:
    return [{"input_ids": row, "labels": row.flip(0)} for row in tokens(count)]


def classes(config: Any, count: int) -> list[dict[str, Tensor]]:
    return [{"input_ids": row, "labels": row[0] % CLASSES} for row in tokens(count)]


def token_classes(config: Any, count: int) -> list[dict[str, Tensor]]:
    return [{"input_ids": row, "labels": row % CLASSES} for row in tokens(count)]


def spans(config: Any, count: int) -> list[dict[str, Tensor]]:
    return [
        {"input_ids": r, "start_positions": r[0] % 5, "end_positions": r[1] % 5 + 5}
        for r in tokens(count)
    ]


def choices(config: Any, count: int) -> list[dict[str, Tensor]]:
    rows = tokens(count, 2 * SEQ)
    return [{"input_ids": row.view(2, SEQ), "labels": row[0] % 2} for row in rows]


def images(config: Any, count: int) -> list[dict[str, Tensor]]:
    size = getattr(config, "image_size", PIXELS)
    sides = tuple(size) if isinstance(size, list | tuple) else (size, size)
    channels = getattr(config, "num_channels", 3)
    pixels = torch.randn(count, channels, *sides, generator=torch.Generator().manual_seed(5))
    return [{"pixel_values": p, "labels": torch.tensor(n % CLASSES)} for n, p in enumerate(pixels)]


SAMPLES = {
    "causal language modelling": causal,
    "image-text to text": causal,
    "sequence-to-sequence language modelling": sequences,
    "masked language modelling": hidden,
    "sequence classification": classes,
    "token classification": token_classes,
    "question answering": spans,
    "multiple choice": choices,
    "image classification": images,
}
"""Task → function that makes its samples."""


def samples_of(kind: str) -> list[dict[str, Tensor]]:
    """The samples of a type, as `data.target` names them."""
    known = next(each for each in architectures() if each.kind == kind)
    return known.samples(config_of(kind))
