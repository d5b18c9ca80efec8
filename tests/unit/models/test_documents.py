"""Documents of one sample kept apart in transformers' models, with masks and without."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from colotrain.errors import ColotrainError, UsageError
from colotrain.models.huggingface_documents import (
    MASKED,
    SEPARABLE,
    can_keep_documents_apart,
    needs_no_mask,
)
from colotrain.models.huggingface_loss import isolating_loss, shifted_loss
from colotrain.models.llm import positions_within

pytest.importorskip("transformers")

SETTINGS: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "n_embd": 32},
    **{"n_head": 4, "n_layer": 2, "n_positions": 64, "max_position_embeddings": 64},
    **{"initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0},
    **{"sliding_window": 5, "moe_intermediate_size": 24, "num_experts": 4},
    **{"num_experts_per_tok": 2, "num_local_experts": 4, "moe_num_experts": 4},
    **{"attention_dropout": 0.0, "hidden_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    **{"attn_pdrop": 0.0, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
    **{"decoder_sparse_step": 1, "shared_expert_intermediate_size": 24, "rotary_dim": 4},
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8},
    **{"v_head_dim": 8, "first_k_dense_replace": 1, "n_shared_experts": 1, "n_inner": 48},
}
OWN: dict[str, dict[str, Any]] = {  # latent attention has no groups of queries
    kind: {"num_key_value_heads": 4, "head_dim": 8} for kind in ("deepseek_v2", "deepseek_v3")
}
IN_FLOAT32 = ("deepseek_v2", "deepseek_v3", "dots1", "ernie4_5_moe", "glm4_moe", "minimax_m2")
"""Types of which a part, such as the router, is computed in float32."""
OFTEN = ("llama", "gpt2", "gemma3_text", "qwen3_moe", "gemma2")
KINDS = [
    pytest.param(kind, marks=() if kind in OFTEN else pytest.mark.slow)
    for kind in (*SEPARABLE, *MASKED)
]


def make(kind: str) -> Any:
    """A tiny model in float64, with a layer of each kind that the architecture has by default."""
    import transformers

    torch.manual_seed(5)
    default = transformers.AutoConfig.for_model(kind)
    known = SETTINGS | OWN.get(kind, {})
    settings = {key: value for key, value in known.items() if hasattr(default, key)}
    if layers := getattr(default, "layer_types", None):
        settings["layer_types"] = (2 * list(dict.fromkeys(layers)))[:2]
    config = transformers.AutoConfig.for_model(kind, **settings)
    config._experts_implementation = "eager"  # the fast one has no float64
    return transformers.AutoModelForCausalLM.from_config(config).double()


def samples() -> tuple[Tensor, Tensor]:
    """Two samples, and the documents of their tokens."""
    ids, begins = torch.randint(1, 64, (2, 24)), torch.zeros(2, 24, dtype=torch.int64)
    begins[0, [7, 8, 17]] = begins[1, 11] = 1
    return ids, begins.cumsum(1)


def alone(model: Any, ids: Tensor, documents: Tensor) -> Tensor:
    """Logits of each document by itself."""
    rows = []
    for row, numbers in zip(ids, documents, strict=True):
        parts = (row[numbers == number] for number in numbers.unique())
        rows.append(torch.cat([model(input_ids=part[None]).logits for part in parts], 1))
    return torch.cat(rows)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_each_document_by_itself(kind: str) -> None:
    model = make(kind).eval()
    assert can_keep_documents_apart(model)
    assert needs_no_mask(model) == (kind in SEPARABLE)
    ids, documents = samples()
    wanted = alone(model, ids, documents)
    found = isolating_loss(model.forward, input_ids=ids, document_ids=documents).logits
    limit = 1e-5 if kind in (*MASKED, *IN_FLOAT32) else 1e-9
    torch.testing.assert_close(found, wanted, rtol=0, atol=limit)
    assert (model(input_ids=ids).logits - wanted).abs().max() > 1e-4
    torch.testing.assert_close(alone(model, ids, documents), wanted)  # it has not changed


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_are_those_under_a_mask(recompute: bool) -> None:
    ids, documents = samples()
    ways = (
        (isolating_loss, {"document_ids": documents}),
        (shifted_loss, {"position_ids": positions_within(documents)}),  # transformers' own masks
    )
    grads = []
    for loss_of, told in ways:
        model = make("gemma3_text").train()  # layers with a window, and grouped queries
        if recompute:
            for layer in model.model.layers:
                layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
        loss, _ = loss_of(model.forward, input_ids=ids, labels=ids, **told)
        grads.append(torch.autograd.grad(loss, list(model.parameters())))
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=1e-10)


def test_a_padding_mask_of_ones_own_is_used_after_documents_were() -> None:
    model = make("llama").eval()
    ids, documents = samples()
    padding = torch.ones_like(ids)
    padding[:, :6] = 0
    wanted = model(input_ids=ids, attention_mask=padding).logits[:, 6:]
    isolating_loss(model.forward, input_ids=ids, document_ids=documents)
    found = model(input_ids=ids, attention_mask=padding).logits[:, 6:]
    torch.testing.assert_close(found, wanted)
    with pytest.raises(UsageError, match="document_ids and an attention_mask"):
        isolating_loss(model.forward, input_ids=ids, document_ids=documents, attention_mask=padding)


def test_a_layer_that_attends_otherwise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("llama")
    ids, documents = samples()
    forward = functools.partial(isolating_loss, model.forward)
    monkeypatch.setattr(
        model.model.layers[1].self_attn, "forward", lambda hidden_states, **_: (hidden_states, None)
    )
    with pytest.raises(ColotrainError, match=r"data\.isolate: 1 of 2 layers kept documents apart"):
        forward(input_ids=ids, document_ids=documents)


@pytest.mark.parametrize("kind", ["biogpt", "bloom"])
def test_an_architecture_that_is_not_known_takes_no_documents(kind: str) -> None:
    assert not can_keep_documents_apart(make(kind))
