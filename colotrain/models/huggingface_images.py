"""Image-text models of transformers: which of their modules read images alone, and batches."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from colotrain import module_tree
from colotrain.models.huggingface_task import IMAGE_TEXT
from colotrain.spec.objectives import ROWS_OF


def joined_images(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch as a processor makes it: entries of images without samples' padding, joined.

    `rows_of_ENTRY` [samples] has the number of each sample's rows of an entry [samples, rows, …].
    Numbers without values stand for all rows.
    """
    found = {name: value for name, value in batch.items() if not name.startswith(ROWS_OF)}
    for name, rows in batch.items():
        if name.startswith(ROWS_OF):
            own: Tensor = batch[name.removeprefix(ROWS_OF)]
            counts = [own.shape[1]] * len(own) if rows.is_meta else rows.tolist()
            parts = [part[:count] for part, count in zip(own, counts, strict=True)]
            found[name.removeprefix(ROWS_OF)] = torch.cat(parts)
    return found


def pixels_in(batch: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the entries that only modules of images read: those with values of pixels."""
    return tuple(
        name
        for name, value in batch.items()
        if isinstance(value, Tensor) and value.is_floating_point() and name != "inputs_embeds"
    )


def without_pixels(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch for stages behind the first one, where the features of images have arrived."""
    pixels = pixels_in(batch)
    left_out = {*pixels, *(f"{ROWS_OF}{name}" for name in pixels)}
    return {name: value for name, value in batch.items() if name not in left_out}


def modules_of_images(model: Any) -> tuple[str, ...]:
    """Names of the outermost modules that a text without images does not reach.

    There are none in a model that is not of transformers' image-text ones.
    """
    if not (language := _read_by_texts(model)):
        return ()
    base = model.base_model
    prefix = "" if base is model else f"{model.base_model_prefix}."
    return tuple(
        f"{prefix}{name}"
        for name, module in module_tree.named_children(base)
        if (held := {id(p) for p in module_tree.parameters(module)}) and not held & language
    )


def parameters_of_images(model: Any) -> tuple[str, ...]:
    """Names of the parameters that a text without images does not reach."""
    language = _read_by_texts(model)
    named = module_tree.named_parameters(model)
    return tuple(name for name, p in named if language and id(p) not in language)


def _read_by_texts(model: Any) -> set[int]:
    """The ids of an image-text model's parameters that texts reach; none of any other model."""
    transformers = sys.modules.get("transformers")
    config = getattr(model, "config", None)
    if type(config) not in getattr(transformers, IMAGE_TEXT.registry, ()):
        return set()
    language = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
    return {id(p) for part in language if part is not None for p in module_tree.parameters(part)}
