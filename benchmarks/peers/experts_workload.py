"""The mixture of experts that systems train in benchmarks/experts.py."""

from __future__ import annotations

from pathlib import Path

from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

SEQ_LEN, VOCABULARY = 128, 256


def write_model(folder: Path) -> None:
    """A Qwen3-MoE with 26 million numbers, nearly all of them in experts."""
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        moe_intermediate_size=512,
        num_experts=16,
        num_experts_per_tok=2,
        max_position_embeddings=SEQ_LEN,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
