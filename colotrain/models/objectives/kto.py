"""Kahneman-Tversky optimization (Ethayarajh et al. 2024): a loss of answers that are good or bad.

A batch has `input_ids` and `labels` [samples, 2, seq]: a prompt with its own answer, and with that
of another record; `is_good` [samples]; and `reference_log_probs` [samples, 2], log-probabilities of
both answers under the model as the run began. With r the logarithm of an answer's probability
divided by the reference's, the loss of a good answer is w (1 - σ(β (r - KL))), that of a bad one
w (1 - σ(β (KL - r))). KL, to which no gradient flows, is the mean of r of the other records'
answers in the whole global batch under the model before the step, and at least 0.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from colotrain.models.loss import by_token
from colotrain.models.objectives.base import Forward, GlobalRows, Objective
from colotrain.models.objectives.dpo import REFERENCE, kept_reference
from colotrain.models.outputs import pair_in
from colotrain.spec.objectives import GOOD, IGNORE_INDEX, KTO

OWN, OTHER = 0, 1
"""Rows of a sample: its own answer, and that of another record."""
KL = "kl"
"""Entry of a batch with KL, float64 []."""


def objective(settings: KTO) -> Objective:
    what = "log-probabilities of {num} {split} answers under the reference, the model as the run "
    kept = replace(kept_reference(), what=f"{what}begins,")
    return Objective(
        "train.objective=kto",
        functools.partial(loss_of, settings=settings),
        functools.partial(inputs_of, row=OWN),
        lambda model, batch: by_token(),
        kept,
        global_rows=GlobalRows(rows=rows_of, entries=entries_of),
    )


def inputs_of(batch: Mapping[str, Tensor], *, row: int) -> dict[str, Any]:
    """What forward gets: one of the two answers of each sample."""
    return {name: batch[name][:, row] for name in ("input_ids", "labels")}


def log_ratios_of(batch: Mapping[str, Tensor], output: Any, *, row: int) -> tuple[Tensor, Tensor]:
    """r [samples] of one of the answers, float64, and whether it counts.

    An answer of which nothing is left, because its sample was cut before it, does not count.
    `output` is what a model returned for `inputs_of(batch, row)` within `loss.by_token`.
    """
    pair = pair_in(output)
    assert pair is not None, "a causal model returns (losses, count)"
    labels, losses = batch["labels"][:, row], pair[0]
    log_probs = -losses.view(labels.shape).sum(-1, dtype=torch.float64)
    reference = batch[REFERENCE][:, row].to(log_probs.device)
    return log_probs - reference, (labels != IGNORE_INDEX).any(-1)


def rows_of(model: Forward, batch: Mapping[str, Tensor]) -> Tensor:
    """r of the other records' answers, and whether each counts: float64 [samples, 2]."""
    with by_token():
        output = model(**inputs_of(batch, row=OTHER))
    ratios, counted = log_ratios_of(batch, output, row=OTHER)
    return torch.stack([ratios.where(counted, 0.0), counted.double()], 1)


def entries_of(rows: Tensor) -> dict[str, Tensor]:
    """KL, from the rows of all samples of the global batch."""
    ratios, counted = rows.unbind(1)
    return {KL: (ratios.sum() / counted.sum().clamp(min=1.0)).clamp(min=0.0)}


def loss_of(batch: Mapping[str, Tensor], output: Any, *, settings: KTO) -> dict[str, Any]:
    """Summed loss and number of samples, and metrics: mean rewards of good and bad answers, KL."""
    ratios, counted = log_ratios_of(batch, output, row=OWN)
    kl, is_good = batch[KL], batch[GOOD].bool()
    of_good = settings.desirable_weight * (1.0 - (settings.beta * (ratios - kl)).sigmoid())
    of_bad = settings.undesirable_weight * (1.0 - (settings.beta * (kl - ratios)).sigmoid())
    losses = torch.where(is_good, of_good, of_bad)
    rewards = settings.beta * ratios.detach()

    def summed(values: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        return values.where(which, 0.0).sum(), which.sum()

    return {
        "loss": summed(losses, counted),
        "reward_chosen": summed(rewards, counted & is_good),
        "reward_rejected": summed(rewards, counted & ~is_good),
        "kl": summed(kl.expand(len(counted)), counted),
    }
