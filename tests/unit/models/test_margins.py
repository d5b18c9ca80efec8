"""Reward models: margins of pairs are read, and the loss is TRL's."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from colotrain.data.prepare.conversations import Renderer
from colotrain.data.prepare.records import BadRecord, UnreadColumn
from colotrain.data.read.loader import open_samples
from colotrain.errors import ConfigError
from colotrain.models.objectives import reward
from colotrain.spec.objectives import RewardPlan
from colotrain.spec.plan import DataPlan

PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}


def test_a_loss_with_margins_is_that_of_trls_reward_trainer() -> None:
    """TRL 1.16, `RewardTrainer.compute_loss`; TRL has all chosen texts before the rejected ones."""
    draws = torch.Generator().manual_seed(3)
    rewards, margin = torch.randn(6, 2, generator=draws), torch.randn(6, generator=draws)
    labels = torch.zeros(6, 2, 4, dtype=torch.int64)
    batch = {"labels": labels, "margin": margin}
    objective = reward.objective(RewardPlan(pad_id=0, center_coefficient=0.3, margins=True))
    logits = rewards.view(-1, 1)
    total, count = objective.loss(batch, SimpleNamespace(logits=logits))["loss"]
    chosen, rejected = torch.chunk(torch.cat([rewards[:, 0], rewards[:, 1]]), chunks=2)
    wanted = -functional.logsigmoid(chosen - rejected - margin).mean()
    wanted += 0.3 * torch.mean((chosen + rejected) ** 2)
    assert (total / count).item() == pytest.approx(wanted.item(), abs=1e-6)
    named = {"input_ids": labels, "padding_mask": labels, "margin": margin}
    assert [*objective.inputs(named)] == ["input_ids", "padding_mask"]


def write(folder: Path, *records: dict[str, Any]) -> None:
    (folder / "train.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))


def plan_of(folder: Path, **more: Any) -> DataPlan:
    settings = {"source": "path", "paths": (str(folder / "train.jsonl"),), "tokenizer": "bytes"}
    settings |= {"seq_len": 8, "pairs": True, "marks_padding": True, "validation_fraction": 0.0}
    return DataPlan(**settings | more)


def test_each_pair_has_its_own_margin(tmp_path: Path) -> None:
    chosen = [PAIR | {"chosen": "b" * n, "margin": m} for n, m in ((1, 0.5), (2, "-2"), (3, 1))]
    write(tmp_path, chosen[0], PAIR | {"chosen": "", "margin": 9}, *chosen[1:])
    plan = plan_of(tmp_path, margins=True, on_bad="skip")
    samples = open_samples(plan, "train", cache=tmp_path / "cache")
    found = [(samples[i]["input_ids"][0].tolist(), samples[i]["margin"].item()) for i in range(3)]
    assert [(ids[1:4].count(98), margin) for ids, margin in found] == [
        (1, 0.5),
        (2, -2.0),
        (3, 1.0),
    ]
    write(tmp_path, *(PAIR | {"margin": 1} for _ in range(3)))
    other = open_samples(plan_of(tmp_path, margins=None), "train", cache=tmp_path / "cache")
    assert "margin" not in other[0]


def test_margins_that_are_not_read_are_told_at_once(tmp_path: Path) -> None:
    write(tmp_path, PAIR, PAIR | {"margin": 0.0})
    plan = plan_of(tmp_path, margins=False, on_bad="skip")
    with pytest.raises(ConfigError) as error:
        open_samples(plan, "train", cache=tmp_path / "cache")
    (problem,) = error.value.problems
    assert (problem.key, problem.fix) == ("train.reward.margins", "set train.reward.margins=true")
    assert f"column margin ({tmp_path / 'train.jsonl'}:2 has one)" in problem.expected


def test_columns_of_other_objectives_are_not_asked_for() -> None:
    def wanted(**more: Any) -> set[str]:
        renderer = Renderer(columns={}, loss_on="answers", template=None, **more)
        return {"tokens", "labels", "margin"} & renderer.wanted()

    assert wanted() == wanted(pairs=True) == set()
    assert wanted(pairs=True, margins=False) == {"margin"}
    assert wanted(classes=("a", "b"), classes_of_words=True) == {"tokens", "labels"}


@pytest.mark.parametrize("value", [None, "much", True, float("nan"), float("inf"), [1]])
def test_a_margin_is_a_number(value: Any) -> None:
    renderer = Renderer(columns={}, loss_on="answers", template=None, pairs=True, margins=True)
    with pytest.raises(BadRecord, match="margin: expected a number") as caught:
        renderer.documents(PAIR | {"margin": value})
    assert not isinstance(caught.value, UnreadColumn)
