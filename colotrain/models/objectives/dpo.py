"""Direct preference optimization (Rafailov et al. 2023): a loss of pairs of answers.

A batch has the entries of `models.objectives.pairs`, and `reference_log_probs` [pairs, 2]:
log-probabilities of both answers under the model as the run began.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from colotrain.models.loss import by_token
from colotrain.models.objectives.base import Forward, Kept, Objective
from colotrain.models.objectives.pairs import (
    has_answers,
    inputs_of,
    log_probs_of,
    outcome,
    preference_losses,
)
from colotrain.spec.objectives import DPO
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
    return Objective("train.objective=dpo", loss, inputs_of, lambda model, batch: by_token(), kept)


def reference_of(model: Forward, batch: Mapping[str, Tensor]) -> Tensor:
    """Log-probabilities [pairs, 2] under `model`."""
    with by_token():
        return log_probs_of(batch, model(**inputs_of(batch)))


def loss_of(batch: Mapping[str, Tensor], output: Any, *, beta: float) -> dict[str, Any]:
    """`pairs.outcome`; a reward is what an answer gained over the reference, times `beta`.

    A pair of which an answer has no target, because the sample was cut before it, does not count.
    """
    found = log_probs_of(batch, output)
    rewards = beta * (found - batch[REFERENCE].to(found.device))
    losses = preference_losses(rewards[:, 0] - rewards[:, 1])
    return outcome(has_answers(batch["labels"]), losses, rewards)
