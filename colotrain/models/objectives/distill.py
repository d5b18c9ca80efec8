"""Knowledge distillation (Hinton et al. 2015) from the teacher's most probable tokens.

With p and q the teacher's and the student's probabilities at temperature T, the loss of a target is
α T² KL(p ‖ q) + (1 - α) · cross-entropy. Of p only the top k are known, and the sum of all others:
KL is that of distributions over k + 1 outcomes, of which the last stands for all other tokens. So
the loss is least where q equals p in the top k. With p scaled to a sum of 1 over these, a student
learns too much certainty (Anshumann et al. 2025, "Sparse Logit Sampling").

A row of a batch's `teacher` [..., 2k + 1] is int32: the top k tokens, the bits of their float32
log-probabilities, and those of the log-probability of all others.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from colotrain.models.context_parallel import own_tokens
from colotrain.models.loss import (
    Logits,
    Vocabulary,
    computing,
    exact_dtype,
    in_chunks,
    rows_at_once,
    shape_,
)
from colotrain.models.objectives.base import Forward, Kept, Objective
from colotrain.records import to_plain
from colotrain.spec.objectives import IGNORE_INDEX, DistillPlan
from colotrain.spec.phases import Phase

TEACHER = "teacher"
"""Entry of a batch with the teacher's rows."""
(UNKNOWN,) = struct.unpack("=i", struct.pack("=f", math.nan))
"""The bits of a float NaN, as an integer."""


def objective(plan: DistillPlan) -> Objective:
    kept = Kept(
        entry=TEACHER,
        shape=lambda labels: (*labels, plan.row_size),
        unknown=torch.tensor(UNKNOWN, dtype=torch.int32),
        rows=functools.partial(rows_of_teacher, plan=plan),
        settings=to_plain(plan) | {"alpha": None},
        phase=Phase.TEACHER,
        what="the teacher's {num} {split} samples",
        source="teacher",
        other="weights of train.distill.teacher: another teacher is learned from, from step "
        "{step} on",
    )
    context = functools.partial(learning_from_teacher, plan=plan)
    return Objective(
        "train.objective=distill",
        lambda batch, output: output,
        inputs_of,
        context,
        kept,
        of_whole=False,
    )


def rows_of_teacher(model: Forward, batch: Mapping[str, Tensor], *, plan: DistillPlan) -> Tensor:
    """Rows [samples, seq, 2k + 1] of the teacher, whose probabilities are kept."""
    with as_teacher(plan):
        found: Tensor = model(**batch)[0]
    return found.unflatten(0, batch["labels"].shape)


def inputs_of(batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """What forward gets: all but the teacher's rows."""
    return {name: tensor for name, tensor in batch.items() if name != TEACHER}


def learning_from_teacher(
    model: nn.Module, batch: Mapping[str, Tensor], *, plan: DistillPlan
) -> AbstractContextManager[None]:
    """Context in which a causal model's loss is that of distillation."""

    def loss(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        shape: Logits,
        part: Vocabulary | None,
    ) -> Tensor:
        teacher = own_tokens(model, batch[TEACHER]).flatten(0, -2)
        rows = torch.cat([labels.int().unsqueeze(1), teacher], 1)
        chunk = functools.partial(_chunk, shape=shape, plan=plan, part=part or _WHOLE)
        return in_chunks(x, weight, bias, rows, chunk)

    return computing(loss)


def as_teacher(plan: DistillPlan) -> AbstractContextManager[None]:
    """Context in which a causal model returns its rows [tokens, 2k + 1] instead of a loss."""

    def rows_of(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        shape: Logits,
        part: Vocabulary | None,
    ) -> Tensor:
        assert part is None, "a teacher is whole on every rank"
        found = torch.empty(len(x), plan.row_size, dtype=torch.int32, device=x.device)
        step = rows_at_once(weight)
        for start in range(0, len(x), step):
            products = F.linear(x[start : start + step], weight, bias)
            logits, _ = shape_(products.to(exact_dtype(x)), shape)
            logs = logits.div_(plan.temperature).log_softmax(1)
            top = logs.topk(plan.top_k)
            rest = logs.exp_().scatter_(1, top.indices, 0.0).sum(1, keepdim=True).log()
            bits = torch.cat([top.values, rest], 1).float().view(torch.int32)
            found[start : start + step] = torch.cat([top.indices.int(), bits], 1)
            del products, logits, logs  # before the next chunk's exist
        return found

    return computing(rows_of)


class _WholeVocabulary:
    """`loss.Vocabulary` where no ranks divide it."""

    def at(self, values: Tensor, tokens: Tensor) -> Tensor:
        return values.gather(1, tokens)

    def put_(self, values: Tensor, tokens: Tensor, given: Tensor) -> Tensor:
        return values.scatter_(1, tokens, given)

    def sum(self, values: Tensor) -> Tensor:
        return values.sum(1)

    def log_softmax(self, logits: Tensor) -> Tensor:
        return logits.log_softmax(1)


_WHOLE = _WholeVocabulary()


def _chunk(
    products: Tensor, rows: Tensor, *, shape: Logits, plan: DistillPlan, part: Vocabulary
) -> tuple[Tensor, Tensor]:
    """Losses of some rows, and their gradients with respect to the products, which are lost."""
    k, heat, alpha = plan.top_k, plan.temperature, plan.alpha
    labels, ids = rows[:, 0].long(), rows[:, 1 : k + 1].long()
    logs = rows[:, k + 1 :].contiguous().view(torch.float32).to(exact_dtype(products))
    logits, damping = shape_(products.to(exact_dtype(products)), shape)
    valid = labels != IGNORE_INDEX
    index = labels.where(valid, 0).unsqueeze(1)
    hard = part.log_softmax(logits)
    losses = -(1.0 - alpha) * part.at(hard, index).squeeze(1)
    slope = hard.exp_()
    part.put_(slope, index, part.at(slope, index) - 1.0)
    slope *= 1.0 - alpha
    soft = part.log_softmax(logits.div_(heat))
    known = part.at(soft, ids)
    soft.exp_()
    top = part.at(soft, ids)
    part.put_(soft, ids, torch.zeros_like(top))
    p, rest = logs[:, :k].exp(), logs[:, k].exp()
    left = part.sum(soft).clamp(min=torch.finfo(soft.dtype).tiny)
    of_rest = torch.where(rest == 0, 0.0, rest * (logs[:, k] - left.log()))
    losses += alpha * heat**2 * ((p * (logs[:, :k] - known)).sum(1) + of_rest)
    soft *= (1.0 - rest / left).unsqueeze(1)
    slope.add_(part.put_(soft, ids, top - p), alpha=alpha * heat)
    losses = losses.where(valid, 0.0)
    slope *= valid.unsqueeze(1)
    if damping is not None:
        slope *= damping
    return losses, slope if shape.scale == 1.0 else slope.mul_(shape.scale)
