"""Directories whose files have more, less or other than their config.json says."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from colotrain.errors import ConfigError
from colotrain.models.huggingface_match import check_layers, remarks_on_files
from colotrain.models.loading import build, build_whole
from colotrain.spec.plan import ModelPlan
from tests.families import FAMILIES, GROUPED, Family

transformers = pytest.importorskip("transformers")
TIED = Family("Llama", "LlamaForCausalLM", "llama", {**GROUPED, "tie_word_embeddings": True})
CLASSIFIER = {"architectures": ["LlamaForSequenceClassification"], "num_labels": 5}


def plan(folder: Path, **args: Any) -> ModelPlan:
    return ModelPlan(target="", hf=str(folder), args=args)


def change(folder: Path, **tensors: Tensor | None) -> None:
    """Put tensors in a directory's file, or take those that are None out of it."""
    path = folder / "model.safetensors"
    held = {**load_file(path), **{n.replace("__", "."): t for n, t in tensors.items()}}
    save_file({n: t for n, t in held.items() if t is not None}, path, metadata={"format": "pt"})


def rand(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7)) / 5


def test_numbers_of_layers_have_a_bound_and_sizes_per_layer_have_none(tmp_path: Path) -> None:
    sizes = {"vocab_size_per_layer_input": 262_144, "num_hidden_layers": 1_000}  # as of gemma 3n
    for key, is_refused in (("num_hidden_layers", False), ("encoder_layers", True)):
        text = {**sizes, key: sizes.get(key, 1_001)}
        (tmp_path / "config.json").write_text(json.dumps({"text_config": text}))
        with (
            pytest.raises(ConfigError, match=f"{key} of at most 1,000")
            if is_refused
            else nullcontext()
        ):
            check_layers(tmp_path, {})


def assert_same(model: Any, theirs: Any) -> None:
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    wanted = {**dict(theirs.named_parameters()), **dict(theirs.named_buffers())}
    assert own.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert own[name].dtype == tensor.dtype, name
        assert torch.equal(own[name], tensor), name


def test_a_head_beside_tied_embeddings_is_kept_as_transformers_keeps_it(tmp_path: Path) -> None:
    folder = TIED.make(tmp_path)
    embeddings = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    change(folder, lm_head__weight=embeddings.clone())
    alike = build_whole(plan(folder), seed=0)
    assert alike.lm_head.weight is alike.model.embed_tokens.weight  # type: ignore[union-attr]
    assert list(remarks_on_files(alike)) == []
    change(folder, lm_head__weight=rand(*embeddings.shape))
    model = build_whole(plan(folder), seed=0).eval()
    assert_same(model, transformers.LlamaForCausalLM.from_pretrained(folder))
    (said,) = remarks_on_files(model)
    assert said.startswith("config.json of model.hf ties lm_head.weight, but its files have other")


def test_every_tie_of_an_encoder_and_a_decoder_is_as_in_transformers(tmp_path: Path) -> None:
    family = next(f for f in FAMILIES if f.name == "T5")
    folder = family.make(tmp_path)
    shared = load_file(folder / "model.safetensors")["shared.weight"]
    change(folder, encoder__embed_tokens__weight=rand(*shared.shape), lm_head__weight=-shared)
    model = build_whole(plan(folder), seed=0)
    assert_same(model, transformers.T5ForConditionalGeneration.from_pretrained(folder))
    assert "ties encoder.embed_tokens.weight, lm_head.weight, but" in next(remarks_on_files(model))
    change(folder, shared__weight=None, lm_head__weight=None)  # the encoder's is there alone
    model = build_whole(plan(folder), seed=0)
    assert_same(model, transformers.T5ForConditionalGeneration.from_pretrained(folder))


@pytest.mark.parametrize("seed", [0, 5])
def test_what_the_files_lack_has_the_values_that_transformers_draws(
    tmp_path: Path, seed: int
) -> None:
    folder = TIED.make(tmp_path)
    model = build_whole(plan(folder, **CLASSIFIER), seed=seed)
    torch.manual_seed(seed)
    of_classes = transformers.LlamaForSequenceClassification
    assert_same(model, of_classes.from_pretrained(folder, num_labels=5))
    (said,) = remarks_on_files(model)
    assert "lack score.weight of LlamaForSequenceClassification" in said
    model.requires_grad_(False)
    assert "score.weight keep their initial values" in list(remarks_on_files(model))[1]
    change(folder, model__norm__weight=None, model__embed_tokens__weight=None, other=rand(2))
    model = build_whole(plan(folder), seed=seed)
    torch.manual_seed(seed)
    assert_same(model, transformers.LlamaForCausalLM.from_pretrained(folder))
    lacks, has = remarks_on_files(model)
    assert "lack model.embed_tokens.weight, model.norm.weight of LlamaForCausalLM" in lacks
    assert has == "the files of model.hf have other, which LlamaForCausalLM does not: left out"


def test_a_head_is_missing_where_config_does_not_tie_it(tmp_path: Path) -> None:
    folder = next(f for f in FAMILIES if f.name == "Llama").make(tmp_path)
    change(folder, lm_head__weight=None)
    model = build_whole(plan(folder), seed=3)
    torch.manual_seed(3)
    assert_same(model, transformers.LlamaForCausalLM.from_pretrained(folder))


def test_a_layer_of_which_a_tensor_is_missing_is_refused(tmp_path: Path) -> None:
    folder = TIED.make(tmp_path)
    change(folder, model__layers__1__mlp__up_proj__weight=None)
    with pytest.raises(ConfigError, match=r"up_proj\.weight is missing, and other layers have"):
        build(plan(folder), seed=0)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_quantized_weights_that_config_does_not_tell_are_refused(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    folder = TIED.make(tmp_path)
    change(folder, model__layers__1__mlp__up_proj__weight=rand(48, 32).to(dtype))
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.up_proj\.weight is .*8.*: quantized"):
        build(plan(folder), seed=0)


@pytest.mark.parametrize("where", [(), ("text_config",)])
def test_quantized_directories_are_refused_by_name(tmp_path: Path, where: tuple[str, ...]) -> None:
    from tests.architectures import architectures

    kind = "gemma3" if where else "llama"
    next(a for a in architectures() if a.kind == kind).make(tmp_path)
    path = tmp_path / "config.json"
    written = json.loads(path.read_text())
    held = written
    for key in where:
        held = held[key]
    held["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    path.write_text(json.dumps(written))
    with pytest.raises(ConfigError, match="weights that are not quantized"):
        build(plan(tmp_path), seed=0)


def test_the_dtype_has_one_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.args\.torch_dtype=bfloat16: expected a setting"):
        build(plan(TIED.make(tmp_path), torch_dtype="bfloat16"), seed=0)


def test_files_of_another_model_are_refused(tmp_path: Path) -> None:
    folder = TIED.make(tmp_path)
    save_file({"other": rand(2)}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="none of its tensors is one of a LlamaForCausalLM"):
        build(plan(folder), seed=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["t5", "bart", "resnet", "deepseek_v3"])
def test_every_tensor_has_the_dtype_and_bits_of_transformers(
    kind: str, dtype: str, tmp_path: Path
) -> None:
    """Among them persistent buffers, and what transformers keeps in float32."""
    from tests.architectures import architectures

    known = next(a for a in architectures() if a.kind == kind)
    known.make(tmp_path)
    theirs = getattr(transformers, known.name).from_pretrained(
        tmp_path, dtype=getattr(torch, dtype)
    )
    assert_same(build_whole(plan(tmp_path, dtype=dtype), seed=0), theirs)


def test_settings_of_a_part_are_changed_by_their_names_inside_it(tmp_path: Path) -> None:
    from tests.architectures import architectures

    next(a for a in architectures() if a.kind == "gemma3").make(tmp_path)
    model = build(plan(tmp_path, text_config={"attention_dropout": 0.5}), seed=0)
    assert model.config.text_config.attention_dropout == 0.5  # type: ignore[union-attr]
    assert model.config.text_config.hidden_size == 32  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match=r"model\.args\.text_config\.n_layer=3: expected a sett"):
        build(plan(tmp_path, text_config={"n_layer": 3}), seed=0)
