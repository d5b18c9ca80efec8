"""Tiny model directories with random weights, one per architecture of transformers, and data."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VOCAB, SEQ, NUM_LABELS, PIXELS = 260, 12, 3, 8
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 8}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = {
    **{"vocab_size": VOCAB, "n_positions": 64, "n_embd": 32, "n_layer": 3, "n_head": 4},
    **{"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "initializer_range": 0.1},
    **{"bos_token_id": 0, "eos_token_id": 0},
}
T5 = {
    **{"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
    **{"dropout_rate": 0.0, "pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0},
}
BART = {
    **{"vocab_size": VOCAB, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2},
    **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 64},
    **{"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "dropout": 0.0, "init_std": 0.1},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 2},
    "forced_eos_token_id": None,
}
VISION = {
    **{"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4},
    **{"intermediate_size": 48, "image_size": PIXELS, "patch_size": 4, "num_labels": NUM_LABELS},
    **NO_DROPOUT,
    "initializer_range": 0.1,
}
SIGHT_OF_PIXELS = {key: value for key, value in VISION.items() if key != "num_labels"}
BERT = {**SMALL, **NO_DROPOUT}
NO_JITTER = {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
EXPERTS = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}


@dataclass(frozen=True)
class Family:
    """An architecture with settings that make it tiny."""

    name: str
    architecture: str
    kind: str
    """`model_type` of its config.json."""
    settings: dict[str, Any] = field(default_factory=lambda: GROUPED)
    data: str = "causal"
    """Function of this module that makes its samples."""
    args: dict[str, Any] = field(default_factory=dict)
    """`model.args` when it is verified."""
    rounding: float = 1e-6
    """Bound on differences of gradients. Where it is more, plain transformers' float32 differs from
    its float64 by about as much in the second step."""

    def make(self, folder: Path) -> Path:
        """Save a model with random weights as transformers does."""
        import transformers

        torch.manual_seed(3)
        config = transformers.AutoConfig.for_model(self.kind, **self.settings)
        model = getattr(transformers, self.architecture)(config)
        model.save_pretrained(folder)
        return folder

    def load(self, folder: Path, **settings: Any) -> Any:
        """The directory as transformers itself loads it; all of its weights must be there."""
        import transformers

        if "experts" in str(self.settings):
            settings["experts_implementation"] = "eager"  # the fast one has no float64
        of_file = getattr(transformers, self.architecture).from_pretrained
        model, info = of_file(folder, output_loading_info=True, **settings)
        assert not any(info.values()), info
        return model


CAUSAL = (
    Family("Llama", "LlamaForCausalLM", "llama"),
    Family("Llama, tied", "LlamaForCausalLM", "llama", {**GROUPED, "tie_word_embeddings": True}),
    Family("Mistral", "MistralForCausalLM", "mistral"),
    Family("Qwen2", "Qwen2ForCausalLM", "qwen2"),
    Family("Qwen3", "Qwen3ForCausalLM", "qwen3"),
    Family("Gemma 2", "Gemma2ForCausalLM", "gemma2", {**GROUPED, "final_logit_softcapping": 3.0}),
    Family(
        "Gemma 3",
        "Gemma3ForCausalLM",
        "gemma3_text",
        {**GROUPED, "final_logit_softcapping": 3.0, "tie_word_embeddings": False},
    ),
    Family("Phi-3", "Phi3ForCausalLM", "phi3"),
    Family("OLMo 2", "Olmo2ForCausalLM", "olmo2"),
    Family("GPT-2", "GPT2LMHeadModel", "gpt2", GPT2),
    Family("GPT-NeoX, Pythia", "GPTNeoXForCausalLM", "gpt_neox", SMALL),
    Family("Granite", "GraniteForCausalLM", "granite", {**GROUPED, "logits_scaling": 4.0}),
    Family("Cohere", "CohereForCausalLM", "cohere", {**GROUPED, "logit_scale": 0.25}),
    Family("Phi", "PhiForCausalLM", "phi", SMALL),
    Family(
        "Falcon",
        "FalconForCausalLM",
        "falcon",
        {**SMALL, "num_kv_heads": 2, "new_decoder_architecture": True, "hidden_dropout": 0.0},
    ),
)
BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
MIXTURES = (
    Family(
        "Mixtral",
        "MixtralForCausalLM",
        "mixtral",
        {**GROUPED, **LOCAL_EXPERTS},
        args=BALANCED,
    ),
    Family(
        "Qwen3-MoE",
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        {**GROUPED, **EXPERTS},
        args=BALANCED,
    ),
)
IN_THREE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
"""Rotary positions of time, height and width."""
INTERLEAVED = {**IN_THREE, "mrope_interleaved": True, "partial_rotary_factor": 1.0}
ROUTED = {
    **{"moe_intermediate_size": 24, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
}
HALF_LINEAR = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "num_hidden_layers": 4},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "full_attention_interval": 2},
}
"""Linear attention in every other layer."""
STATE_SPACE = {
    **{"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 4},
}
LLAMA_4 = {**GROUPED, **LOCAL_EXPERTS, "intermediate_size_mlp": 48}
RECENT = (
    Family("Llama 4, text", "Llama4ForCausalLM", "llama4_text", LLAMA_4),
    Family("Ministral", "MinistralForCausalLM", "ministral"),
    Family("Ministral 3", "Ministral3ForCausalLM", "ministral3"),
    Family("Phi-MoE", "PhimoeForCausalLM", "phimoe", {**GROUPED, **LOCAL_EXPERTS, **NO_JITTER}),
    Family("SmolLM 3", "SmolLM3ForCausalLM", "smollm3"),
    Family(
        "OLMo 3", "Olmo3ForCausalLM", "olmo3", {**GROUPED, "num_hidden_layers": 4}, rounding=5e-6
    ),
    Family("GLM 4", "Glm4ForCausalLM", "glm4"),
    Family("GLM 4.5", "Glm4MoeForCausalLM", "glm4_moe", {**GROUPED, **ROUTED}),
    Family(
        "EXAONE 4",
        "Exaone4ForCausalLM",
        "exaone4",
        {**GROUPED, "num_hidden_layers": 4},
        rounding=5e-6,
    ),
    Family(
        "Gemma 4, text",
        "Gemma4ForCausalLM",
        "gemma4_text",
        {
            **GROUPED,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 8,
            "num_kv_shared_layers": 0,
        },
        rounding=2e-3,
    ),
    Family(
        "Qwen3-Next",
        "Qwen3NextForCausalLM",
        "qwen3_next",
        {
            **GROUPED,
            **EXPERTS,
            "num_hidden_layers": 4,
            "shared_expert_intermediate_size": 24,
            **HALF_LINEAR,
        },
        rounding=5e-4,
    ),
    Family(
        "GPT-OSS", "GptOssForCausalLM", "gpt_oss", {**GROUPED, **LOCAL_EXPERTS, "sliding_window": 8}
    ),
    Family(
        "Granite 4, hybrid",
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        {
            **GROUPED,
            **LOCAL_EXPERTS,
            "shared_intermediate_size": 24,
            "layer_types": ["mamba", "attention", "mamba"],
            **STATE_SPACE,
        },
    ),
    Family(
        "LFM2",
        "Lfm2ForCausalLM",
        "lfm2",
        {
            **GROUPED,
            "block_auto_adjust_ff_dim": False,
            "layer_types": ["conv", "full_attention", "conv"],
        },
    ),
    Family(
        "Falcon-H1",
        "FalconH1ForCausalLM",
        "falcon_h1",
        {**GROUPED, **STATE_SPACE, "mamba_d_ssm": 64},
    ),
    Family(
        "DeepSeek V3",
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        {
            **SMALL,
            "num_key_value_heads": 4,
            **ROUTED,
            "kv_lora_rank": 8,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 4,
            "v_head_dim": 8,
        },
    ),
    Family(
        "Cohere 2",
        "Cohere2ForCausalLM",
        "cohere2",
        {**GROUPED, "logit_scale": 0.25, "num_hidden_layers": 4},
    ),
    Family(
        "OLMoE",
        "OlmoeForCausalLM",
        "olmoe",
        {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2},
    ),
    Family(
        "StarCoder 2",
        "Starcoder2ForCausalLM",
        "starcoder2",
        {**GROUPED, "residual_dropout": 0.0, "embedding_dropout": 0.0},
    ),
    Family("Nemotron", "NemotronForCausalLM", "nemotron"),
    Family("ERNIE 4.5", "Ernie4_5ForCausalLM", "ernie4_5"),
    Family("Hunyuan", "HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense"),
    Family(
        "Seed-OSS",
        "SeedOssForCausalLM",
        "seed_oss",
        {**GROUPED, "attention_dropout": 0.0, "residual_dropout": 0.0},
    ),
    Family(
        "Mamba 2",
        "Mamba2ForCausalLM",
        "mamba2",
        {
            **SMALL,
            "num_heads": 8,
            "head_dim": 8,
            "state_size": 8,
            "n_groups": 2,
            "chunk_size": 4,
            "expand": 2,
        },
    ),
)
LANGUAGE = {**GROUPED, "model_type": "llama"}
SIGHT = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "image_size": 16, "patch_size": 4},
}
QWEN_SIGHT = {
    **{"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "patch_size": 4},
    "out_hidden_size": 32,
}
QWEN_MARKS = {
    **{"image_token_id": 255, "video_token_id": 254},
    **{"vision_start_token_id": 253, "vision_end_token_id": 252},
}
IMAGE_TEXT = (
    Family(
        "Gemma 3, image-text",
        "Gemma3ForConditionalGeneration",
        "gemma3",
        {
            **{"text_config": GROUPED, "vision_config": {**SIGHT, "vision_use_head": False}},
            **{"mm_tokens_per_image": 4, "image_token_index": 255},
            **{"boi_token_index": 254, "eoi_token_index": 253},
        },
    ),
    Family(
        "Gemma 4, image-text",
        "Gemma4ForConditionalGeneration",
        "gemma4",
        {
            "text_config": {
                **{**GROUPED, "vocab_size_per_layer_input": VOCAB},
                **{"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0},
            },
            "vision_config": SIGHT,
        },
        rounding=2e-3,
    ),
    Family(
        "Qwen2.5-VL",
        "Qwen2_5_VLForConditionalGeneration",
        "qwen2_5_vl",
        {
            "text_config": {**GROUPED, "rope_parameters": IN_THREE},
            "vision_config": {**QWEN_SIGHT, "window_size": 16, "fullatt_block_indexes": [1]},
            **QWEN_MARKS,
        },
    ),
    Family(
        "Qwen3-VL",
        "Qwen3VLForConditionalGeneration",
        "qwen3_vl",
        {
            "text_config": {**GROUPED, "rope_parameters": INTERLEAVED},
            "vision_config": {
                **{**QWEN_SIGHT, "num_position_embeddings": 16},
                "deepstack_visual_indexes": [0, 1],
            },
            **QWEN_MARKS,
        },
    ),
    Family(
        "Qwen3.5, image-text",
        "Qwen3_5ForConditionalGeneration",
        "qwen3_5",
        {
            "text_config": {
                **{**GROUPED, "num_hidden_layers": 4, "rope_parameters": INTERLEAVED},
                **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
                **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
                "full_attention_interval": 2,
            },
            "vision_config": {
                **{**QWEN_SIGHT, "num_position_embeddings": 16},
                "deepstack_visual_indexes": [],
            },
            **QWEN_MARKS,
        },
        rounding=5e-3,
    ),
    Family(
        "Mistral 3",
        "Mistral3ForConditionalGeneration",
        "mistral3",
        {
            "text_config": {**GROUPED, "model_type": "mistral"},
            "vision_config": {**SIGHT, "model_type": "pixtral", "head_dim": 8},
            **{"image_token_index": 255, "spatial_merge_size": 2},
        },
    ),
    Family(
        "Llama 4",
        "Llama4ForConditionalGeneration",
        "llama4",
        {
            "text_config": {
                **{**GROUPED, "intermediate_size_mlp": 48, "num_local_experts": 4},
            },
            "vision_config": {
                **{**SIGHT, "intermediate_size": 128, "pixel_shuffle_ratio": 0.5},
                **{"projector_input_dim": 32, "projector_output_dim": 32, "vision_output_dim": 32},
            },
            **{"image_token_index": 255, "boi_token_index": 254, "eoi_token_index": 253},
        },
    ),
    Family(
        "SmolVLM",
        "SmolVLMForConditionalGeneration",
        "smolvlm",
        {"text_config": LANGUAGE, "vision_config": SIGHT, "image_token_id": 255, "scale_factor": 2},
    ),
    Family(
        "LLaVA",
        "LlavaForConditionalGeneration",
        "llava",
        {
            "text_config": LANGUAGE,
            "vision_config": {**SIGHT, "model_type": "clip_vision_model", "projection_dim": 32},
            "image_token_index": 255,
        },
    ),
    Family(
        "InternVL",
        "InternVLForConditionalGeneration",
        "internvl",
        {
            "text_config": {**GROUPED, "model_type": "qwen2"},
            "vision_config": {**SIGHT, "image_size": [16, 16], "patch_size": [4, 4]},
            "image_token_id": 255,
        },
    ),
    Family(
        "LFM2-VL",
        "Lfm2VlForConditionalGeneration",
        "lfm2_vl",
        {
            "text_config": {
                **{**GROUPED, "model_type": "lfm2", "block_auto_adjust_ff_dim": False},
                "layer_types": ["conv", "full_attention", "conv"],
            },
            "vision_config": {
                **{**SIGHT, "model_type": "siglip2_vision_model", "num_patches": 16},
                "vision_use_head": False,
            },
            **{"image_token_id": 255, "projector_hidden_size": 32},
        },
    ),
)
"""Models of images and text, which text alone trains here."""
OTHERS = (
    Family("BERT", "BertForMaskedLM", "bert", BERT, "masked"),
    Family("RoBERTa", "RobertaForMaskedLM", "roberta", BERT, "masked"),
    Family(
        "BERT",
        "BertForSequenceClassification",
        "bert",
        {**BERT, "num_labels": NUM_LABELS},
        "classes",
    ),
    Family(
        "BERT",
        "BertForTokenClassification",
        "bert",
        {**BERT, "num_labels": NUM_LABELS},
        "token_classes",
    ),
    Family(
        "Llama",
        "LlamaForSequenceClassification",
        "llama",
        {**GROUPED, "num_labels": NUM_LABELS},
        "classes",
    ),
    Family("T5", "T5ForConditionalGeneration", "t5", T5, "pairs"),
    Family("BART", "BartForConditionalGeneration", "bart", BART, "pairs"),
    Family("ViT", "ViTForImageClassification", "vit", VISION, "images"),
    Family(
        "ModernBERT",
        "ModernBertForMaskedLM",
        "modernbert",
        {**BERT, "local_attention": 8, "global_attn_every_n_layers": 2, "cls_token_id": 2},
        "masked",
    ),
    Family("DeBERTa V2", "DebertaV2ForMaskedLM", "deberta-v2", BERT, "masked"),
    Family(
        "XLM-RoBERTa",
        "XLMRobertaForSequenceClassification",
        "xlm-roberta",
        {**BERT, "num_labels": NUM_LABELS},
        "classes",
    ),
    Family(
        "SigLIP",
        "SiglipForImageClassification",
        "siglip",
        {"vision_config": SIGHT_OF_PIXELS, "num_labels": NUM_LABELS},
        "images",
    ),
    Family("DINOv2", "Dinov2ForImageClassification", "dinov2", VISION, "images"),
)
FAMILIES = (*CAUSAL, *MIXTURES, *RECENT, *IMAGE_TEXT, *OTHERS)


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def causal(count: int = 64) -> list[dict[str, Tensor]]:
    """Random tokens, with labels that are shifted already."""
    tokens = torch.randint(VOCAB, (count, SEQ + 1), generator=generator())
    return [{"input_ids": row[:-1], "labels": row[1:]} for row in tokens]


def masked(count: int = 64) -> list[dict[str, Tensor]]:
    """Random tokens of which some are replaced by one that stands for nothing."""
    found = []
    for row in causal(count):
        labels = row["input_ids"].clone()
        chosen = torch.arange(SEQ) % 4 == len(found) % 4
        ids = labels.masked_fill(chosen, VOCAB - 1)
        found.append({"input_ids": ids, "labels": labels.masked_fill(~chosen, -100)})
    return found


def classes(count: int = 64) -> list[dict[str, Tensor]]:
    rows = causal(count)
    return [
        {"input_ids": row["input_ids"], "labels": row["input_ids"][0] % NUM_LABELS} for row in rows
    ]


def token_classes(count: int = 64) -> list[dict[str, Tensor]]:
    rows = causal(count)
    return [
        {"input_ids": row["input_ids"], "labels": row["input_ids"] % NUM_LABELS} for row in rows
    ]


def pairs(count: int = 64) -> list[dict[str, Tensor]]:
    """Inputs and outputs of other lengths; outputs end at different places."""
    rows = []
    for index, row in enumerate(causal(count)):
        labels = row["input_ids"][: SEQ - 3].flip(0).clamp(min=2)
        labels[SEQ - 3 - index % 3 :] = -100
        rows.append({"input_ids": row["input_ids"], "labels": labels})
    return rows


def images(count: int = 64) -> list[dict[str, Tensor]]:
    pixels = torch.randn(count, 3, PIXELS, PIXELS, generator=generator())
    return [{"pixel_values": image, "labels": (image.mean() > 0).long()} for image in pixels]
