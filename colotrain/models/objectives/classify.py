"""Classification of texts, or of their words: the cross-entropy of a new head's logits.

Labels are numbers of classes: one for each text, or one for each token, which is -100 behind the
first token of a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from colotrain.models.loss import exact_dtype
from colotrain.models.objectives.base import Objective
from colotrain.spec.objectives import IGNORE_INDEX, ClassifyPlan


def objective(plan: ClassifyPlan) -> Objective:
    name = "classify_tokens" if plan.classes_of_words else "classify"
    return Objective(f"train.objective={name}", loss_of, inputs_of)


def inputs_of(batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """What forward gets: the texts, and where they end."""
    return {name: batch[name] for name in ("input_ids", "padding_mask")}


def loss_of(batch: Mapping[str, Tensor], output: Any) -> dict[str, Any]:
    """Summed loss and number of labels, and the share whose class is the most probable one."""
    labels, logits = batch["labels"].flatten(), output.logits.flatten(0, -2)
    loss = F.cross_entropy(
        logits.to(exact_dtype(logits)), labels, reduction="sum", ignore_index=IGNORE_INDEX
    )
    count = (labels != IGNORE_INDEX).sum()
    right = (logits.detach().argmax(-1) == labels).sum().double()
    return {"loss": (loss, count), "accuracy": (right, count)}
