"""The routers' auxiliary loss is that of transformers, sample by sample, without padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from colotrain.engine.gradients.accumulation import weighted_loss
from colotrain.errors import ConfigError
from colotrain.models.loading import build_whole
from colotrain.spec.objectives import IGNORE_INDEX, PADDING_MASK
from colotrain.spec.plan import ModelPlan

transformers = pytest.importorskip("transformers")

VOCAB, LENGTHS, SEQ = 64, (5, 9, 3, 7), 12
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.5,
    "output_router_logits": True,
    "initializer_range": 0.2,
    "decoder_sparse_step": 1,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
KINDS = ("Mixtral", "Qwen2Moe", "Qwen3Moe", "Olmoe", "GraniteMoe")


def make(kind: str, folder: Path) -> Any:
    torch.manual_seed(1)
    config = getattr(transformers, f"{kind}Config")(**SIZES)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    return model


def samples() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(1, VOCAB, (length,), generator=generator) for length in LENGTHS]


def theirs(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """transformers' own loss of each sample by itself, weighted by its targets."""
    model.set_experts_implementation("eager")
    model = model.double()
    total, count = torch.zeros((), dtype=torch.float64), 0
    for tokens in samples():
        own = model(input_ids=tokens[None], labels=tokens[None])
        total, count = total + own.loss * (len(tokens) - 1), count + len(tokens) - 1
    (total / count).backward()
    return (total / count).detach(), {n: p.grad for n, p in model.named_parameters()}


def one_a_row(cut: list[int], mask: str = "attention_mask") -> list[dict[str, Tensor]]:
    shape = len(LENGTHS), SEQ
    batch = {
        "input_ids": torch.zeros(shape, dtype=torch.int64),
        "labels": torch.full(shape, IGNORE_INDEX),
        mask: torch.zeros(shape, dtype=torch.int64),
    }
    for row, tokens in enumerate(samples()):
        batch["input_ids"][row, : len(tokens)] = tokens
        batch["labels"][row, : len(tokens) - 1] = tokens[1:]
        batch[mask][row, : len(tokens)] = 1
    parts = zip(*(tensor.split(cut) for tensor in batch.values()), strict=True)
    return [dict(zip(batch, part, strict=True)) for part in parts]


def two_a_row() -> list[dict[str, Tensor]]:
    tokens = samples()
    rows = []
    for pair in (tokens[:2], tokens[2:]):
        labels = [torch.cat([t[1:], torch.tensor([IGNORE_INDEX])]) for t in pair]
        padding = 16 - sum(map(len, pair))
        rows.append(
            {
                "input_ids": torch.cat([*pair, torch.zeros(padding, dtype=torch.int64)]),
                "labels": torch.cat([*labels, torch.full((padding,), IGNORE_INDEX)]),
                "document_ids": torch.cat(
                    [torch.full((len(t),), at) for at, t in enumerate(pair)]
                    + [torch.full((padding,), -1)]
                ),
            }
        )
    return [{name: torch.stack([row[name] for row in rows]) for name in rows[0]}]


@pytest.mark.parametrize(
    "kind", ["Mixtral", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS[1:])]
)
def test_padding_does_not_count_however_samples_are_laid_out(kind: str, tmp_path: Path) -> None:
    wanted, gradients = theirs(make(kind, tmp_path))
    for batches in (one_a_row([4]), one_a_row([1, 3], PADDING_MASK), two_a_row()):
        model = build_whole(ModelPlan(target="", hf=str(tmp_path)), seed=0).double()
        losses = [weighted_loss(model, batch) for batch in batches]
        loss = sum(loss for loss, _ in losses) / sum(count for _, count in losses)
        loss.backward()
        torch.testing.assert_close(loss.detach(), wanted, rtol=1e-6, atol=1e-6)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-5, atol=1e-7)


def test_an_auxiliary_loss_with_other_arguments_is_refused(tmp_path: Path) -> None:
    make("Doge", tmp_path)
    with pytest.raises(ConfigError, match="auxiliary loss of DogeForCausalLM is not known"):
        build_whole(ModelPlan(target="", hf=str(tmp_path)), seed=0)
