"""Simple preference optimization (Meng et al. 2024): it needs no reference.

The reward of an answer is β times its mean log-probability of a token; the loss of a pair is
-log σ(reward of the chosen answer - reward of the rejected one - γ).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from colotrain.models.loss import by_token
from colotrain.models.objectives.base import Objective
from colotrain.models.objectives.pairs import (
    has_answers,
    inputs_of,
    mean_log_probs,
    outcome,
    preference_losses,
    token_losses_in,
)
from colotrain.spec.objectives import SimPO


def objective(settings: SimPO) -> Objective:
    loss = functools.partial(loss_of, settings=settings)
    return Objective("train.objective=simpo", loss, inputs_of, lambda model, batch: by_token())


def loss_of(batch: Mapping[str, Tensor], output: Any, *, settings: SimPO) -> dict[str, Any]:
    """`pairs.outcome`; the margin that is shown is without γ, as in TRL."""
    labels = batch["labels"]
    rewards = settings.beta * mean_log_probs(labels, token_losses_in(output, labels))
    margins = rewards[:, 0] - rewards[:, 1] - settings.gamma
    losses = preference_losses(margins, label_smoothing=settings.label_smoothing)
    return outcome(has_answers(labels), losses, rewards)
