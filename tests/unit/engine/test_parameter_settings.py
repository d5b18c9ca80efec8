"""Which parameters decay: against transformers' own list of parameters, and by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from colotrain.engine.optim.parameter_settings import norms_and_biases, settings_of
from colotrain.errors import ConfigError
from colotrain.runs.resolving import plan_from
from colotrain.verify.optimizers import names_without_decay
from tests.dist.conftest import SMALL

transformers = pytest.importorskip("transformers")


class Gain(nn.Module):
    """A gain of two dimensions in a module whose class says nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 8))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down_proj = nn.Parameter(torch.ones(3, 8, 8))
        self.down_proj_bias = nn.Parameter(torch.ones(3, 8))
        self.k_norm = nn.Parameter(torch.ones(4, 8))


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm_proj = nn.Embedding(5, 8), nn.Linear(8, 8)
        self.q_norm, self.experts = Gain(), Experts()
        self.images = nn.LayerNorm((4, 8))
        self.heads = nn.MultiheadAttention(8, 2, add_bias_kv=True)
        self.layers = nn.ModuleList([Gain()])


DECAYING = {
    "embed.weight",
    "norm_proj.weight",
    "experts.down_proj",
    "heads.in_proj_weight",
    "heads.out_proj.weight",
    "layers.0.weight",
}


def test_norms_and_biases_of_two_dimensions_do_not_decay() -> None:
    model, plan = Own(), plan_from([*SMALL, "optim.weight_decay=0.3"]).optim
    undecayed = norms_and_biases(model)
    found = {
        name
        for name, p in model.named_parameters()
        if settings_of(name, p.ndim, plan, undecayed=undecayed).weight_decay
    }
    assert found == DECAYING
    everything = {name for name, _ in model.named_parameters()}
    assert everything - names_without_decay(model) == DECAYING


def test_a_rule_matches_any_name_of_a_tied_parameter() -> None:
    rules = "optim.rules=[{match: head.*, lr_scale: 0.5}]"
    tied = plan_from([*SMALL, "model.args.tie_embeddings=true", rules])
    found = settings_of("embed.weight", 2, tied.optim, aliases=("embed.weight", "head.weight"))
    assert found.lr_scale == 0.5
    assert settings_of("embed.weight", 2, tied.optim).lr_scale == 1.0
    with pytest.raises(ConfigError, match=r"optim\.rules\[0\]\.match"):
        plan_from([*SMALL, rules.replace("head.*", "tail.*")])


def test_muon_leaves_norms_and_biases_to_adamw() -> None:
    plan = plan_from([*SMALL, "optim.name=muon"]).optim
    assert settings_of("layers.0.q_norm", 2, plan).is_hidden
    assert not settings_of("layers.0.q_norm", 2, plan, undecayed={"layers.0.q_norm"}).is_hidden


@pytest.mark.parametrize(
    "config",
    [
        transformers.Qwen3Config(num_hidden_layers=1, head_dim=4),
        transformers.GptOssConfig(num_hidden_layers=1, num_local_experts=2),
        transformers.CohereConfig(num_hidden_layers=1, use_qk_norm=True),
        transformers.T5Config(num_layers=1, d_model=16, d_kv=8, num_heads=2, d_ff=16),
        transformers.BertConfig(num_hidden_layers=1, hidden_size=16, num_attention_heads=2),
    ],
    ids=lambda config: config.model_type,
)
def test_parameters_that_decay_are_those_that_decay_in_transformers_trainer(config: Any) -> None:
    from transformers.trainer_pt_utils import get_parameter_names

    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config)
    forbidden = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
    theirs = set(get_parameter_names(model, [nn.LayerNorm], forbidden))
    undecayed = norms_and_biases(model)
    plan = plan_from([*SMALL, "optim.weight_decay=0.3"]).optim
    ours = {
        name
        for name, p in model.named_parameters()
        if settings_of(name, p.ndim, plan, undecayed=undecayed).weight_decay
    }
    assert ours == theirs & {name for name, p in model.named_parameters() if p.ndim > 1}
    assert ours == {name for name, _ in model.named_parameters()} - names_without_decay(model)


def test_a_warm_up_of_wsd_that_overlaps_with_its_decay_is_said() -> None:
    wsd = ("optim.schedule.name=wsd", "train.max_steps=10")
    told = plan_from(
        [*SMALL, *wsd, "optim.schedule.warmup_steps=6", "optim.schedule.decay_steps=8"]
    ).warnings
    assert any("6 steps of warm-up and 8 of decay overlap" in text for text in told), told
    quiet = plan_from(
        [*SMALL, *wsd, "optim.schedule.warmup_steps=2", "optim.schedule.decay_steps=8"]
    ).warnings
    assert not any("overlap" in text for text in quiet)
