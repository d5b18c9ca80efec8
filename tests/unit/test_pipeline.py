"""What models are sequences of blocks, how stages divide them, and what a stage leaves."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colotrain.engine.pipeline.sequence import find_sequence
from colotrain.engine.pipeline.stage import keep_stage_
from colotrain.models.llm import LLM
from colotrain.spec.mesh import MeshPlan
from colotrain.spec.sequence import BlockSequence, Costs, balance, bubble

IDS = torch.zeros(2, 6, dtype=torch.int64)


def llm(**args: Any) -> LLM:
    with torch.device("meta"):
        return LLM(vocab_size=16, d_model=8, num_layers=3, num_heads=2, **args)


def test_an_llm_is_a_sequence_and_a_tied_embedding_is_at_both_ends() -> None:
    found = find_sequence(llm(tie_embeddings=True), {"input_ids": IDS, "labels": IDS})
    assert found.blocks == ("blocks.0", "blocks.1", "blocks.2")
    assert found.before == ("embed.weight",)
    assert found.after == ("norm.weight", "embed.weight")
    assert found.stages_of("embed.weight", (2, 1)) == (0, 1)
    assert found.stages_of("norm.weight", (2, 1)) == (1,)
    assert found.stages_of("blocks.1.mlp.up.weight", (2, 1)) == (0,)


class Told(nn.Linear):
    """A layer that is given more than the activations."""

    def forward(self, x: Tensor, more: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) + more


class Layers(nn.Module):
    """Layers in a row, or with one of the ways in which a model is no sequence of them."""

    def __init__(self, way: str = "") -> None:
        super().__init__()
        self.way = way
        self.embed = nn.Embedding(16, 8)
        kind = Told if way == "tells layers" else nn.Linear
        self.layers = nn.ModuleList(kind(8, 8) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 16)
        if way == "keeps buffers":
            self.layers[1].register_buffer("seen", torch.zeros(()))
        if way == "normalizes":
            self.head = nn.Sequential(nn.Flatten(0, 1), nn.BatchNorm1d(8), self.head)
        if way == "scores a norm":
            self.embed = nn.Sequential(self.embed, nn.Linear(8, 8))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = first = self.embed(input_ids)
        if self.way == "skips unseen":
            first = first.detach()
        if self.way == "skips in place":
            first = torch.zeros_like(first).copy_(first.data)
        if self.way == "hides":
            first = torch.rand(first.shape)
        if self.way == "adds an input":
            first = input_ids[..., None]
        if self.way == "scales before":
            x = x * self.scale
        for index, layer in enumerate(self.layers):
            before, x = x, layer(x) if self.way != "tells layers" else layer(x, first.detach())
            if self.way == "adds between":
                x = x + before
            if self.way == "scales between" and index == 0:
                x = x * self.scale
            if self.way == "repeats" and index == 1:
                x = layer(x)
        beside = ("skips", "skips unseen", "skips in place", "hides", "adds an input")
        loss = self.head(x + first if self.way in beside else x).sum()
        if self.way == "scores a norm":
            loss = loss + self.embed[1].weight.detach().norm()
        if self.way == "scores a layer":
            loss = loss + self.layers[0].weight.detach().norm()
        return loss


@pytest.mark.parametrize(
    ("way", "why"),
    [
        ("skips", "what embed.weight gives reaches the loss beside the blocks"),
        ("adds between", "layers.1 does not take what layers.0 returned"),
        ("scales between", "scale, which belongs to no block, is used within or between blocks"),
        (
            "scales before",
            "scale belongs to no module that runs before the first block: move it into one",
        ),
        ("skips unseen", "what embed.weight gives reaches the loss beside the blocks"),
        ("skips in place", "what embed.weight gives reaches the loss beside the blocks"),
        ("hides", "what a random number gives reaches the loss beside the blocks"),
        (
            "tells layers",
            "layers.1 takes what embed.weight gives beside what the block before gives",
        ),
        ("scores a layer", "what layers.0.weight gives reaches the loss beside the blocks"),
        ("scores a norm", "embed.1.weight is used before the blocks and in the loss"),
        ("normalizes", "it has buffers that checkpoints keep (head.1.running_mean)"),
        ("repeats", "layers.1 is called more than once"),
        ("keeps buffers", "it has buffers that checkpoints keep (layers.1.seen)"),
    ],
)
def test_a_model_that_is_no_sequence_is_told_why(way: str, why: str) -> None:
    assert find_sequence(Layers(), {"input_ids": IDS}).against == ""
    assert find_sequence(Layers("adds an input"), {"input_ids": IDS}).against == ""
    assert find_sequence(Layers(way), {"input_ids": IDS}).against == why


@pytest.mark.parametrize("index", [0, 1, 2])
def test_parameters_of_other_stages_have_no_memory_and_names_do_not_change(index: int) -> None:
    model = Layers()
    names = [name for name, _ in model.named_parameters()]
    sequence = find_sequence(model, {"input_ids": IDS})
    stage = keep_stage_(model, sequence, (1, 1, 1), index, compute_dtype=None)
    assert [name for name, _ in model.named_parameters()] == names
    held = {name for name, p in model.named_parameters() if not p.is_meta}
    ends = {0: {"embed.weight", "scale"}, 1: set(), 2: {"head.weight", "head.bias"}}
    assert held == {f"layers.{index}.weight", f"layers.{index}.bias", *ends[index]}
    assert stage.ahead == 2 - index


def test_a_split_is_as_good_as_any() -> None:
    rng = random.Random(3)
    for _ in range(60):
        costs = Costs(
            blocks=tuple(rng.randrange(1, 9) for _ in range(rng.randrange(2, 8))),
            after=rng.randrange(0, 20),
        )
        stages = rng.randrange(1, len(costs.blocks) + 1)

        def slowest(split: tuple[int, ...], costs: Costs = costs) -> int:
            rest, each = list(costs.blocks), []
            for count in split:
                each.append(sum(rest[:count]))
                del rest[:count]
            return max((*each[:-1], each[-1] + costs.after))

        sizes = range(1, len(costs.blocks) + 1)
        every = [
            split
            for split in itertools.product(sizes, repeat=stages)
            if sum(split) == len(costs.blocks)
        ]
        assert slowest(balance(costs, stages)) == min(map(slowest, every))
    assert balance(Costs(blocks=(4, 4, 4, 4), after=9), 2) == (3, 1)
    assert bubble(4, 12) == pytest.approx(0.2)


def test_ranks_of_a_stage_follow_one_another_and_stages_read_the_same_samples() -> None:
    mesh = MeshPlan(pp=2, tp=2)
    assert [mesh.data_rank(rank, world=8) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    firsts = [rank for rank in range(8) if mesh.reads_first(rank, world=8)]
    assert firsts == [0, 2]
    assert mesh.together == 4
    assert BlockSequence().stages_of("unused", (1, 1)) == (0,)
