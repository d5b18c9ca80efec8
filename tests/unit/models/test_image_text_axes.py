"""What of images reaches which ranks: found in forwards whose parameters have no values."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colotrain.engine.build.sequence import find_sequence
from colotrain.errors import UsageError
from colotrain.models.context_parallel import ATTRIBUTE, SequenceShard, divide_sequences_
from colotrain.models.huggingface_images import parameters_of_images
from colotrain.models.loading import build, build_whole
from colotrain.spec.plan import ModelPlan
from tests import image_text
from tests.image_text import ImageText

pytest.importorskip("transformers")
LENGTH = 24


def _with_layers_of_images(tokenizer: Any) -> dict[str, Any]:
    """Qwen 3 VL, which adds features of images between the layers of the decoder."""
    settings = image_text.QWEN.settings(tokenizer)
    settings["text_config"]["rope_parameters"]["mrope_section"] = [2, 1, 1]
    sight = {name: settings["vision_config"][name] for name in ("depth", "hidden_size")}
    settings["vision_config"] = {
        **sight,
        **{"intermediate_size": 48, "num_heads": 4, "patch_size": 4, "out_hidden_size": 32},
        **{"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 16},
    }
    return settings


QWEN3 = replace(
    image_text.QWEN,
    architecture="Qwen3VLForConditionalGeneration",
    kind="qwen3_vl",
    settings=_with_layers_of_images,
)


def batch_of(model: Any) -> dict[str, Tensor]:
    """Two samples of an image each: four placeholders."""
    config = model.config
    ids = torch.randint(0, 250, (2, LENGTH))
    image = getattr(config, "image_token_id", None) or config.image_token_index
    if hasattr(config, "vision_start_token_id"):
        ids[:, 3] = config.vision_start_token_id
    num = 4 if "qwen" in config.model_type else 16
    ids[:, 4 : 4 + num] = image
    batch = {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}
    if "qwen" not in config.model_type:
        return batch | {"pixel_values": torch.randn(2, 3, 16, 16)}
    return batch | {
        "pixel_values": torch.randn(32, 3 * 2 * 16),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * 2),
        "mm_token_type_ids": (ids == image).long(),
    }


def built(family: ImageText, folder: Path) -> nn.Module:
    return build(ModelPlan(target="", hf=str(family.make_model(folder))), seed=0)


def test_what_reads_images_is_on_the_first_stage(tmp_path: Path) -> None:
    model = built(image_text.QWEN, tmp_path)
    found = find_sequence(model, batch_of(model))
    assert found.blocks == tuple(f"model.language_model.layers.{index}" for index in range(2))
    assert {*parameters_of_images(model), "model.language_model.embed_tokens.weight"} == {
        *found.before
    }
    of_texts = {name: value for name, value in batch_of(model).items() if value.ndim == 2}
    del of_texts["image_grid_thw"], of_texts["pixel_values"], of_texts["mm_token_type_ids"]
    assert {*find_sequence(model, of_texts).before} == {*found.before}


def test_images_between_layers_are_refused(tmp_path: Path) -> None:
    model = built(QWEN3, tmp_path)
    found = find_sequence(model, batch_of(model))
    first, second = (f"model.language_model.layers.{index}" for index in range(2))
    assert found.against == f"{second} does not take what {first} returned"


def test_inputs_of_later_stages_that_depend_on_images_are_refused(tmp_path: Path) -> None:
    model = built(image_text.LLAVA, tmp_path)
    seen: list[bool] = []

    def note(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        seen.append(kwargs.get("pixel_values") is not None)

    def give(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "saw": torch.tensor(seen[-1])}

    model.get_submodule("model").register_forward_pre_hook(note, with_kwargs=True)
    layer = "model.language_model.layers.1"
    handle = model.get_submodule(layer).register_forward_pre_hook(give, with_kwargs=True)
    found = find_sequence(model, batch_of(model))
    assert found.against == f"what {layer} takes beside activations is of pixel_values"
    handle.remove()
    assert not find_sequence(model, batch_of(model)).against


def test_samples_are_divided_where_tokens_see_those_before_them_alone(tmp_path: Path) -> None:
    assert not hasattr(built(image_text.GEMMA3, tmp_path / "gemma3"), ATTRIBUTE)
    folder = image_text.LLAVA.make_model(tmp_path / "llava")
    model = build_whole(ModelPlan(target="", hf=str(folder)), seed=0)
    divide_sequences_(model, SequenceShard(rank=0, size=2))
    batch = batch_of(model)
    model(**batch)
    batch["attention_mask"][0, 0] = 0
    with pytest.raises(UsageError, match="padding before tokens"):
        model(**batch)
