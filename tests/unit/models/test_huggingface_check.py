"""Whether ranks may divide a type of transformers is found by computing, and what differs is named.

The same types are compared on ranks of their own in tests/dist/test_tensor_parallel.py and
tests/dist/test_context_parallel.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from colotrain.models import (
    huggingface_attention,
    huggingface_check,
    huggingface_tensors,
    tensor_parallel_styles,
)
from colotrain.models.context_parallel import SequenceShard
from colotrain.models.facts import facts_of
from colotrain.models.huggingface import let_divide_samples_, let_predict_next_
from colotrain.models.huggingface_check import why_matrices_differ, why_sequences_differ
from colotrain.models.huggingface_internals import let_experts_compute_anywhere_
from colotrain.models.tensor_parallel import DIVISIONS
from colotrain.spec.divisions import Divisions

pytest.importorskip("transformers")
SIZES: dict[str, Any] = {
    **{"num_hidden_layers": 2, "hidden_size": 64},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
}


@pytest.fixture(autouse=True)
def experts_in_float64() -> None:
    let_experts_compute_anywhere_()


def model_of(kind: str, **settings: Any) -> Any:
    """A model of the sizes that transformers gives the type, without values."""
    import transformers

    config = transformers.AutoConfig.for_model(kind, **settings)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def matrices(model: Any, change: Callable[[Divisions], Divisions] = lambda how: how) -> str:
    """Why its matrices may not be divided, where `change` makes its divisions wrong."""

    def equip(model: nn.Module) -> None:
        let_predict_next_(model)
        how = change(getattr(model, DIVISIONS)())
        setattr(model, DIVISIONS, lambda: how)

    equip(model)
    return why_matrices_differ(model, equip)


def sequences(model: Any) -> str:
    let_predict_next_(model)
    return facts_of(model).whole_sequences or why_sequences_differ(model, let_predict_next_)


REFUSED = {
    "opt": ("layers.0.self_attn.out_proj differs", ""),
    "gpt2": ("no rule for transformer.h.0.attn.c_attn, a Conv1D", ""),
    "stablelm": ("layers.0.self_attn raised shape", ""),
    "apertus": ("mlp.act_fn.alpha_n differs", ""),
    "bloom": ("", "self_attention.dense differs"),
    "gpt_oss": ("", "layers.0.self_attn raised mesh.cp: attention takes s_aux"),
    "gemma2": ("", "soft cap on its scores"),
}
"""Type → why ranks may not divide its matrices, and its samples; "" where they may."""


@pytest.mark.parametrize("kind", REFUSED)
def test_what_differs_is_refused_by_the_name_of_its_module(kind: str) -> None:
    of_matrices, of_sequences = REFUSED[kind]
    for found, wanted in (
        (matrices(model_of(kind)), of_matrices),
        (sequences(model_of(kind)), of_sequences),
    ):
        assert wanted in found
        assert bool(wanted) == bool(found)


def with_style(glob: str, style: str, dim: int) -> Callable[[Divisions], Divisions]:
    def change(how: Divisions) -> Divisions:
        (name,) = (known for known in how.styles if known.endswith(glob))
        dims = {key: d for key, d in how.dims.items() if not key.startswith(name)}
        bias = {f"{name}.bias": 0} if dim == 0 else {}
        return replace(
            how, styles={**how.styles, name: style}, dims={f"{name}.weight": dim, **bias, **dims}
        )

    return change


def test_a_plan_that_calls_a_layer_by_the_wrong_style_is_found() -> None:
    column = with_style("mlp.down_proj", "colwise", 0)
    assert "mlp.down_proj raised" in matrices(model_of("llama", **SIZES), column)
    gathers = with_style("mlp.down_proj", "rowwise_split_input", 1)
    assert "mlp.down_proj raised" in matrices(model_of("llama", **SIZES), gathers)


def test_heads_of_keys_that_are_fewer_than_ranks_are_found() -> None:
    def forget(how: Divisions) -> Divisions:
        return replace(how, sizes={"num_attention_heads": 4})

    assert "layers.0.self_attn" in matrices(model_of("llama", **SIZES), forget)


def test_a_module_on_parts_of_heads_without_a_summed_gradient_is_found() -> None:
    def forget(how: Divisions) -> Divisions:
        return replace(how, styles={n: s for n, s in how.styles.items() if "q_norm" not in n})

    found = matrices(model_of("qwen3", **SIZES), forget)
    assert "gradient of model.layers.1.self_attn.q_norm.weight" in found


def test_a_key_of_all_heads_without_a_summed_gradient_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not matrices(model_of("minicpm3", num_hidden_layers=2))
    monkeypatch.setattr(
        tensor_parallel_styles, "_latent", lambda forward, size, shard, x: forward(x)
    )
    found = matrices(model_of("minicpm3", num_hidden_layers=2))
    assert "gradient of" in found
    assert "kv_a_proj_with_mqa" in found


def test_a_bias_that_every_rank_adds_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def on_every_rank(module: nn.Linear, shard: Any, draws: Any, x: torch.Tensor) -> torch.Tensor:
        product = nn.functional.linear(x, module.weight, module.bias)
        return tensor_parallel_styles.leave(product, shard)

    monkeypatch.setitem(tensor_parallel_styles._FORWARDS, "rowwise", on_every_rank)
    assert "dense differs" in matrices(model_of("phi", **SIZES))


def test_a_window_that_attention_does_not_get_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = huggingface_attention.attend
    monkeypatch.setattr(
        huggingface_attention, "attend", lambda *inputs, window, **more: attend(*inputs, **more)
    )
    assert "layers.0.self_attn.o_proj differs" in sequences(model_of("mistral", **SIZES))


def test_attention_to_the_own_keys_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def to_own(query: Any, key: Any, value: Any, shard: Any, **_: Any) -> torch.Tensor:
        shard.calls += 1
        return nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=query.shape[1] != key.shape[1]
        )

    monkeypatch.setattr(huggingface_attention, "attend", to_own)
    assert "layers.0.self_attn.o_proj differs" in sequences(model_of("llama", **SIZES))


def test_one_head_too_few_is_found() -> None:
    def equip(model: Any) -> None:
        let_predict_next_(model)
        for layer in model.model.layers:
            layer.self_attn.q_proj.register_forward_hook(
                lambda _, inputs, out: torch.cat((out[..., :-16], 0 * out[..., -16:]), dim=-1)
            )

    model = model_of("llama", **SIZES)
    let_predict_next_(model)
    assert "layers.0.self_attn.o_proj differs" in why_matrices_differ(model, equip)
    assert "layers.0.self_attn.q_proj differs" in why_sequences_differ(model, equip)


def of_encoder(architecture: str, kind: str, **settings: Any) -> str:
    """Why the samples of a model that is no causal one may not be divided."""
    import transformers

    config = transformers.AutoConfig.for_model(kind, num_hidden_layers=2, **settings)
    with torch.device("meta"):
        model = getattr(transformers, architecture).from_config(config)
    let_divide_samples_(model)
    why = facts_of(model).whole_sequences
    return why or why_sequences_differ(model, let_divide_samples_, predicts_next=False)


def test_encoders_and_classifiers_are_compared_with_padding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not of_encoder("AutoModelForSequenceClassification", "llama", hidden_size=64)
    assert not of_encoder("AutoModelForTokenClassification", "camembert")
    assert not of_encoder("AutoModel", "bert")
    windows = of_encoder("AutoModelForMaskedLM", "modernbert")
    assert "layers.1.attn raised no encoder with a window" in windows
    of_positions = of_encoder("AutoModelForMaskedLM", "mpnet")
    assert "embeddings.LayerNorm differs" in of_positions
    mask_of = SequenceShard.mask_of

    def with_padding(shard: SequenceShard, like: torch.Tensor, window: int | None) -> Any:
        shard.samples.seen = None
        return mask_of(shard, like, window)

    monkeypatch.setattr(SequenceShard, "mask_of", with_padding)
    found = of_encoder("AutoModelForMaskedLM", "bert")
    assert "layer.0.attention.self differs" in found


def test_layers_whose_kind_comes_late_and_unknown_positions_are_refused() -> None:
    kinds = ["full_attention"] * 13 + ["sliding_attention"]
    late = model_of("qwen3", **{**SIZES, "num_hidden_layers": 14, "layer_types": kinds})
    assert "comes up first in layer 13" in matrices(late)
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    assert "dynamic positions" in sequences(model_of("llama", rope_parameters=rope, **SIZES))


def test_a_module_that_the_small_copy_lacks_is_refused_by_name() -> None:
    model = model_of("llama", **SIZES)
    let_predict_next_(model)
    model.model.layers[1].mlp.up_proj = nn.Bilinear(1, 1, 1)
    assert "has no counterpart" in matrices(model)


def test_a_type_without_a_plan_gets_one_by_shapes() -> None:
    plan = huggingface_tensors.plan_by_shapes(model_of("bloom", n_layer=2))
    assert plan == {
        "transformer.h.*.self_attention.query_key_value": "colwise_gather_output",
        "transformer.h.*.self_attention.dense": "rowwise_split_input",
        "transformer.h.*.mlp.dense_h_to_4h": "colwise",
        "transformer.h.*.mlp.dense_4h_to_h": "rowwise",
    }


def test_ranks_that_exchange_different_things_are_no_agreement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A type whose ranks call other collectives would hang: one waits here, too, and says so."""
    monkeypatch.setattr(huggingface_check, "WAIT_S", 0.3)
    threads = huggingface_check.Threads(2)

    def compute(rank: int) -> None:
        for _ in range(1 + rank):
            threads.all_gather(rank, torch.empty(2), torch.ones(1))

    nothing = huggingface_check.Whole(0.0, {}, {}, 0.0, None)
    found = [huggingface_check.Watched() for _ in range(2)]
    told = huggingface_check._outcome(threads, compute, found, ["", ""], nothing, lambda _, t: t)
    assert "waits for ranks that exchange something else" in told
