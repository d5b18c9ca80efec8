"""Memory that others measured and published, beside what the planner says of the same training."""

from __future__ import annotations

from typing import Any

import pytest

from colotrain.models.loading import build_on_meta
from colotrain.planner.layout import Layout
from colotrain.planner.memory import predict
from colotrain.planner.model_states import model_state_bytes
from colotrain.planner.traced.survey import survey
from colotrain.planner.traced.tracing import trace
from colotrain.spec.plan import FreezePlan, ModelPlan, OptimPlan, Recompute
from colotrain.spec.plugins import ROWS

MIB, GIB = 1 << 20, 1 << 30
ADAM = OptimPlan(
    name="adamw",
    lr=1.0,
    betas=(0.9, 0.999),
    eps=1e-8,
    weight_decay=0.0,
    schedule="constant",
    warmup_steps=0,
    final_ratio=1.0,
)


def layout(plugin: str, shard: int, **changes: Any) -> Layout:
    row = ROWS[plugin]
    lives, gradients = row.parameters_live, row.gradients
    return Layout(
        parameters_live=lives,
        gradients=gradients,
        shard=shard,
        optim=ADAM,
        device="cuda",
        **changes,
    )


def bert_large() -> Any:
    """`bert-large-uncased` with a classifier, attention written out as in 2022."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        vocab_size=30522,
        attn_implementation="eager",
    )
    return BertForSequenceClassification(config)


@pytest.mark.parametrize(
    ("micro_batch", "checkpointing", "published_mib"),
    [(4, "none", 14949), (1, "none", 8681), (1, "full", 6775)],
)
def test_bert_large_on_a_v100_in_the_guide_of_transformers(
    micro_batch: int, checkpointing: Recompute, published_mib: int
) -> None:
    """https://huggingface.co/docs/transformers/v4.21.0/perf_train_gpu_one, by nvidia-smi.

    Sequences of 512, fp32, AdamW; 1343 MiB are occupied before there is a model. Plain torch has
    no gathered copies and no buffers of collectives. Its trainer zeroed gradients and did not drop
    them, so that they are there throughout, as while accumulating. nvidia-smi counts what the
    allocator keeps, too: parts of large blocks that it had cut up and could not use again.
    """
    pytest.importorskip("transformers")
    import torch

    source = ModelPlan(target="tests.unit.planner.test_published_memory:bert_large")
    model = build_on_meta(source)
    assert model is not None
    tokens = torch.empty(512, dtype=torch.int64, device="meta")
    followed = trace(
        model.train(),
        {"input_ids": tokens, "labels": torch.empty((), dtype=torch.int64, device="meta")},
        precision="fp32",
        checkpointing=checkpointing,
        device="cuda",
        micro_batch=micro_batch,
    )
    made = layout("zero1", 1, accumulation_steps=4, micro_batch=micro_batch)
    found = predict(made, survey(source, FreezePlan(patterns=()), 512), followed).breakdown
    ours = found.total - found.gathered - found.buffers
    assert 0.85 * (published_mib - 1343) < ours / MIB < 1.02 * (published_mib - 1343)


LLAMA_8B = ModelPlan(
    target="colotrain.models.llm:LLM",
    args={
        "vocab_size": 128256,
        "d_model": 4096,
        "num_layers": 32,
        "num_heads": 32,
        "num_kv_heads": 8,
        "d_hidden": 14336,
        "tie_embeddings": False,
    },
)


@pytest.mark.parametrize(
    ("on_8_gib", "on_128_gib"),
    [(82.4, 67.0), (77.0, 62.0), (76.8, 61.8)],
    ids=["eager", "compiled", "float8"],
)
def test_what_more_gpus_save_in_torchtitan_s_tables(on_8_gib: float, on_128_gib: float) -> None:
    """benchmarks/llama3_h100_202412_torchtitan.md of pytorch/torchtitan, tables 1 and 3.

    Llama 3.1 8B under FSDP with the same local batch on 8 and on 128 H100: activations (of
    selective recomputation, which colotrain has not) are the same, and the model's state is not.
    """
    looked = survey(LLAMA_8B, FreezePlan(patterns=()), 8192)
    assert sum(p.numel for p in looked.parameters) == pytest.approx(8.03e9, rel=0.001)
    on_8, on_128 = (
        model_state_bytes(layout("zero3", ranks, precision="bf16"), looked).total
        for ranks in (8, 128)
    )
    assert (on_8 - on_128) / GIB == pytest.approx(on_8_gib - on_128_gib, rel=0.1)
