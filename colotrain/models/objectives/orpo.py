"""Odds-ratio preference optimization (Hong et al. 2024): it needs no reference.

With p an answer's probability of a token, the geometric mean over the answer, and odds p / (1 - p),
the loss of a pair is the negative log-likelihood of the chosen text, the mean over its tokens, and
β times -log σ(log odds of the chosen answer - log odds of the rejected one).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import torch
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
from colotrain.spec.objectives import IGNORE_INDEX, ORPO

MOST_CERTAIN = -torch.finfo(torch.float64).eps
"""Largest log-probability whose odds are computed: those of 0 are infinite."""


def objective(settings: ORPO) -> Objective:
    labelled = functools.partial(with_prompts, prompts=settings.nll_of_prompts)
    return Objective(
        "train.objective=orpo",
        functools.partial(loss_of, settings=settings),
        lambda batch: inputs_of({**batch, "labels": labelled(batch)}),
        lambda model, batch: by_token(),
    )


def with_prompts(batch: Mapping[str, Tensor], *, prompts: bool) -> Tensor:
    """The labels [pairs, 2, seq]; with `prompts` the chosen texts' prompts are targets, too."""
    labels, ids = batch["labels"], batch["input_ids"]
    if not prompts:
        return labels
    is_target = labels != IGNORE_INDEX
    positions = torch.arange(labels.shape[-1], device=labels.device)
    last = positions.where(is_target, -1).amax(-1, keepdim=True)
    of_text = torch.where(positions < last, ids.roll(-1, -1), IGNORE_INDEX).where(
        ~is_target, labels
    )
    return torch.stack([of_text[:, 0], labels[:, 1]], 1)


def loss_of(batch: Mapping[str, Tensor], output: Any, *, settings: ORPO) -> dict[str, Any]:
    """`pairs.outcome`; a reward is an answer's mean log-probability of a token, times β."""
    labels = batch["labels"]
    losses = token_losses_in(output, labels)
    is_counted = with_prompts(batch, prompts=settings.nll_of_prompts)[:, 0] != IGNORE_INDEX
    nll = losses[:, 0].where(is_counted, 0.0).sum(-1) / is_counted.sum(-1).clamp(min=1)
    means = mean_log_probs(labels, losses)
    odds = log_odds(means)
    unlike = preference_losses(odds[:, 0] - odds[:, 1])
    return outcome(has_answers(labels), nll + settings.beta * unlike, settings.beta * means)


def log_odds(log_probs: Tensor) -> Tensor:
    """log(p / (1 - p)) of log p: each form of log(1 - p) is exact on its side of p = 1/2."""
    known = log_probs.clamp(max=MOST_CERTAIN)
    likely = known > -math.log(2)
    # each side gets numbers of its own side alone, for the other's gradients may be infinite
    above = known.where(likely, -math.log(2)).expm1().neg().log()
    below = known.where(~likely, -math.log(2)).exp().neg().log1p()
    return known - above.where(likely, below)
