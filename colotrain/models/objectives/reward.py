"""Reward models (Bradley and Terry 1952; Ouyang et al. 2022): a number for a whole text.

The loss of a pair is -log σ(r(chosen) - r(rejected) - margin), where pairs have margins (Touvron et
al. 2023), and the centering coefficient times
(r(chosen) + r(rejected))² (Eisenstein et al. 2024), which holds rewards near 0.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from colotrain.models.objectives.base import Objective
from colotrain.models.objectives.pairs import has_answers, outcome, preference_losses
from colotrain.spec.objectives import MARGIN, RewardPlan


def objective(plan: RewardPlan) -> Objective:
    loss = functools.partial(loss_of, coefficient=plan.center_coefficient)
    return Objective("train.objective=reward", loss, inputs_of)


def inputs_of(batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """What forward gets: both texts of each pair as samples, and where they end."""
    return {name: batch[name].flatten(0, 1) for name in ("input_ids", "padding_mask")}


def loss_of(batch: Mapping[str, Tensor], output: Any, *, coefficient: float) -> dict[str, Any]:
    """`pairs.outcome` of a classifier with one output."""
    rewards = output.logits.double().view(-1, 2)
    gained = rewards[:, 0] - rewards[:, 1]
    losses = preference_losses(gained - batch[MARGIN] if MARGIN in batch else gained)
    losses = losses + coefficient * rewards.sum(1).square()
    return outcome(has_answers(batch["labels"]), losses, rewards)
