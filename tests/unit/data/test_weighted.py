"""Samples drawn by weights are a function of seed and position."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest
from torch.utils.data import Subset

from colotrain.data.read.loader import SampleOrder
from colotrain.data.read.samples import WithoutValidation
from colotrain.data.read.weighted import WeightedOrder, sample_weights
from colotrain.errors import ConfigError
from colotrain.planner.traced.survey import check_functions
from colotrain.spec.plan import DataPlan


def order(weights: list[float], *, seed: int = 3) -> WeightedOrder:
    return WeightedOrder(SampleOrder(len(weights), seed, False), np.array(weights))


def test_shares_are_those_of_the_weights() -> None:
    weights = [0.0, 1.0, 3.0, 0.0, 4.0, 0.0]
    drawn = order(weights * 500).samples_at(range(6 * 3000))
    counts = np.bincount(np.array(drawn) % 6, minlength=6) / len(drawn)
    assert counts == pytest.approx(np.array(weights) / 8, abs=0.015)
    assert counts[0] == counts[3] == counts[5] == 0.0


def test_any_position_is_found_without_those_before() -> None:
    weights = list(np.random.default_rng(0).random(97))
    whole = order(weights).samples_at(range(500))
    assert [order(weights).sample_at(p) for p in (401, 7, 96, 97)] == [
        whole[p] for p in (401, 7, 96, 97)
    ]
    assert order(weights, seed=4).samples_at(range(500)) != whole
    assert whole[:97] != whole[97:194]


def test_the_weights_of_samples_kept_for_validation_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = types.ModuleType("weighing")
    module.__dict__["weigh"] = lambda dataset: [float(value) for value in dataset]
    monkeypatch.setitem(sys.modules, "weighing", module)
    data = [1, 2, 3, 4]
    assert list(sample_weights(data, "weighing:weigh")) == [1, 2, 3, 4]
    assert list(sample_weights(WithoutValidation(data, range(3)), "weighing:weigh")) == [1, 2, 3]
    assert list(sample_weights(Subset(data, [3, 0]), "weighing:weigh")) == [4, 1]
    for wrong, says in (([0, 0], "one above 0"), ([1, -1], "there is -1")):
        with pytest.raises(ConfigError, match=says):
            sample_weights(wrong, "weighing:weigh")
    module.__dict__["weigh"] = lambda dataset: [1.0]
    with pytest.raises(ConfigError, match="a weight for each of 4 samples, not 1"):
        sample_weights(data, "weighing:weigh")


def test_functions_that_cannot_be_used_are_found_before_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = types.ModuleType("weighing")
    module.__dict__.update(rows=lambda: [1, 2], weigh=lambda dataset: [-1.0] * len(dataset))
    monkeypatch.setitem(sys.modules, "weighing", module)
    data = DataPlan(
        source="target",
        target="weighing:rows",
        sampler="weighing:weigh",
        seq_len=8,
        tokenizer="bytes",
        shuffle=True,
        validation_fraction=0.0,
    )
    with pytest.raises(ConfigError, match="there is -1"):
        check_functions(data, {"data.sampler": "weighing:weigh"}, 0)
    with pytest.raises(ConfigError) as wrong:
        check_functions(data, {"data.sampler": "weighing:no", "train.metrics": "nowhere:f"}, 0)
    assert [problem.key for problem in wrong.value.problems] == ["data.sampler", "train.metrics"]
    module.__dict__["weigh"] = lambda dataset: [1.0] * len(dataset)
    check_functions(data, {"data.sampler": "weighing:weigh"}, 0)
