"""Objectives on samples that ranks divide have the loss and gradients of one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from colotrain.engine.gradients.accumulation import weighted_loss
from colotrain.engine.sharding.context_parallel import make_shard
from colotrain.models.context_parallel import divide_sequences_
from colotrain.models.loading import build_whole
from colotrain.models.objective import as_global_batch, attach_, is_of_whole, kept_of
from colotrain.models.objectives.base import of_whole_samples
from colotrain.models.objectives.distill import rows_of_teacher
from colotrain.spec.objectives import (
    DPO,
    GOOD,
    IGNORE_INDEX,
    KTO,
    ORPO,
    PADDING_MASK,
    ClassifyPlan,
    DistillPlan,
    EmbedPlan,
    ObjectivePlan,
    RewardPlan,
    SimPO,
)
from colotrain.spec.plan import ModelPlan
from tests.dist.hf import make_directory
from tests.dist.test_transport import run
from tests.representatives import of_each_day

pytest.importorskip("transformers")
LENGTH, VOCAB, PADDING = 16, 96, 1
OBJECTIVES: list[ObjectivePlan | str] = [
    DPO(),
    ORPO(),
    SimPO(),
    KTO(),
    RewardPlan(pad_id=PADDING, center_coefficient=0.1),
    ClassifyPlan(pad_id=PADDING, class_names=("a", "b", "c")),
    ClassifyPlan(pad_id=PADDING, class_names=("a", "b", "c"), classes_of_words=True),
    EmbedPlan(pooling="mean"),
    EmbedPlan(pooling="last"),
    EmbedPlan(pooling="cls"),
    "distill",
    "mean",
    "total",
]
"""The last two are functions of the user's; a teacher is the same model with other weights."""
ENCODERS = ("albert", "bert", "camembert", "electra", "ernie", "roberta", "xlm-roberta")
"""Types whose tokens attend to all others, and whose samples ranks can divide."""
OF_ENCODERS: list[ObjectivePlan | str] = [
    "masked",
    ClassifyPlan(pad_id=PADDING, class_names=("a", "b", "c")),
    ClassifyPlan(pad_id=PADDING, class_names=("a", "b", "c"), classes_of_words=True),
    EmbedPlan(pooling="mean"),
]


def mean(batch: Any, outputs: Any) -> Tensor:
    """A loss of samples as wholes: of the means over their tokens."""
    of_samples = outputs.logits.float().logsumexp(-1).mean(1)
    return of_samples.square().mean() + outputs.logits.cumsum(1).square().mean()


def total(batch: Any, outputs: Any) -> tuple[Tensor, Tensor]:
    labels = batch["labels"]
    found = nn.functional.cross_entropy(
        outputs.logits.flatten(0, 1), labels.flatten(), reduction="sum"
    )
    return found, (labels != IGNORE_INDEX).sum()


def texts(*shape: int) -> dict[str, Tensor]:
    """Right-padded texts of random lengths, with labels behind a prompt of random length."""
    lengths, index = torch.randint(3, LENGTH + 1, (*shape, 1)), torch.arange(LENGTH)
    ids = torch.randint(2, VOCAB, (*shape, LENGTH)).where(index < lengths, PADDING)
    is_target = (index < lengths - 1) & (index >= (lengths * torch.rand(*shape, 1)).long() - 1)
    return {"input_ids": ids, "labels": ids.roll(-1, -1).where(is_target, IGNORE_INDEX)}


def plan_of(objective: ObjectivePlan | str, folder: str) -> ModelPlan:
    args = {"dtype": "float64"}
    if objective == "distill":
        objective = DistillPlan(teacher=folder, top_k=5, temperature=2.0)
    own = f"tests.dist.test_divided_objectives:{objective}" if objective != "masked" else None
    loss, known = (own, None) if isinstance(objective, str) else (None, objective)
    return ModelPlan(target="", hf=folder, args=args, loss=loss, objective=known)


def batch_of(model: nn.Module, objective: ObjectivePlan | str) -> dict[str, Tensor]:
    if isinstance(objective, str):
        batch = texts(3)
        mask = (batch["input_ids"] != PADDING).long()
        return batch | {"attention_mask": mask} if objective == "masked" else batch
    if isinstance(objective, ClassifyPlan):
        batch = texts(3)
        labels = torch.randint(0, 3, batch["labels"].shape)
        of_words = labels.where(batch["labels"] != IGNORE_INDEX, IGNORE_INDEX)
        batch["labels"] = of_words if objective.classes_of_words else labels[:, 0]
    else:
        batch = texts(3, 2)
    mask = (batch["input_ids"] != PADDING).long()
    return batch | {GOOD: torch.tensor([1, 0, 1]), PADDING_MASK: mask, "attention_mask": mask}


def prepare_(model: nn.Module, plan: ModelPlan, batch: dict[str, Tensor]) -> None:
    """Add what a pass before a step says of the batch."""
    kept = kept_of(plan)
    with torch.no_grad():
        if isinstance(plan.objective, DistillPlan):
            teacher = build_whole(replace(plan, objective=None), seed=0)
            for parameter in teacher.parameters():
                parameter.mul_(1.5)
            batch["teacher"] = rows_of_teacher(teacher, batch, plan=plan.objective)
        elif kept is not None:
            batch[kept.entry] = kept.rows(of_whole_samples(model), batch) + torch.randn(3, 2)
        batch.update(as_global_batch(model, batch))


def compare(rank: int, folder: str) -> None:
    for number, objective in enumerate(OBJECTIVES):
        compare_objective(objective, folder, seed=number)


def compare_encoder(rank: int, folder: str) -> None:
    for number, objective in enumerate(OF_ENCODERS):
        compare_objective(objective, folder, seed=number)


def compare_objective(objective: ObjectivePlan | str, folder: str, seed: int) -> None:
    plan = plan_of(objective, folder)
    model = build_whole(plan, seed=0)
    attach_(model, plan)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    known = {n: p for n, p in model.named_parameters() if p.requires_grad}

    def step() -> tuple[list[float], dict[str, Tensor]]:
        torch.manual_seed(seed)
        batch = batch_of(model, objective)
        prepare_(model, plan, batch)
        loss, count = weighted_loss(model, batch)
        model.zero_grad()
        loss.backward()
        found = {n: 0.0 * p if p.grad is None else p.grad.clone() for n, p in known.items()}
        return [loss.item(), float(count)], {n: grad.detach() for n, grad in found.items()}

    wanted, gradients = step()
    divide_sequences_(model, make_shard(dist.group.WORLD, "cpu"))
    found, parts = step()
    sums = torch.tensor(found, dtype=torch.float64)
    if not is_of_whole(model):
        dist.all_reduce(sums)
    assert sums.tolist() == pytest.approx(wanted, rel=1e-9), objective
    for name, part in parts.items():
        dist.all_reduce(part)
        assert torch.allclose(part, gradients[name], rtol=1e-6, atol=1e-9), (objective, name)


def test_every_objective_has_the_gradients_of_the_whole(tmp_path: Path) -> None:
    sizes = {"vocab_size": VOCAB, "max_position_embeddings": 32}
    folder = make_directory("llama", tmp_path / "model", **sizes)
    run(compare, 2, str(folder))


@pytest.mark.parametrize("kind", of_each_day(ENCODERS, kept=["albert", "roberta"]))
def test_every_encoder_has_the_gradients_of_the_whole(kind: str, tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(4)
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "pad_token_id": PADDING,
    }
    sizes |= {"intermediate_size": 24, "num_attention_heads": 2, "max_position_embeddings": 32}
    config: Any = transformers.AutoConfig.for_model(kind, initializer_range=0.15, **sizes)
    model = transformers.AutoModelForMaskedLM.from_config(config)
    model.save_pretrained(tmp_path / "model")
    run(compare_encoder, 2, str(tmp_path / "model"))
