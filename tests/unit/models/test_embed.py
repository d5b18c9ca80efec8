"""The loss of embeddings is that of the whole global batch, however that is divided."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from colotrain.data.prepare.conversations import Renderer
from colotrain.data.prepare.records import BadRecord
from colotrain.data.read.packing import RelatedSamples
from colotrain.models.objectives import embed
from colotrain.models.objectives.base import POSITIONS
from colotrain.spec.objectives import EmbedPlan, RelatedPlan

SEQ, WIDTH, SCALE = 6, 5, 3.0


class Encoder(nn.Module):
    """Hidden states that depend on the tokens alone; dropout draws in training."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        self.table = nn.Parameter(torch.randn(11, WIDTH, generator=draw, dtype=torch.float64))
        self.dropout = dropout

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        return (F.dropout(self.table[input_ids], self.dropout),)


def batch_of(num: int, texts: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(3)
    ids = torch.randint(11, (num, texts, SEQ), generator=draw)
    lengths = torch.randint(1, SEQ + 1, (num, texts, 1), generator=draw)
    return {"input_ids": ids, "attention_mask": (torch.arange(SEQ) < lengths).long()}


def formula(model: nn.Module, batch: dict[str, Tensor], pooling: str) -> Tensor:
    """MultipleNegativesRankingLoss of sentence-transformers, of texts without padding."""
    vectors = []
    for ids, seen in zip(*(batch[n].flatten(0, 1) for n in batch), strict=True):
        hidden = model(ids[: seen.sum()][None], None)[0][0]
        pooled = {"mean": hidden.mean(0), "last": hidden[-1], "cls": hidden[0]}
        vectors.append(pooled[pooling])
    anchors, *others = torch.stack(vectors).view(*batch["input_ids"].shape[:2], -1).unbind(1)
    candidates = torch.cat(others)
    scores = F.normalize(anchors) @ F.normalize(candidates).T * SCALE
    return F.cross_entropy(scores, torch.arange(len(anchors)))


@pytest.mark.parametrize("size", [1, 2, 6])
@pytest.mark.parametrize(("pooling", "texts"), [("mean", 2), ("last", 3), ("cls", 3)])
def test_micro_batches_add_up_to_the_formula(pooling: Any, texts: int, size: int) -> None:
    """The positive is that of the query's own position, the negatives are those of all samples."""
    model, batch = Encoder(), batch_of(6, texts)
    wanted = formula(model, batch, pooling)
    wanted.backward()
    gradient = model.table.grad
    assert gradient is not None
    model.table.grad = None
    objective = embed.objective(EmbedPlan(pooling=pooling, scale=SCALE, negatives=texts == 3))
    assert objective.global_rows is not None
    whole = objective.global_rows.alone(model, batch)
    total, right = 0.0, 0.0
    for at in torch.arange(6).split(size):
        part = whole | {name: batch[name][at] for name in batch} | {POSITIONS: at}
        found = objective.loss(part, model(**objective.inputs(part)))
        (found["loss"][0] / 6).backward()
        total, right = total + found["loss"][0].item(), right + found["accuracy"][0].item()
        assert int(found["loss"][1]) == len(at)
    assert total / 6 == pytest.approx(wanted.item(), abs=1e-12)
    assert model.table.grad is not None
    assert torch.allclose(model.table.grad, gradient, atol=1e-12)
    assert 0 <= right <= 6


def test_the_same_draws_make_the_gradient_exact_under_dropout() -> None:
    """The pass and the forwards draw the same masks; with others the gradient is another one."""
    model, batch = Encoder(dropout=0.3), batch_of(4, 2)
    objective = embed.objective(EmbedPlan(pooling="mean", scale=SCALE))
    assert objective.global_rows is not None
    parts = [{name: t[at] for name, t in batch.items()} for at in torch.arange(4).split(2)]

    def gradient(*, again: bool) -> Tensor:
        torch.manual_seed(7)
        state = torch.get_rng_state()
        with torch.no_grad():
            rows = torch.cat([objective.global_rows.rows(model, part) for part in parts])  # type: ignore
        if again:
            torch.set_rng_state(state)
        shared = objective.global_rows.entries(rows)  # type: ignore[union-attr]
        model.table.grad = None
        for part, at in zip(parts, torch.arange(4).split(2), strict=True):
            whole = {**part, **shared, POSITIONS: at}
            (objective.loss(whole, model(**objective.inputs(whole)))["loss"][0] / 4).backward()
        assert model.table.grad is not None
        return model.table.grad

    torch.manual_seed(7)
    vectors = torch.cat(
        [embed.vectors_of(p, model(**embed.inputs_of(p)), pooling="mean") for p in parts]
    )
    F.cross_entropy(SCALE * vectors[:, 0] @ vectors[:, 1].T, torch.arange(4)).backward()
    wanted = model.table.grad
    assert torch.allclose(gradient(again=True), wanted, atol=1e-12)  # type: ignore[arg-type]
    assert not torch.allclose(gradient(again=False), wanted, atol=1e-3)  # type: ignore[arg-type]


def test_texts_are_cut_before_the_tokens_that_end_them() -> None:
    plan = RelatedPlan(columns=("query", "positive"), pad_id=9, end_ids=(8,))
    documents = [(torch.tensor([1, *range(2, n), 8]).numpy(), None) for n in (4, 7, 12, 3)]
    samples = RelatedSamples(documents, 6, plan)
    assert len(samples) == 2
    assert samples[0]["input_ids"].tolist() == [[1, 2, 3, 8, 9, 9], [1, 2, 3, 4, 5, 8]]
    assert samples[1]["input_ids"].tolist() == [[1, 2, 3, 4, 5, 8], [1, 2, 8, 9, 9, 9]]
    assert samples[1]["attention_mask"].tolist() == [[1] * 6, [1, 1, 1, 0, 0, 0]]


def test_a_record_has_a_query_and_what_is_found_by_it() -> None:
    renderer = Renderer(columns={}, loss_on="answers", template=None, related=("query", "positive"))
    for name in ("query", "anchor"):
        found = renderer.documents({name: "a", "positive": "b", "id": 3})
        assert [one.text for one in found] == ["a", "b"]
        assert found[0].unread == ("id",)
    for record, why in (
        ({"query": "a"}, "positive: expected a text; the record has query"),
        ({"query": " ", "positive": "b"}, "query: it is empty"),
        ({"query": "a", "positive": 3}, "positive: expected text, not"),
        ({"query": "a", "positive": "b", "negative": "c"}, "train.embed.negatives: true, or rec"),
    ):
        with pytest.raises(BadRecord, match=why):
            renderer.documents(record)
