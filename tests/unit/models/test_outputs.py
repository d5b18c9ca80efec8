"""What a model returns, as losses, counts and metrics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from colotrain.engine.gradients.accumulation import StepTotals, weighted_output
from colotrain.errors import ColotrainError
from colotrain.models.outputs import metrics_in


class Tagger(nn.Module):
    """Returns its accuracy as (right, number), over labels that are not masked."""

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Any]:
        valid = labels != -100
        right = ((x.argmax(-1) == labels) & valid).sum()
        loss = nn.functional.cross_entropy(x.flatten(0, 1), labels.flatten())
        return {"loss": loss, "accuracy": (right, valid.sum())}


def test_a_micro_batch_without_targets_has_no_metrics() -> None:
    x, labels = torch.randn(2, 3, 5), torch.randint(0, 5, (2, 3))
    for given, expected in ((labels, 6.0), (torch.full_like(labels, -100), 0.0)):
        loss, count, output = weighted_output(Tagger(), {"x": x, "labels": given})
        assert count.item() == expected
        assert sum(number.item() for _, _, number in metrics_in(output, count)) == expected
    assert loss.item() == 0.0


def test_what_a_model_predicts_for_one_sample_is_no_metric() -> None:
    output = {"loss": torch.ones(()), "logits": torch.ones(1, 1), "accuracy": torch.ones(())}
    assert [name for name, *_ in metrics_in(output, torch.ones(()))] == ["accuracy"]


class Returns(nn.Module):
    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self, x: Tensor) -> Any:
        return self.output


@pytest.mark.parametrize(
    "wrap", [lambda loss: loss, lambda loss: (loss, 3), lambda loss: {"loss": loss}]
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.bool])
def test_a_loss_without_a_gradient_is_refused_by_its_dtype(wrap: Any, dtype: torch.dtype) -> None:
    named = str(dtype).removeprefix("torch.")
    with pytest.raises(ColotrainError, match=f"forward returned a loss of dtype {named}, which"):
        weighted_output(Returns(wrap(torch.ones((), dtype=dtype))), {"x": torch.ones(2)})


class Force(nn.Module):
    """The slope of an energy, whose forward needs gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()
        (slope,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
        return slope.square().mean()


def test_a_forward_that_needs_gradients_is_told_what_evaluations_do_not_have() -> None:
    weighted_output(Force(), {"x": torch.ones(3, 2)})
    with torch.no_grad(), pytest.raises(ColotrainError, match="runs without them here") as told:
        weighted_output(Force(), {"x": torch.ones(3, 2)})
    assert "torch.enable_grad()" in str(told.value)


@pytest.mark.parametrize(
    ("count", "is_odd"), [(4, False), (4.0, False), (0.75, True), (0.0, True), (12.5, True)]
)
def test_a_second_value_that_may_be_a_metric_is_noticed_where_it_is_asked_for(
    count: float, is_odd: bool
) -> None:
    for asked in (False, True):
        totals = StepTotals(nominal=1.0, asks_odd=asked)
        loss, found, _ = weighted_output(
            Returns((torch.tensor(2.0), torch.tensor(count))), {"x": torch.ones(2)}
        )
        totals.add(loss, found)
        assert bool(totals.odd) == (is_odd and asked)


def test_a_micro_batch_in_which_nothing_counts_is_not_odd() -> None:
    totals = StepTotals(nominal=1.0, asks_odd=True)
    totals.add(torch.zeros(()), torch.zeros(()))
    assert not totals.odd
