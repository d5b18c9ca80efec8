"""Embeddings, by contrast with the other texts of the global batch.

A batch has `input_ids` and `attention_mask` [samples, texts, seq]: a query, what is to be found by
it, and where there is one a negative. The loss of a query is the cross-entropy of its own positive
among all positives and negatives of the global batch; logits are cosine similarities times a scale
(MultipleNegativesRankingLoss of sentence-transformers; Henderson et al. 2017).

The vectors of all other micro-batches are constants in a micro-batch. Its own are candidates of
every query, so that its gradient is that of the whole global batch's loss with respect to its own
vectors; these gradients add up to the exact one (GradCache, Gao et al. 2021). Its value is the loss
of its own queries alone.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from colotrain.models.loss import exact_dtype
from colotrain.models.objectives.base import POSITIONS, Forward, GlobalRows, Objective
from colotrain.spec.objectives import EmbedPlan, Pooling

QUERIES, CANDIDATES, TOTALS = "queries", "candidates", "totals"
"""Entries of a batch: vectors of all queries [samples, d]; of all positives, then all negatives
[candidates, d]; and the logarithm of each query's sum of exponentials of logits [samples]."""
MOST_LOGITS = 1 << 24
"""Logits that exist at a time while totals are computed."""


def objective(plan: EmbedPlan) -> Objective:
    vectors = functools.partial(vectors_of, pooling=plan.pooling)
    entries = functools.partial(entries_of, scale=plan.scale)

    def rows(model: Forward, batch: Mapping[str, Tensor]) -> Tensor:
        return vectors(batch, model(**inputs_of(batch)))

    def loss(batch: Mapping[str, Tensor], output: Any) -> dict[str, Any]:
        return loss_of(batch, vectors(batch, output), scale=plan.scale)

    shared = GlobalRows(rows=rows, entries=entries)
    return Objective("train.objective=embed", loss, inputs_of, global_rows=shared)


def inputs_of(batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """What forward gets: each text of each sample as one of its own.

    On the meta device it gets no mask, whose values transformers would look at.
    """
    ids, mask = (batch[name].flatten(0, 1) for name in ("input_ids", "attention_mask"))
    return {"input_ids": ids} if mask.is_meta else {"input_ids": ids, "attention_mask": mask}


def vectors_of(batch: Mapping[str, Tensor], output: Any, *, pooling: Pooling) -> Tensor:
    """Vectors [samples, texts, d] of length 1, in float32 or wider, from a model's output."""
    hidden: Tensor = output[0]
    mask = batch["attention_mask"].flatten(0, 1)
    pooled = pool(hidden.to(exact_dtype(hidden)), mask, pooling)
    return F.normalize(pooled, dim=-1).unflatten(0, batch["attention_mask"].shape[:2])


def pool(hidden: Tensor, mask: Tensor, pooling: Pooling) -> Tensor:
    """Vectors [texts, d] of hidden states [texts, seq, d]; padding is at the end."""
    match pooling:
        case "cls":
            return hidden[:, 0]
        case "last":
            last = (mask.sum(1) - 1).clamp(min=0)
            return hidden.gather(1, last[:, None, None].expand(-1, 1, hidden.shape[-1]))[:, 0]
        case "mean":
            seen = mask.unsqueeze(-1).to(hidden.dtype)
            return (hidden * seen).sum(1) / seen.sum(1).clamp(min=1e-9)


def entries_of(rows: Tensor, *, scale: float) -> dict[str, Tensor]:
    """All queries, all candidates, and what the queries' probabilities are divided by."""
    queries, candidates = rows[:, 0], rows[:, 1:].transpose(0, 1).flatten(0, 1)
    step = max(1, MOST_LOGITS // max(len(candidates), 1))
    parts = [(scale * part @ candidates.T).logsumexp(1) for part in queries.split(step)]
    return {QUERIES: queries, CANDIDATES: candidates, TOTALS: torch.cat(parts)}


def loss_of(batch: Mapping[str, Tensor], vectors: Tensor, *, scale: float) -> dict[str, Any]:
    """Summed loss and number of the batch's queries, and how many find their positive first."""
    at, queries, candidates = batch[POSITIONS], batch[QUERIES], batch[CANDIDATES]
    own_queries, own = vectors[:, 0], vectors[:, 1:].transpose(0, 1).flatten(0, 1)
    kinds = torch.arange(vectors.shape[1] - 1, device=at.device) * len(queries)
    columns = (kinds.unsqueeze(1) + at).flatten()
    logits = scale * own_queries @ candidates.T
    logits = logits.index_copy(1, columns, scale * own_queries @ own.T)
    losses = F.cross_entropy(logits, at, reduction="sum")
    of_others = scale * queries @ own.T  # never their positives
    weights = (of_others.detach() - batch[TOTALS].unsqueeze(1)).exp()
    pull = (weights.index_fill(0, at, 0.0) * of_others).sum()
    count = torch.full((), len(at), device=at.device)
    return {
        "loss": (losses + pull - pull.detach(), count),
        "accuracy": ((logits.detach().argmax(1) == at).sum(), count),
    }
