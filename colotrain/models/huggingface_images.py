"""Image-text models of transformers: which of their modules read images alone."""

from __future__ import annotations

from typing import Any

from colotrain import module_tree
from colotrain.models.huggingface_task import IMAGE_TEXT


def modules_of_images(model: Any) -> tuple[str, ...]:
    """Names of the outermost modules that a text without images does not reach.

    There are none in a model that is not of transformers' image-text ones.
    """
    import transformers

    config = getattr(model, "config", None)
    if type(config) not in getattr(transformers, IMAGE_TEXT.registry):
        return ()
    language = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
    read = {id(p) for part in language if part is not None for p in module_tree.parameters(part)}
    base = model.base_model
    prefix = "" if base is model else f"{model.base_model_prefix}."
    return tuple(
        f"{prefix}{name}"
        for name, module in module_tree.named_children(base)
        if (held := {id(p) for p in module_tree.parameters(module)}) and not held & read
    )
