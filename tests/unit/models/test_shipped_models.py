"""Blocks of colotrain's own models are groups without a trial, which would say the same."""

from __future__ import annotations

import itertools

import pytest
import torch

from colotrain.engine.model.block_reasons import reasons_without_values
from colotrain.engine.model.model_blocks import find_blocks
from colotrain.engine.sharding.grouping import _parts
from colotrain.models.loading import build_on_meta
from colotrain.spec.plan import ModelPlan

SIZES = {"vocab_size": 50, "d_model": 16, "num_layers": 3, "num_heads": 4}


@pytest.mark.parametrize(
    ("tied", "kv_heads", "documents"), [*itertools.product([False, True], [4, 2], [False, True])]
)
def test_a_trial_has_nothing_against_any_block_or_part_of_one(
    tied: bool, kv_heads: int, documents: bool
) -> None:
    args = SIZES | {"tie_embeddings": tied, "num_kv_heads": kv_heads}
    plan = ModelPlan(target="colotrain.models.llm:LLM", args=args)
    assert plan.is_shipped
    model = build_on_meta(plan)
    assert model is not None
    names = ["input_ids", "labels", *(["document_ids"] if documents else [])]
    batch = {name: torch.zeros(2, 8, dtype=torch.int64) for name in names}
    blocks = find_blocks(model)
    assert [name for name, _ in blocks] == ["blocks.0", "blocks.1", "blocks.2"]
    tried = [*blocks, *(part for block in blocks for part in _parts(*block))]
    assert len(tried) == 3 * 12
    assert reasons_without_values(model, tried, batch) == {}
