"""What a loss is a mean over is found by forwards, whatever labels it leaves out."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from colotrain.engine.gradients.accumulation import weighted_loss
from colotrain.engine.step.loss_trial import Findings, examine, notes_of
from colotrain.errors import ColotrainError, ConfigError
from colotrain.models.facts import facts_of
from colotrain.models.loading import build_whole
from colotrain.models.outputs import TargetRule
from colotrain.planner.traced.survey import study_loss
from colotrain.runs.resolving import plan_from
from colotrain.spec.plan import DataPlan, ModelPlan, RunPlan
from colotrain.spec.survey import LossStudy
from colotrain.verify.compare import Tolerance, compare
from colotrain.verify.reference import run_reference

Loss = Callable[..., Any]


class Model(nn.Module):
    """A layer, and a loss of its outputs that a test gives."""

    def __init__(self, loss: Loss, *, vocab: int = 3) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer, self.norm, self.loss = nn.Linear(4, vocab), nn.BatchNorm1d(vocab), loss

    def forward(self, x: Tensor, **batch: Tensor) -> Any:
        return self.loss(self.norm(self.layer(x)), **batch)


class Tokens(nn.Module):
    """Logits of tokens that see nothing else, and a loss of them that a test gives."""

    def __init__(self, loss: Loss, *, zeros: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.head, self.loss = nn.Embedding(9, 8), nn.Linear(8, 9), loss
        if zeros:
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)

    def forward(self, input_ids: Tensor, **batch: Tensor) -> Any:
        return self.loss(self.head(self.embed(input_ids)), **batch)


def found(loss: Loss, **batch: Tensor) -> Findings:
    model = Model(loss)
    torch.manual_seed(3)
    result = examine(model, {"x": torch.randn(2, 4), **batch})
    assert model.training
    assert not model.norm.num_batches_tracked
    return result


def square(rows: Tensor) -> Tensor:
    return rows.square().sum(-1)


def contrastive(rows: Tensor) -> Tensor:
    return F.cross_entropy(rows @ rows.mT, torch.arange(len(rows)))


@pytest.mark.parametrize(
    ("loss", "line"),
    [
        (lambda rows: square(rows).sum(), "twice the mean"),
        (contrastive, "no mean over samples"),
        (lambda rows: square(rows).mean(), ""),
        (lambda rows: (square(rows).sum(), torch.tensor(len(rows))), ""),
        (lambda rows: (square(rows).mean(), torch.tensor(len(rows))), "sums that two samples"),
        (lambda rows: square(rows).mean() * torch.rand(()), ""),
        (lambda rows: square(rows).mean() / (1 if len(rows) > 1 else 0 // 0), ""),
    ],
    ids=["sum", "contrastive", "mean", "pair", "mean beside a count", "random", "fails"],
)
def test_a_loss_that_is_no_mean_of_its_samples_is_told(loss: Loss, line: str) -> None:
    told = found(loss).against
    assert told == line if not line else line in told


def test_a_loss_without_labels_shifts_none() -> None:
    assert not check(
        Tokens(lambda logits, labels: logits.square().mean()), unequal_rows(-100)
    ).shifted


def test_weights_are_told_unless_their_sum_is_returned() -> None:
    weights = torch.tensor([1.0, 7.0])

    def mean(rows: Tensor, w: Tensor) -> Tensor:
        return (w * square(rows)).sum() / w.sum()

    def pair(rows: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return (w * square(rows)).sum(), w.sum()

    assert "sum of weights" in found(mean, w=weights).against
    assert found(pair, w=weights).against == ""


def test_weights_of_classes_are_told_even_where_two_samples_have_the_same() -> None:
    def loss(rows: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(rows, labels, weight=torch.tensor([1.0, 2.0, 3.0]))

    assert "sum of weights" in found(loss, labels=torch.tensor([1, 1])).against


def test_a_loss_that_only_training_has_is_looked_at() -> None:
    class InTraining(Model):
        def forward(self, x: Tensor, **batch: Tensor) -> Any:
            return super().forward(x, **batch) if self.training else {"logits": self.layer(x)}

    model = InTraining(lambda rows: square(rows).sum())
    assert "twice" in examine(model, {"x": torch.randn(2, 4)}).against
    assert model.training
    assert model.norm.training


def shifted(logits: Tensor, labels: Tensor, ignored: int) -> Tensor:
    return F.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=ignored
    )


def gathered(logits: Tensor, labels: Tensor, ignored: int) -> Tensor:
    """A loss of somebody's own, without torch's cross-entropy."""
    counts = labels != ignored
    picked = logits.log_softmax(-1).gather(-1, labels.where(counts, 0)[..., None])[..., 0]
    return -(picked * counts).sum() / counts.sum()


def by_row(logits: Tensor, labels: Tensor) -> Tensor:
    """A mean of rows' means: each sample has the same weight."""
    each = F.cross_entropy(logits.mT, labels, reduction="none", ignore_index=-100)
    counts = (labels != -100).sum(1)
    return (each.sum(1) / counts).mean()


def unequal_rows(ignored: int, *, also_first: bool = False) -> Tensor:
    labels = torch.randint(1, 9, (3, 12), generator=torch.Generator().manual_seed(5))
    labels[0, 2:] = labels[1, 9:] = ignored
    if also_first:
        labels[:, 0] = ignored
    return labels


@pytest.mark.parametrize("ignored", [-1, 0, 255, -100])
@pytest.mark.parametrize("zeros", [False, True], ids=["", "zero head"])
@pytest.mark.parametrize("is_shifted", [False, True], ids=["as they are", "shifted"])
@pytest.mark.parametrize("also_first", [False, True], ids=["", "first left out"])
def test_labels_that_cross_entropy_leaves_out_do_not_count(
    ignored: int, zeros: bool, is_shifted: bool, also_first: bool
) -> None:
    def plain(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=ignored)

    loss = (lambda logits, labels: shifted(logits, labels, ignored)) if is_shifted else plain
    check(Tokens(loss, zeros=zeros), unequal_rows(ignored, also_first=also_first))


def check(model: nn.Module, labels: Tensor, entry: str = "labels") -> TargetRule:
    """Each way to cut the batch gives the loss of the whole batch in plain torch."""
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randint(0, 9, (len(labels), 12), generator=generator)
    batch = {"input_ids": inputs, entry: labels}
    rule = examine(model, batch)
    assert rule.against == ""
    facts_of(model).rule = rule.rule
    for cuts in ([1] * len(labels), [2, len(labels) - 2]):
        rows = {name: tensor.split(cuts) for name, tensor in batch.items()}
        parts = [dict(zip(rows, part, strict=True)) for part in zip(*rows.values(), strict=True)]
        losses = [weighted_loss(model, part) for part in parts]
        total = sum(loss for loss, _ in losses) / sum(count for _, count in losses)
        torch.testing.assert_close(total, model(**batch))
    return rule.rule


@pytest.mark.parametrize("ignored", [-1, 0, 255, -100])
def test_labels_that_another_loss_leaves_out_do_not_count(ignored: int) -> None:
    model = Tokens(lambda logits, labels: gathered(logits, labels, ignored))
    rule = check(model, unequal_rows(ignored))
    assert rule == TargetRule(ignored=ignored)


@pytest.mark.parametrize("ignored", [-1, -100])
def test_targets_of_another_name_count(ignored: int) -> None:
    def loss(logits: Tensor, targets: Tensor) -> tuple[None, Tensor] | Any:
        flat = logits.flatten(0, 1), targets.flatten()
        return {"loss": F.cross_entropy(*flat, ignore_index=ignored), "logits": logits}

    rule = check(Outputs(loss), unequal_rows(ignored), "targets")
    assert rule == TargetRule(entry="targets", ignored=ignored)


class Outputs(Tokens):
    """Its forward gives a dict, and called in a test the loss."""

    def forward(self, input_ids: Tensor, **batch: Tensor) -> Any:
        return super().forward(input_ids, **batch)["loss"]


def test_samples_count_alike_where_their_own_means_are_averaged() -> None:
    assert check(Tokens(by_row), unequal_rows(-100)).by_sample


def test_several_classes_of_a_sample_are_no_sequence() -> None:
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        wanted = F.one_hot(labels, 9).sum(1).clamp(max=1).double()
        return F.binary_cross_entropy_with_logits(logits.mean(1).double(), wanted)

    assert not check(Tokens(loss), torch.randint(0, 9, (3, 5))).shifted


def test_floating_labels_count_whatever_their_values_are() -> None:
    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return F.mse_loss(logits.mean(-1), labels)

    labels = torch.randn(3, 12)
    labels[0, 3:] = -100.0
    assert TargetRule().count({"labels": labels}) == 36
    check(Tokens(loss), labels)


@pytest.mark.parametrize("masks", [False, True])
def test_labels_equal_to_inputs_are_found_unless_the_model_shifts_them(masks: bool) -> None:
    def plain(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def pair(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        count = (labels[:, 1:] != -100).sum()
        return shifted(logits, labels, -100) * count, count

    tokens = torch.randint(0, 9, (3, 12))
    batch = {"input_ids": tokens, "labels": tokens.clone()}
    if masks:
        batch["labels"][:, :4] = -100
    assert examine(Tokens(plain), batch).copies
    assert not examine(Tokens(lambda x, labels: shifted(x, labels, -100)), batch).copies
    assert not examine(Tokens(pair), batch).copies
    batch["labels"] = tokens.roll(-1, 1)
    assert not examine(Tokens(plain), batch).copies


def test_a_model_that_keeps_a_state_of_a_batch_is_left_as_it_was() -> None:
    class Recurrent(Model):
        def forward(self, x: Tensor, **batch: Tensor) -> Any:
            self.state = x + self.state  # of another size than a batch of one sample
            return super().forward(x, **batch)

    model = Recurrent(lambda rows: square(rows).mean())
    model.state = state = torch.zeros(2, 4)
    assert examine(model, {"x": torch.randn(2, 4)}).against == ""
    assert model.state is state
    model.state = torch.zeros(3, 4)
    assert examine(model, {"x": torch.randn(2, 4)}).against == ""


def test_a_model_that_takes_one_number_of_samples_is_not_compared() -> None:
    def mean(rows: Tensor) -> Tensor:
        if len(rows) != 4:
            raise ValueError("not four samples")
        return square(rows).mean()

    assert examine(Model(mean), {"x": torch.randn(4, 4)}) == Findings()


class Classifier(nn.Module):
    """Its loss is a sum of classes' weights with their count, or their mean."""

    def __init__(self, *, is_weighed: bool) -> None:
        super().__init__()
        self.head, self.is_weighed = nn.Linear(4, 3), is_weighed

    def forward(self, x: Tensor, kind: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        if not self.is_weighed:
            return F.cross_entropy(self.head(x), kind)
        return F.cross_entropy(self.head(x), kind, reduction="sum"), torch.tensor(float(len(x)))


@pytest.mark.parametrize("is_weighed", [False, True])
def test_what_a_loss_is_a_mean_over_is_told_unless_it_comes_with_a_count(is_weighed: bool) -> None:
    batch = {"x": torch.randn(6, 4), "kind": torch.tensor([0, 1, 2, 0, 1, 2])}
    told = list(notes_of(examine(Classifier(is_weighed=is_weighed), batch)))
    assert told == ([] if is_weighed else ["the loss is a mean over kind that are not -100"])


class Ragged:
    """Samples of several shapes, of which a micro-batch has one."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": torch.randn(2 + index, 4)}


def mean_of_squares() -> nn.Module:
    return Model(lambda rows: square(rows.flatten(0, 1)).mean())


def test_samples_of_several_shapes_can_be_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "loss_trials", sys.modules[__name__])
    data = DataPlan(
        source="target",
        target="loss_trials:Ragged",
        seq_len=8,
        tokenizer="bytes",
        shuffle=True,
        validation_fraction=0.0,
    )
    study = study_loss(ModelPlan(target="loss_trials:mean_of_squares"), data, 0)
    assert study == LossStudy()


def test_a_trial_ends_when_its_time_is_up() -> None:
    calls = []

    def mean(rows: Tensor) -> Tensor:
        calls.append(len(rows))
        time.sleep(0.2)
        return square(rows).mean()

    assert examine(Model(mean), {"x": torch.randn(4, 4)}, budget_s=0.1) == Findings()
    assert calls == [2]


def test_a_forward_of_a_trial_has_two_samples_at_most() -> None:
    """A step of micro-batch 1 may be all that there is memory for."""
    calls = []

    def mean(rows: Tensor) -> Tensor:
        calls.append(len(rows))
        return square(rows).mean()

    assert examine(Model(mean), {"x": torch.randn(4, 4)}).against == ""
    assert max(calls) == 2


@pytest.mark.parametrize("kind", ["Bert", "DistilBert"])
def test_answers_outside_the_sequence_are_no_targets(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 20}
    sizes |= {"dim": 8, "n_layers": 1, "n_heads": 2, "hidden_dim": 8, "intermediate_size": 8}
    config = getattr(transformers, f"{kind}Config")(**sizes, initializer_range=0.5)
    theirs = getattr(transformers, f"{kind}ForQuestionAnswering")(config).eval()
    theirs.save_pretrained(tmp_path)
    model = build_whole(ModelPlan(target="", hf=str(tmp_path)), seed=0).eval()
    starts = torch.tensor([1, 99, 4, 0, 7])
    batch = {"input_ids": torch.randint(0, 20, (5, 8)), "start_positions": starts}
    batch["end_positions"] = torch.tensor([3, 99, 5, 0, 7])
    wanted = theirs(**batch).loss
    parts = [weighted_loss(model, {n: t[i : i + 1] for n, t in batch.items()}) for i in range(5)]
    assert [count.item() for _, count in parts] == [2, 0, 2, 2, 2]
    torch.testing.assert_close(sum(loss for loss, _ in parts) / 8, wanted)
    batch["end_positions"][0] = 99  # both ends of an answer count by themselves
    whole, count = weighted_loss(model, batch)
    parts = [weighted_loss(model, {n: t[i : i + 1] for n, t in batch.items()}) for i in range(5)]
    torch.testing.assert_close(whole, sum(loss for loss, _ in parts))
    assert count == 7


OWN = ("data.target=tests.dist.idioms:copied", "train.micro_batch=2", "train.global_batch=8")


def planned(model: str, *more: str) -> RunPlan:
    words = [f"model.target=tests.dist.idioms:{model}", *OWN, "train.max_steps=1", *more]
    return plan_from(words)


def test_a_plan_refuses_labels_that_teach_to_copy() -> None:
    with pytest.raises(ConfigError, match="it would learn to copy its input"):
        planned("HalfLoss")
    assert any("without each row's first" in text for text in planned("Shifts").warnings)


def test_a_plan_and_a_verification_say_what_a_loss_should_return() -> None:
    plan = planned("Summed", "data.target=tests.dist.idioms:tokens", "plugin=zero2")
    assert any("this loss is no mean over samples" in text for text in plan.warnings)
    assert any("(norm) sees the samples of one micro-batch" in text for text in plan.warnings)
    wanted = run_reference(plan, steps=1)
    found = replace(wanted, losses=[wanted.losses[0] + 1.0])
    difference = compare(plan, replace(wanted, mixes=""), found, Tolerance()).difference
    assert (difference or "").startswith("this loss is no mean over samples")
    difference = compare(plan, wanted, found, Tolerance()).difference
    assert (difference or "").startswith("norm makes the samples of a micro-batch depend")


def test_a_norm_of_one_value_per_channel_is_named() -> None:
    batch = {"x": torch.randn(1, 4)}
    with pytest.raises(ColotrainError, match=r"norm \(BatchNorm1d\) has one value per channel"):
        weighted_loss(Model(lambda rows: square(rows).mean()), batch)
