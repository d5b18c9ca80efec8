"""Direct preference optimization (Rafailov et al. 2023): a loss of pairs of answers.

A batch has `input_ids` and `labels` [pairs, 2, seq], the chosen answers first, and
`reference_log_probs` [pairs, 2]: log-probabilities of both under the model as the run began.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from colotrain.models.loss import by_token
from colotrain.models.objectives.base import Kept, Objective
from colotrain.models.outputs import pair_in
from colotrain.spec.objectives import DPO, IGNORE_INDEX
from colotrain.spec.phases import Phase

REFERENCE = "reference_log_probs"
"""Entry of a batch with the reference's log-probabilities, float64."""


def kept_reference() -> Kept:
    """Log-probabilities of both rows of a sample under the model as the run begins."""
    return Kept(
        entry=REFERENCE,
        shape=lambda labels: (labels[0],),
        unknown=torch.tensor(torch.nan, dtype=torch.float64),
        rows=reference_of,
        settings={},
        phase=Phase.REFERENCE,
        what="log-probabilities of {num} {split} pairs under the reference, the model as the run "
        "begins,",
        source="reference",
        other="weights of model.hf: they are the reference from step {step} on",
    )


def objective(settings: DPO) -> Objective:
    loss, kept = functools.partial(loss_of, beta=settings.beta), kept_reference()
    return Objective("train.objective=dpo", loss, inputs_of, lambda batch: by_token(), kept)


def reference_of(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Log-probabilities [pairs, 2] under `model`."""
    with by_token():
        return log_probs_of(batch, model(**inputs_of(batch)))


def inputs_of(batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """What forward gets: both answers of each pair as samples."""
    return {name: batch[name].flatten(0, 1) for name in ("input_ids", "labels")}


def log_probs_of(batch: Mapping[str, Tensor], output: Any) -> Tensor:
    """Log-probability [pairs, 2] of each answer, the sum over its tokens, in float64.

    `output` is what a model returned for `inputs_of(batch)` within `loss.by_token`.
    """
    pair = pair_in(output)
    assert pair is not None, "a causal model returns (losses, count)"
    losses: Tensor = pair[0]
    return -losses.view(batch["labels"].shape).sum(-1, dtype=torch.float64)


def loss_of(batch: Mapping[str, Tensor], output: Any, *, beta: float) -> dict[str, Any]:
    """Summed loss and number of pairs, and metrics: the rewards' means, margin and accuracy.

    A pair of which an answer has no target, because the sample was cut before it, does not count.
    """
    found = log_probs_of(batch, output)
    rewards = beta * (found - batch[REFERENCE].to(found.device))
    counted = (batch["labels"] != IGNORE_INDEX).any(-1).all(-1)
    margins = rewards[:, 0] - rewards[:, 1]
    count = counted.sum()

    def summed(values: Tensor) -> tuple[Tensor, Tensor]:
        return values.where(counted, 0.0).sum(), count

    chosen, rejected = rewards.detach().unbind(1)
    return {
        "loss": summed(-F.logsigmoid(margins)),
        "reward_margin": summed(margins.detach()),
        "reward_accuracy": summed((margins.detach() > 0).double()),
        "reward_chosen": summed(chosen),
        "reward_rejected": summed(rejected),
    }
