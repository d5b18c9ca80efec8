"""`models/llm.py` as a Llama: the same computation under transformers' names.

Both normalise with RMSNorm before attention and SwiGLU, rotate the first half of each head with
its second half (rotary positions), share key and value heads, and have no biases, so every tensor
is exported unchanged.
"""

from __future__ import annotations

import re
from typing import Any, cast

import torch

from colotrain.models.llm import INIT_STD, LLM, Block

TARGET = "colotrain.models.llm:LLM"
_OUTER = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_INNER = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}


def llama_name(name: str) -> str:
    """Translate the name of a parameter of `LLM` into transformers' name."""
    if name in _OUTER:
        return _OUTER[name]
    found = re.fullmatch(r"blocks\.(\d+)\.(.+)\.weight", name)
    assert found is not None, f"{name} is no parameter of LLM"
    return f"model.layers.{found[1]}.{_INNER[found[2]]}.weight"


def llama_config(model: LLM, *, seq_len: int, dtype: str, end: int | None) -> dict[str, Any]:
    """The config.json of `model`. `end` is the token between documents."""
    block = cast(Block, model.blocks[0])
    theta = float(model.rope_theta)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": model.vocab_size,
        "hidden_size": model.d_model,
        "intermediate_size": block.mlp.gate.out_features,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": block.attention.num_heads,
        "num_key_value_heads": block.attention.num_kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": seq_len,
        "rms_norm_eps": _eps(block.attention_norm),
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": INIT_STD,
        "tie_word_embeddings": model.head.weight is model.embed.weight,
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": None,
        "use_cache": True,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def _eps(norm: torch.nn.RMSNorm) -> float:
    assert norm.eps is not None, "LLM gives its norms an epsilon"
    return norm.eps
