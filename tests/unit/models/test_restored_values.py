"""Values that a checkpoint or a copy will give are neither computed nor read before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from colotrain.models import llm
from colotrain.models.loading import allocate_, build, build_whole, fill_
from colotrain.spec.plan import ModelPlan
from tests.dist import hf

ARGS = {"vocab_size": 16, "d_model": 8, "num_layers": 2, "num_heads": 2}


class WithExtra(llm.LLM):
    """A model of a user's, whose `init_weights()` does more."""

    def init_weights(self) -> None:
        super().init_weights()
        self.was_called = True


def own(**args: object) -> ModelPlan:
    return ModelPlan(target="colotrain.models.llm:LLM", hf=None, args=ARGS | args)


def filled(plan: ModelPlan, given: set[str]) -> nn.Module:
    """The model, whose parameters were 7 before it was filled."""
    model = build(plan, seed=3)
    allocate_(model, device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    fill_(model, plan, seed=3, given=given)
    return model


def untouched(model: nn.Module) -> set[str]:
    return {n for n, p in model.named_parameters() if torch.equal(p, torch.full_like(p, 7.0))}


def names(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_parameters()}


def test_the_own_llm_computes_no_initial_values_where_all_are_given() -> None:
    every = names(build(own(), seed=3))
    assert untouched(filled(own(), every)) == every


def test_one_missing_parameter_gets_the_value_that_it_has_without_a_checkpoint() -> None:
    every = names(build(own(), seed=3))
    found, expected = filled(own(), every - {"head.weight"}), build_whole(own(), seed=3)
    assert torch.equal(found.get_parameter("head.weight"), expected.get_parameter("head.weight"))


def test_the_init_weights_of_a_users_model_is_always_called() -> None:
    plan = ModelPlan(target=f"{__name__}:WithExtra", hf=None, args=ARGS)
    assert filled(plan, names(build(plan, seed=3))).was_called


def test_of_a_directory_only_the_other_tensors_are_read(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    plan = ModelPlan(target="", hf=str(hf.make_directory("llama", tmp_path / "llama")), args={})
    every = names(build(plan, seed=3))
    given = {name for name in every if "layers.0" in name}
    found, expected = filled(plan, given), build_whole(plan, seed=3)
    assert untouched(found) == given
    for name in every - given:
        assert torch.equal(found.get_parameter(name), expected.get_parameter(name))
