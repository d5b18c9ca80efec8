"""Reward models: the formula, the text's last token, and a new head as transformers draws it."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from colotrain.errors import ConfigError
from colotrain.models.loading import build_whole
from colotrain.models.objective import attach_, inputs_of, output_of
from colotrain.models.objectives import reward
from colotrain.spec.objectives import RewardPlan
from colotrain.spec.plan import ModelPlan
from tests.dist.hf import make_directory

transformers = pytest.importorskip("transformers")

PAD = 7


def plan_of(folder: Path, pad_id: int = PAD) -> ModelPlan:
    return ModelPlan(target="", hf=str(folder), objective=RewardPlan(pad_id=pad_id))


def test_the_loss_is_the_formulas_and_a_pair_without_an_answer_does_not_count() -> None:
    rewards = torch.tensor([[0.7], [-0.2], [3.0], [4.0], [-1.5], [0.4]], dtype=torch.float64)
    labels = torch.ones(3, 2, 5, dtype=torch.int64)
    labels[1, 0] = -100
    output: Any = SimpleNamespace(logits=rewards.requires_grad_())
    found = reward.loss_of({"labels": labels}, output, coefficient=0.3)
    wanted = 0.0
    for chosen, rejected in ((0.7, -0.2), (-1.5, 0.4)):
        wanted += math.log(1 + math.exp(rejected - chosen)) + 0.3 * (chosen + rejected) ** 2
    total, count = found["loss"]
    assert (total.item(), count.item()) == (pytest.approx(wanted, rel=1e-12), 2)
    assert found["reward_margin"][0].item() == pytest.approx(0.9 - 1.9)
    assert found["reward_accuracy"][0].item() == 1
    total.backward()
    assert rewards.grad is not None
    assert not rewards.grad[2:4].any()


def test_the_last_token_that_is_not_padding_is_scored(tmp_path: Path) -> None:
    folder, draw = make_directory("llama", tmp_path / "llama"), torch.Generator().manual_seed(2)
    plan = plan_of(folder)
    model = build_whole(plan, seed=5)
    attach_(model, plan)
    lengths = torch.tensor([[3, 9], [12, 1]])
    ids = torch.randint(PAD + 1, 90, (2, 2, 12), generator=draw)
    mask = (torch.arange(12) < lengths.unsqueeze(-1)).long()
    batch = {"input_ids": ids * mask, "padding_mask": mask, "labels": torch.ones_like(ids)}
    with torch.no_grad():
        found = model(**inputs_of(model, batch)).logits.view(2, 2)
        theirs = transformers.LlamaForSequenceClassification.from_pretrained(
            folder, num_labels=1, pad_token_id=PAD
        )
        theirs.load_state_dict(model.state_dict())
        for pair in range(2):
            for answer in range(2):
                text = ids[pair, answer, : lengths[pair, answer]].unsqueeze(0)
                hidden = theirs.model(input_ids=text).last_hidden_state[0, -1]
                wanted = theirs.score(hidden).item()
                assert found[pair, answer].item() == pytest.approx(wanted, abs=1e-6)
    assert output_of(model, batch)["loss"][1].item() == 2


def test_the_new_head_is_what_transformers_draws(tmp_path: Path) -> None:
    folder = make_directory("llama", tmp_path / "llama")
    found = build_whole(plan_of(folder), seed=5).state_dict()
    torch.manual_seed(5)
    wanted = transformers.LlamaForSequenceClassification.from_pretrained(folder, num_labels=1)
    assert all(torch.equal(tensor, found[n]) for n, tensor in wanted.state_dict().items())
    other = build_whole(plan_of(folder), seed=6).state_dict()
    assert not torch.equal(other["score.weight"], found["score.weight"])


def test_what_cannot_have_the_head_is_refused(tmp_path: Path) -> None:
    folder = make_directory("llama", tmp_path / "llama")
    with pytest.raises(ConfigError, match="a vocabulary with the padding token 96"):
        build_whole(plan_of(folder, 96), seed=0)
    sizes = {"d_model": 8, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 96, "d_kv": 4}
    other = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))
    other.save_pretrained(tmp_path / "t5")
    with pytest.raises(ConfigError, match="expected a causal model or an encoder"):
        build_whole(plan_of(tmp_path / "t5"), seed=0)
