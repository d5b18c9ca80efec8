"""The loss of preference pairs as plain torch computes it with two models, for the reference."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from colotrain.spec.plan import RunPlan
from colotrain.verify.building import build_plain


class TwoModels:
    """The model that trains, and the model as it began."""

    def __init__(self, plan: RunPlan, dtype: torch.dtype | None) -> None:
        self.first = build_plain(plan.model, seed=plan.train.seed).to(dtype).eval()
        self.beta = plan.model.dpo_beta or 0.0

    def mean_loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Mean over the pairs of which both answers have a target; 0 where there are none."""
        labels = batch["labels"]
        with torch.no_grad():
            before = _log_probs(self.first, batch)
        gained = _log_probs(model, batch) - before
        losses = -F.logsigmoid(self.beta * (gained[:, 0] - gained[:, 1]))
        counted = (labels >= 0).any(2).all(1)
        return torch.where(counted, losses, 0.0).sum() / counted.sum().clamp(min=1)


def _log_probs(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    ids, labels = batch["input_ids"], batch["labels"]
    output: Any = model(input_ids=ids.reshape(-1, ids.shape[-1]))
    logits = output if isinstance(output, Tensor) else output.logits
    each = logits.log_softmax(-1).view(*labels.shape, -1)
    picked = each.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return torch.where(labels >= 0, picked, 0.0).sum(-1)
