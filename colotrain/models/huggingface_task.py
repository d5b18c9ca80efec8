"""What an architecture of transformers is made for, and the labels that its loss takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from colotrain.errors import UsageError
from colotrain.models.huggingface_match import wrong


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A task, as transformers' registries divide architectures."""

    name: str
    registry: str
    """Name of transformers' mapping of configurations to architectures."""
    needs: tuple[str, ...]
    """Entries of every sample."""
    label_dims: int | None = None
    """Dimensions of the labels of one sample; None where there may be any number."""
    labels: str = ""
    """What the labels are."""
    peft: str | None = None
    """PEFT's name of the task."""
    predicts_next: bool = False
    """Whether it is the prediction of next tokens, which text teaches."""

    @property
    def sample(self) -> str:
        """What a sample must have, for people."""
        keys = ", ".join(self.needs[:-1])
        return f"{keys} and {self.needs[-1]}" + (f" ({self.labels})" if self.labels else "")


CAUSAL = Task(
    name="causal language modelling",
    peft="CAUSAL_LM",
    registry="MODEL_FOR_CAUSAL_LM_MAPPING",
    needs=("input_ids", "labels"),
    label_dims=1,
    labels="the next tokens, -100 for no target",
    predicts_next=True,
)
IMAGE_TEXT = Task(
    name="image-text to text",
    peft="CAUSAL_LM",
    registry="MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    needs=("input_ids", "labels"),
    label_dims=1,
    labels="the next tokens, -100 for no target",
    predicts_next=True,
)
SEQUENCE_TO_SEQUENCE = Task(
    name="sequence-to-sequence language modelling",
    peft="SEQ_2_SEQ_LM",
    registry="MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    needs=("input_ids", "labels"),
    label_dims=1,
    labels="the output's tokens, -100 for no target",
)
MASKED = Task(
    name="masked language modelling",
    registry="MODEL_FOR_MASKED_LM_MAPPING",
    needs=("input_ids", "labels"),
    label_dims=1,
    labels="the token where one is hidden, -100 elsewhere",
)
QUESTION_ANSWERING = Task(
    name="question answering",
    peft="QUESTION_ANS",
    registry="MODEL_FOR_QUESTION_ANSWERING_MAPPING",
    needs=("input_ids", "start_positions", "end_positions"),
)
TASKS = (
    CAUSAL,
    SEQUENCE_TO_SEQUENCE,
    IMAGE_TEXT,
    MASKED,
    Task(
        name="sequence classification",
        peft="SEQ_CLS",
        registry="MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING",
        needs=("input_ids", "labels"),
        label_dims=0,
        labels="one class",
    ),
    Task(
        name="token classification",
        peft="TOKEN_CLS",
        registry="MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING",
        needs=("input_ids", "labels"),
        label_dims=1,
        labels="a class for each token, -100 for none",
    ),
    QUESTION_ANSWERING,
    Task(
        name="multiple choice",
        registry="MODEL_FOR_MULTIPLE_CHOICE_MAPPING",
        needs=("input_ids", "labels"),
        label_dims=0,
        labels="the right choice's number",
    ),
    Task(
        name="image classification",
        registry="MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
        needs=("pixel_values", "labels"),
        label_dims=0,
        labels="one class",
    ),
)
"""The tasks whose labels are known; an architecture has the first that names it."""
SEES_FUTURE_UNLESS: dict[str, tuple[str, Any]] = {
    "bert-generation": ("is_decoder", True),
    "xlm": ("causal", True),
    "xlnet": ("attn_type", "uni"),
}
"""Type → setting with which a model under a causal head sees no later tokens, and its value."""
OTHER_TARGETS = {
    "ProphetNetForCausalLM": "its loss is of several next tokens, smoothed",
    "CpmAntForCausalLM": "it sees all tokens of a sample",
    "PaliGemmaForConditionalGeneration": "it sees all tokens of a text without images",
    "DiffusionGemmaForBlockDiffusion": "it finds the hidden tokens of a block",
    "PI0ForConditionalGeneration": "its loss is of a robot's actions",
}
"""Language models that do not learn to predict the next token from those before it."""
WITHOUT_LOSS = "MODEL_MAPPING"
"""Name of transformers' mapping of architectures that compute no loss."""


def task_of(transformers: Any, config: Any, architecture: type) -> Task | None:
    """The task of an architecture; None where it is none of `TASKS`.

    The configuration of a part, such as Mllama's text model, is in no registry: its name is.
    """
    found = (t for t in TASKS if is_in(transformers, t.registry, config, architecture))
    named = (t for t in TASKS if architecture.__name__ in _names_in(transformers, t.registry))
    task = next(found, None) or next(named, None)
    return None if task is IMAGE_TEXT and getattr(config, "is_encoder_decoder", False) else task


def _names_in(transformers: Any, registry: str) -> set[str]:
    """Names of all architectures of a registry."""
    found = getattr(transformers.models.auto.modeling_auto, f"{registry}_NAMES", {}).values()
    return {name for value in found for name in ((value,) if isinstance(value, str) else value)}


def is_in(transformers: Any, registry: str, config: Any, architecture: type) -> bool:
    """Whether a mapping of transformers names the architecture, or a class that it extends."""
    found = getattr(transformers, registry, {}).get(type(config), ())
    return issubclass(architecture, tuple(found) if isinstance(found, list | tuple) else found)


def check_batch(task: Task, model: str, batch: Mapping[str, Tensor]) -> None:
    """Raise `UsageError` for samples that lack what the task needs, or have other labels."""
    fix = f"let data.target return samples with {task.sample}"
    missing = [name for name in task.needs if name not in batch]
    if missing and not {"inputs_embeds", "input_features"} & batch.keys():
        raise UsageError(f"{model} is for {task.name}: samples have no {missing[0]}", fix)
    labels = batch.get("labels")
    is_classes = labels is not None and not labels.is_floating_point()
    if labels is not None and is_classes and labels.ndim - 1 not in (task.label_dims, None):
        shape = "a number" if labels.ndim == 1 else f"{tuple(labels.shape[1:])}"
        if task.label_dims == 0:
            fix += "; labels of several classes, or numbers, are floating (labels.float())"
        raise UsageError(f"{model} is for {task.name}: the labels of a sample are {shape}", fix)


def check_predicts_next_token(transformers: Any, folder: Path, model: Any) -> None:
    """Raise `ConfigError` for a language model that sees the tokens that it is to predict."""
    config, name = model.config, type(model).__name__
    if why := OTHER_TARGETS.get(name):
        expected = f"an architecture that predicts the next token ({name}: {why})"
        raise wrong(folder, expected, "train it by a function of yours in model.target")
    is_encoder = type(config) in transformers.MODEL_FOR_MASKED_LM_MAPPING
    default = ("is_decoder", True) if is_encoder else None
    known = SEES_FUTURE_UNLESS.get(config.model_type, default)
    if known is None or getattr(config, known[0], None) == known[1]:
        return
    key, value = known
    found, wanted = (str(each).lower() for each in (getattr(config, key, None), value))
    says = f"{name} sees all tokens: {key} is {found}"
    raise wrong(folder, f"a decoder ({says})", f"set model.args.{key}={wanted}")
