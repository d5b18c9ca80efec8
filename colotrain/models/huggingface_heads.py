"""A new head on a model of transformers: the same backbone under another architecture.

A causal model with such a head scores the last token that is not its padding token; an encoder,
which sees whole texts, gets a mask instead.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from colotrain.models.huggingface_match import missing_in, wrong
from colotrain.models.huggingface_task import SEES_FUTURE_UNLESS
from colotrain.spec.objectives import Head


def change_head_(transformers: Any, config: Any, head: Head, folder: Path) -> type[nn.Module]:
    """The architecture with `head` for a configuration, which is changed to name it.

    Raises `ConfigError` where transformers has none for the model's type.
    """
    known = getattr(transformers, head.registry).get(type(config), None)
    architecture: type[nn.Module] | None = known[0] if isinstance(known, tuple) else known
    kinds = transformers.MODEL_FOR_MASKED_LM_MAPPING, transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    is_understood = any(type(config) in kind for kind in kinds) and _hides_padding(
        transformers, config
    )
    if architecture is None or config.is_encoder_decoder or not is_understood:
        expected = f"a causal model or an encoder that transformers knows for {head.task}"
        raise wrong(folder, f"{expected} (its type is {config.model_type})", "take another model")
    config.num_labels = head.size
    if head.labels:
        config.id2label = dict(enumerate(head.labels))
        config.label2id = {label: number for number, label in enumerate(head.labels)}
    config.problem_type = None
    vocab_size = config.get_text_config().vocab_size
    if head.pad_id >= vocab_size:
        expected = f"a vocabulary with the padding token {head.pad_id} (it has {vocab_size} tokens)"
        raise wrong(folder, expected, "set model.args.pad_token_id")
    for part in (config, config.get_text_config()):
        part.pad_token_id = head.pad_id
    config.architectures = [architecture.__name__]
    return architecture


def _hides_padding(transformers: Any, config: Any) -> bool:
    """Whether no token sees the padding behind a text: by a mask, or as it sees none behind it."""
    known = SEES_FUTURE_UNLESS.get(config.model_type)
    sees_future = known is not None and getattr(config, known[0], None) != known[1]
    return is_encoder(transformers, config) or not sees_future


def train_new_layers_(model: nn.Module) -> None:
    """Let layers train that the directory's files lack: beside adapters all others are frozen."""
    for name in missing_in(model):
        model.get_parameter(name).requires_grad_(True)


def is_encoder(transformers: Any, config: Any) -> bool:
    """Whether the model's tokens see those after them."""
    is_known = type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING
    return is_known and not getattr(config, "is_decoder", False)


def padded(
    forward: Callable[..., Any],
    pad_id: int,
    masks: bool,
    /,
    *,
    padding_mask: Tensor | None = None,
    **batch: Any,
) -> Any:
    """Output for texts that end where `padding_mask` is 0: padding tokens stand there.

    `masks`: whether the model gets a mask, too. A causal model needs none: no token sees those
    behind it.
    """
    if padding_mask is not None:
        batch["input_ids"] = batch["input_ids"].where(padding_mask.bool(), pad_id)
        if masks and not padding_mask.is_meta:  # transformers asks for the mask's values
            batch["attention_mask"] = padding_mask
    return forward(**batch)
