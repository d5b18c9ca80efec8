"""The loss of a distillation as plain torch computes it with both models, for the reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from colotrain.spec.plan import ModelPlan, RunPlan
from colotrain.verify.building import build_plain


class WithTeacher:
    """The teacher beside the model that learns."""

    def __init__(self, plan: RunPlan, dtype: torch.dtype | None) -> None:
        assert plan.model.distill is not None
        self.plan = plan.model.distill
        teacher = ModelPlan(target="", hf=self.plan.teacher)
        self.teacher = build_plain(teacher, seed=0).to(dtype).eval()

    def mean_loss(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Mean over the targets; 0 where there are none."""
        heat, alpha = self.plan.temperature, self.plan.alpha
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        counted = batch["labels"] >= 0
        with torch.no_grad():
            theirs = _logits(self.teacher, inputs)[counted].div(heat).softmax(-1)
        logits = _logits(model, inputs)[counted]
        ours, top = logits.div(heat).softmax(-1), theirs.topk(self.plan.top_k).indices
        p, q = (_with_rest(every, top) for every in (theirs, ours))
        divergence = torch.where(p > 0, p * (p.clamp(min=1e-300).log() - q.log()), 0.0).sum()
        hard = nn.functional.cross_entropy(logits, batch["labels"][counted], reduction="sum")
        total = alpha * heat**2 * divergence + (1 - alpha) * hard
        return total / counted.sum().clamp(min=1)


def _with_rest(every: Tensor, top: Tensor) -> Tensor:
    """Probabilities of the tokens in `top`, and that of all others together."""
    rest = every.scatter(-1, top, 0.0).sum(-1, keepdim=True)
    return torch.cat([every.gather(-1, top), rest], -1)


def _logits(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    output: Any = model(**inputs)
    return output if isinstance(output, Tensor) else output.logits
