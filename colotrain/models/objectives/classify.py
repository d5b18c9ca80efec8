"""Classification of texts: the cross-entropy of a new head's logits, and its accuracy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from colotrain.models.loss import exact_dtype
from colotrain.models.objectives.base import Objective


def objective() -> Objective:
    return Objective("train.objective=classify", loss_of, inputs_of)


def inputs_of(batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """What forward gets: the texts, and where they end."""
    return {name: batch[name] for name in ("input_ids", "padding_mask")}


def loss_of(batch: Mapping[str, Tensor], output: Any) -> dict[str, Any]:
    """Summed loss and number of texts, and the share whose class is the most probable one."""
    labels, logits = batch["labels"], output.logits
    loss = F.cross_entropy(logits.to(exact_dtype(logits)), labels, reduction="sum")
    right = (logits.detach().argmax(-1) == labels).sum().double()
    return {"loss": (loss, len(labels)), "accuracy": (right, len(labels))}
