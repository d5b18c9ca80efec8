"""What counts as a target, and what is cast: told by a few forwards, or by the model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colotrain.engine.gradients import gradients
from colotrain.engine.gradients.accumulation import weighted_loss
from colotrain.engine.model.precision import cast_inputs
from colotrain.engine.state.manifest import History
from colotrain.engine.step.batches import Batches
from colotrain.engine.step.loss_trial import examine
from colotrain.errors import ColotrainError
from colotrain.models.facts import facts_of
from colotrain.models.outputs import TargetRule
from colotrain.planner.traced.tracing import loss_of
from colotrain.spec.phases import Phase
from tests.dist.idioms import HalfLoss, NeverZero, Shifts, tokens


class Uniform(HalfLoss):
    """All losses are equal at first, as with a head of zeros."""

    def __init__(self, shifts: bool) -> None:
        super().__init__()
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.shifts = shifts

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        return (Shifts if self.shifts else HalfLoss).forward(self, input_ids, labels)  # type: ignore[arg-type]


class Guarded(Shifts):
    """The loss of no targets is zero, and another one is added."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        loss = super().forward(input_ids, labels)
        self.counted = getattr(self, "counted", 0) + 1
        return loss.nan_to_num(0.0) + self.head.weight.square().mean()


def batch(rows: int = 2) -> dict[str, Tensor]:
    samples = tokens(rows)
    return {key: torch.stack([sample[key] for sample in samples]) for key in samples[0]}


@pytest.mark.parametrize(
    ("model", "shifts"),
    [
        (HalfLoss(), False),
        (Shifts(), True),
        (NeverZero(), False),
        (Uniform(False), False),
        (Uniform(True), True),
        (Guarded(), True),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_shifts_labels_is_told(
    model: nn.Module, shifts: bool, dtype: torch.dtype
) -> None:
    drawn = torch.get_rng_state()
    assert examine(model.to(dtype), batch()).rule == TargetRule(shifted=shifts)
    assert model.training
    assert torch.equal(torch.get_rng_state(), drawn)


def test_a_label_whose_change_half_precision_rounds_away_is_not_taken_for_shifted() -> None:
    """One of a row's labels changes the mean by less than a step of bfloat16, now and then."""
    for seed in range(40):
        torch.manual_seed(seed)
        assert not examine(NeverZero().to(torch.bfloat16), batch()).rule.shifted, seed


def test_the_first_label_of_a_row_has_no_weight_where_labels_are_shifted() -> None:
    model = Shifts()
    facts_of(model).rule = TargetRule(shifted=True)
    whole = batch()
    whole["labels"][0, 5:] = -100
    loss, count = weighted_loss(model, whole)
    assert count.item() == 4 + 63
    parts = [weighted_loss(model, {n: t[i : i + 1] for n, t in whole.items()}) for i in (0, 1)]
    torch.testing.assert_close(loss, parts[0][0] + parts[1][0])


def test_a_model_may_say_its_count() -> None:
    def model(**batch: Tensor) -> Any:
        return SimpleNamespace(loss=torch.tensor(2.0), num_targets=7)

    loss, count = weighted_loss(model, batch())  # type: ignore[arg-type]
    assert (loss.item(), count.item()) == (14.0, 7.0)


def test_a_dict_may_have_the_sum_and_count_as_its_loss() -> None:
    class Sums(HalfLoss):
        def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
            loss = super().forward(input_ids, labels)
            return {"loss": (loss * 5, 5), "accuracy": torch.tensor(0.5)}

    model, whole = Sums(), batch()
    loss, count = weighted_loss(model, whole)
    torch.testing.assert_close(loss, HalfLoss.forward(model, **whole) * 5)
    assert count.item() == 5
    assert loss_of(model(**whole)).shape == ()
    assert not examine(model, whole).rule.shifted


def test_a_dict_without_a_loss_is_described() -> None:
    def model(**batch: Tensor) -> Any:
        return {"cost": torch.tensor(2.0), "accuracy": torch.tensor(0.5)}

    with pytest.raises(
        ColotrainError, match=r"returned a dict with cost, accuracy; .* as `loss` of a dict"
    ):
        weighted_loss(model, batch())  # type: ignore[arg-type]


@pytest.mark.parametrize("model", [NeverZero(), Shifts()])
def test_a_micro_batch_without_targets_adds_nothing(model: nn.Module) -> None:
    nothing = batch()
    nothing["labels"].fill_(-100)
    loss, count = weighted_loss(model, nothing)
    loss.backward()
    assert (loss.item(), count.item()) == (0.0, 0.0)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_losses_are_summed_in_float32(dtype: torch.dtype) -> None:
    def model(**batch: Tensor) -> Tensor:
        return torch.tensor(4.368, dtype=dtype)

    many = {"labels": torch.zeros(4, 2**14, dtype=torch.long)}
    loss, _ = weighted_loss(model, many)  # type: ignore[arg-type]
    assert loss.dtype == torch.float32
    assert loss.item() == torch.tensor(4.368, dtype=dtype).item() * 2**16
    assert TargetRule().per_sample(many) == 2**14


def test_what_half_precision_cannot_hold_is_told() -> None:
    ids = {"x": torch.tensor([0.5, 100100.0]), "labels": torch.tensor([100100.0])}
    note, problem = cast_inputs(ids, torch.bfloat16)
    assert note.startswith("casts x to bfloat16")
    assert "x: 100100 becomes 100352" in note
    assert problem is None
    assert cast_inputs(ids, torch.float16)[1] is not None
    assert cast_inputs(ids, None) == ("", None)


def test_a_second_pass_over_a_step_leaves_buffers_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gradients, "clear_", lambda model: None)
    monkeypatch.setattr(gradients, "drop_unused_", lambda state: None)
    norm = nn.BatchNorm1d(3)
    run: Any = SimpleNamespace(
        tiers=None,
        phase=Phase.DATA,
        history=History(micro_batches=4),
        targets=SimpleNamespace(nominal=1.0),
        loss_scale=SimpleNamespace(scale=1.0),
        step=0,
        at=lambda phase: None,
        device=torch.device("cpu"),
        sharded=SimpleNamespace(module=norm),
        gradients=None,
    )
    before = {name: buffer.clone() for name, buffer in norm.named_buffers()}
    with Batches(run).again(phase=Phase.NOISE):
        assert torch.is_grad_enabled()
        norm(torch.randn(5, 3))
    assert all(torch.equal(buffer, before[name]) for name, buffer in norm.named_buffers())


class Pair(nn.Module):
    """Returns its loss with something else."""

    def __init__(self, second: Any) -> None:
        super().__init__()
        self.weight, self.second = nn.Parameter(torch.ones(1)), second

    def forward(self, x: Tensor) -> Any:
        loss = (x * self.weight).square().mean()
        return loss, self.weight * -0.5 if self.second is None else self.second


def test_a_prediction_is_no_count() -> None:
    batch = {"x": torch.ones(1, 1)}
    for second in (None, torch.tensor(-146.0), torch.tensor(float("nan"))):
        with pytest.raises(
            ColotrainError, match=r"return the mean loss as a scalar, \(loss_sum, count"
        ):
            weighted_loss(Pair(second), batch)
    for second in (3, torch.tensor(3), torch.tensor([2.5]), torch.tensor(0)):
        assert weighted_loss(Pair(second), batch)[1] == torch.as_tensor(second)
