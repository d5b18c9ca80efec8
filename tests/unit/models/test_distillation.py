"""Distillation: the chunked loss and its gradients are those of the formula in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colotrain.models import loss as chunked
from colotrain.models.llm import LLM
from colotrain.models.loss import Logits, cross_entropy
from colotrain.models.objectives.distill import TEACHER, as_teacher, learning_from_teacher
from colotrain.spec.objectives import IGNORE_INDEX, DistillPlan

ROWS, WIDTH, VOCAB = 11, 6, 17


def plan_of(**changes: Any) -> DistillPlan:
    settings = {"teacher": "", "top_k": 5, "alpha": 0.7, "temperature": 1.7}
    return DistillPlan(**{**settings, **changes})


def plain(taught: Tensor, logits: Tensor, labels: Tensor, plan: DistillPlan) -> Tensor:
    """The formula, from all logits: KL over the top k and one outcome for all others."""
    total = torch.zeros((), dtype=logits.dtype)
    for theirs, ours, label in zip(taught, logits, labels.tolist(), strict=True):
        if label == IGNORE_INDEX:
            continue
        p, q = ((row / plan.temperature).softmax(0) for row in (theirs, ours))
        top = set(p.topk(plan.top_k).indices.tolist())
        rest = [token for token in range(len(p)) if token not in top]
        kl = sum(p[token] * (p[token] / q[token]).log() for token in top)
        if rest:
            kl = kl + p[rest].sum() * (p[rest].sum() / q[rest].sum()).log()
        hard = -ours.log_softmax(0)[label]
        total = total + plan.alpha * plan.temperature**2 * kl + (1 - plan.alpha) * hard
    return total


@pytest.mark.parametrize(
    ("changes", "shape"),
    [
        ({}, Logits()),
        ({"alpha": 1.0, "temperature": 1.0, "top_k": 1}, Logits(scale=0.5)),
        ({"alpha": 0.0}, Logits(cap=2.0)),
        ({"top_k": VOCAB}, Logits(scale=3.0, cap=4.0)),
    ],
)
def test_loss_and_gradients_are_those_of_the_formula(
    changes: dict[str, Any], shape: Logits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, "CHUNK_LOGITS", 4 * VOCAB)  # chunks of four rows
    plan, draw = plan_of(**changes), torch.Generator().manual_seed(torch.seed() % 2**31)

    def random(*sizes: int) -> Tensor:
        return torch.randn(*sizes, dtype=torch.float64, generator=draw)

    labels = torch.randint(VOCAB, (ROWS,), generator=draw)
    labels[3] = IGNORE_INDEX
    teacher_x, teacher_weight = random(ROWS, WIDTH), random(VOCAB, WIDTH)
    x, weight, bias = (
        random(*s).requires_grad_() for s in ((ROWS, WIDTH), (VOCAB, WIDTH), (VOCAB,))
    )

    def shaped(products: Tensor) -> Tensor:
        products = products * shape.scale
        return products if shape.cap is None else shape.cap * (products / shape.cap).tanh()

    wanted = plain(teacher_x @ teacher_weight.T, shaped(x @ weight.T + bias), labels, plan)
    gradients = torch.autograd.grad(wanted, (x, weight, bias))
    with as_teacher(plan):
        rows = cross_entropy(teacher_x, teacher_weight, labels)
    assert rows.dtype == torch.int32
    with learning_from_teacher(torch.nn.Module(), {TEACHER: rows.unsqueeze(0)}, plan=plan):
        found = cross_entropy(x, weight, labels, bias=bias, logits=shape)
    assert found.item() == pytest.approx(wanted.item(), rel=1e-6)  # log p is kept in float32
    for mine, theirs in zip(torch.autograd.grad(found, (x, weight, bias)), gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_a_student_that_is_its_teacher_has_nothing_to_learn() -> None:
    torch.manual_seed(0)
    model = LLM(vocab_size=VOCAB, d_model=8, num_layers=1, num_heads=1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    ids = torch.randint(VOCAB, (2, 6))
    plan = plan_of(alpha=1.0)
    with torch.no_grad(), as_teacher(plan):
        rows = model(input_ids=ids, labels=ids)[0].unflatten(0, ids.shape)
    with learning_from_teacher(torch.nn.Module(), {TEACHER: rows}, plan=plan):
        loss, count = model(input_ids=ids, labels=ids)
    loss.backward()
    assert count == ids.numel()
    assert abs(loss.item()) < 1e-5
    assert max(p.grad.abs().max().item() for p in model.parameters() if p.grad is not None) < 1e-5
