"""Losses of preference pairs without a reference, against their papers' formulas."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from colotrain.models.objectives import orpo, simpo
from colotrain.models.objectives.base import Objective
from colotrain.spec.objectives import IGNORE_INDEX, ORPO, SimPO

NUM, LENGTH, VOCABULARY = 4, 7, 11
PROMPTS = (2, 1, 3, 1)
"""Tokens of the prompts; those of the answers follow."""
ANSWERS = ((3, 2), (1, 4), (0, 2), (5, 1))
"""Tokens of both answers; of the third pair the chosen one is cut off."""
SIMPO = SimPO(beta=1.7, gamma=0.6, label_smoothing=0.1)
ORPOS = [ORPO(beta=0.3), ORPO(beta=0.3, nll_of_prompts=False)]


def batch_and_logits() -> tuple[dict[str, Tensor], Tensor]:
    draw = torch.Generator().manual_seed(5)
    texts = torch.randint(1, VOCABULARY, (NUM, 2, LENGTH + 1), generator=draw)
    labels = torch.full((NUM, 2, LENGTH), IGNORE_INDEX)
    ids = torch.zeros_like(labels)
    for pair, prompt in enumerate(PROMPTS):
        for which, length in enumerate(ANSWERS[pair]):
            stop = prompt + length
            ids[pair, which, : stop - 1] = texts[pair, which, : stop - 1]
            labels[pair, which, prompt - 1 : stop - 1] = texts[pair, which, prompt:stop]
    logits = torch.randn(NUM, 2, LENGTH, VOCABULARY, generator=draw, dtype=torch.float64)
    return {"input_ids": ids, "labels": labels}, logits.requires_grad_()


def loss_of(objective: Objective, batch: dict[str, Tensor], logits: Tensor) -> dict[str, Any]:
    """The objective's outcome for a model that returns `logits`, as its forward would be called."""
    labels = objective.inputs(batch)["labels"].view(batch["labels"].shape)
    logs = logits.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    losses = torch.where(labels != IGNORE_INDEX, -logs, 0.0).flatten()
    return objective.loss(batch, (losses, len(losses)))


def log_probs(batch: dict[str, Tensor], logits: Tensor, pair: int, which: int) -> list[list[float]]:
    """Log-probabilities of the tokens of a prompt after its first, and of the answer."""
    prompt, length = PROMPTS[pair], ANSWERS[pair][which]
    labels = batch["labels"][pair, which]
    text = [*batch["input_ids"][pair, which, 1:].tolist(), 0]
    logs = logits[pair, which].log_softmax(-1).tolist()
    asked = [logs[at][text[at]] for at in range(prompt - 1)]
    answered = [logs[at][labels[at]] for at in range(prompt - 1, prompt - 1 + length)]
    return [asked, answered]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def orpo_of(settings: ORPO, chosen: list[list[float]], rejected: list[list[float]]) -> float:
    """Formulas (2) to (7) of Hong et al. 2024, from probabilities."""
    p, q = (math.exp(mean(texts[1])) for texts in (chosen, rejected))
    ratio = (p / (1 - p)) / (q / (1 - q))
    nll = -mean(chosen[0] + chosen[1] if settings.nll_of_prompts else chosen[1])
    return nll - settings.beta * math.log(ratio / (1 + ratio))


def simpo_of(settings: SimPO, chosen: list[list[float]], rejected: list[list[float]]) -> float:
    """Formula (6) of Meng et al. 2024, with TRL's label smoothing."""
    rewards = (settings.beta * mean(texts[1]) for texts in (chosen, rejected))
    margin = next(rewards) - next(rewards) - settings.gamma
    right, wrong = (1 / (1 + math.exp(-sign * margin)) for sign in (1, -1))
    smooth = settings.label_smoothing
    return -(1 - smooth) * math.log(right) - smooth * math.log(wrong)


CASES = [(orpo.objective, orpo_of, settings) for settings in ORPOS]
EVERY: list[Any] = [*CASES, (simpo.objective, simpo_of, SIMPO)]


@pytest.mark.parametrize(("made", "formula", "settings"), EVERY)
def test_the_loss_is_the_formulas_and_a_pair_without_an_answer_does_not_count(
    made: Callable[[Any], Objective], formula: Callable[..., float], settings: Any
) -> None:
    batch, logits = batch_and_logits()
    found = loss_of(made(settings), batch, logits)
    texts = [[log_probs(batch, logits, n, which) for which in (0, 1)] for n in (0, 1, 3)]
    total, count = found["loss"]
    wanted = [formula(settings, *pair) for pair in texts]
    assert (total.item(), count.item()) == (pytest.approx(sum(wanted), rel=1e-12), 3)
    margins = [settings.beta * (mean(chosen[1]) - mean(rejected[1])) for chosen, rejected in texts]
    assert found["reward_margin"][0].item() == pytest.approx(sum(margins), rel=1e-12)
    assert found["reward_accuracy"][0].item() == sum(margin > 0 for margin in margins)
    total.backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert not logits.grad[2].any()


@pytest.mark.parametrize(("made", "formula", "settings"), EVERY)
def test_a_batch_divided_has_the_same_sums(
    made: Callable[[Any], Objective], formula: Any, settings: Any
) -> None:
    batch, logits = batch_and_logits()
    whole = loss_of(made(settings), batch, logits)
    parts = []
    for rows in (slice(0, 1), slice(1, 4)):
        own = {name: tensor[rows] for name, tensor in batch.items()}
        parts.append(loss_of(made(settings), own, logits[rows]))
    for name, (total, count) in whole.items():
        assert total.item() == pytest.approx(sum(part[name][0].item() for part in parts))
        assert count == sum(part[name][1] for part in parts)


@pytest.mark.parametrize(("made", "formula", "settings"), EVERY)
def test_a_pair_swapped_has_another_loss(
    made: Callable[[Any], Objective], formula: Any, settings: Any
) -> None:
    batch, logits = batch_and_logits()
    swapped = {name: tensor.flip(1) for name, tensor in batch.items()}
    whole = loss_of(made(settings), batch, logits)
    other = loss_of(made(settings), swapped, logits.flip(1))
    assert other["loss"][0].item() != pytest.approx(whole["loss"][0].item(), rel=1e-3)
    assert other["reward_margin"][0].item() == pytest.approx(-whole["reward_margin"][0].item())


@pytest.mark.parametrize("log_prob", [-1e-17, -1e-9, -0.3, -math.log(2), -0.8, -40.0, -800.0])
def test_odds_are_exact_from_almost_certain_to_hopeless(log_prob: float) -> None:
    known = torch.tensor([log_prob], dtype=torch.float64, requires_grad=True)
    odds = orpo.log_odds(known)
    odds.backward(torch.ones(1))
    assert known.grad is not None
    assert known.grad.isfinite().all()
    if log_prob < -1e-16:
        wanted = log_prob - math.log(-math.expm1(log_prob))
        assert odds.item() == pytest.approx(wanted, rel=1e-12)
        assert known.grad.item() == pytest.approx(-1 / math.expm1(log_prob), rel=1e-9)
