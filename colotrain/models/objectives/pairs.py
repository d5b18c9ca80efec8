"""What objectives on preference pairs share: inputs, log-probabilities, and means over pairs.

A batch has `input_ids` and `labels` [pairs, 2, seq], the chosen answers first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from colotrain.models.outputs import pair_in
from colotrain.spec.objectives import IGNORE_INDEX


def inputs_of(batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """What forward gets: both answers of each pair as samples."""
    return {name: batch[name].flatten(0, 1) for name in ("input_ids", "labels")}


def token_losses_in(output: Any, labels: Tensor) -> Tensor:
    """Loss [pairs, 2, seq] of each token, float64, 0 where a label is no target.

    `output` is what a causal model returned for both answers within `loss.by_token`.
    """
    pair = pair_in(output)
    assert pair is not None, "a causal model returns (losses, count)"
    losses: Tensor = pair[0]
    return losses.view(labels.shape).double()


def log_probs_of(batch: Mapping[str, Tensor], output: Any) -> Tensor:
    """Log-probability [pairs, 2] of each answer, the sum over its tokens, in float64."""
    return -token_losses_in(output, batch["labels"]).sum(-1)


def mean_log_probs(labels: Tensor, losses: Tensor) -> Tensor:
    """Log-probability of a token [pairs, 2], the mean over each answer; -1 in pairs without one.

    A finite number stands there, so that no NaN reaches the gradient of other pairs.
    """
    is_target = labels != IGNORE_INDEX
    means = -losses.where(is_target, 0.0).sum(-1) / is_target.sum(-1).clamp(min=1)
    return means.where(has_answers(labels).unsqueeze(-1), -1.0)


def has_answers(labels: Tensor) -> Tensor:
    """Whether both answers of a pair [pairs] have a target: samples may be cut before it."""
    return (labels != IGNORE_INDEX).any(-1).all(-1)


def preference_losses(margins: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """-log σ(margin) of each pair; a share of the labels is taken for the wrong way round."""
    right = -F.logsigmoid(margins)
    if not label_smoothing:
        return right
    return right.lerp(-F.logsigmoid(-margins), label_smoothing)


def outcome(counted: Tensor, losses: Tensor, rewards: Tensor) -> dict[str, Any]:
    """Summed loss and number of pairs, and metrics: the rewards' means, margin and accuracy.

    `counted` and `losses` are [pairs], `rewards` [pairs, 2]. Other pairs do not count.
    """
    count = counted.sum()

    def summed(values: Tensor) -> tuple[Tensor, Tensor]:
        return values.where(counted, 0.0).sum(), count

    chosen, rejected = rewards.detach().unbind(1)
    return {
        "loss": summed(losses),
        "reward_margin": summed(chosen - rejected),
        "reward_accuracy": summed((chosen > rejected).double()),
        "reward_chosen": summed(chosen),
        "reward_rejected": summed(rejected),
    }
