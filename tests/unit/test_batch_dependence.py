"""A loss that depends on how a batch is divided is told before the first step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from colotrain.engine.batch_dependence import _against, _losses


class Model(nn.Module):
    """A layer, and a loss of its outputs that a test gives."""

    def __init__(self, loss: Callable[..., Tensor | tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.layer, self.norm, self.loss = nn.Linear(4, 3), nn.BatchNorm1d(3), loss

    def forward(self, x: Tensor, **batch: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        return self.loss(self.norm(self.layer(x)), **batch)


def told(loss: Callable[..., Tensor | tuple[Tensor, Tensor]], **batch: Tensor) -> str | None:
    model = Model(loss)
    losses = _losses(model, {"x": torch.randn(2, 4), **batch})
    assert model.training
    assert not model.norm.num_batches_tracked
    return None if losses is None else _against(*losses, tolerance=1e-3)


def square(rows: Tensor) -> Tensor:
    return rows.square().sum(-1)


def contrastive(rows: Tensor) -> Tensor:
    return functional.cross_entropy(rows @ rows.mT, torch.arange(len(rows)))


def per_token(rows: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(rows[:, None].expand(-1, 4, -1).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize(
    ("loss", "line"),
    [
        (lambda rows: square(rows).sum(), "twice the mean"),
        (contrastive, "on average by themselves"),
        (lambda rows: square(rows).mean(), ""),
        (lambda rows: (square(rows).sum(), torch.tensor(len(rows))), ""),
        (lambda rows: square(rows).mean() * torch.rand(()), None),
        (lambda rows: square(rows).mean() / (1 if len(rows) > 1 else 0 // 0), None),
    ],
    ids=["sum", "contrastive", "mean", "pair", "random", "fails"],
)
def test_a_loss_that_is_no_mean_of_its_samples_is_told(
    loss: Callable[..., Tensor], line: str | None
) -> None:
    found = told(loss)
    assert found == line if not line else line in str(found)


def test_weights_are_told_unless_their_sum_is_returned() -> None:
    weights = torch.tensor([1.0, 7.0])

    def mean(rows: Tensor, w: Tensor) -> Tensor:
        return (w * square(rows)).sum() / w.sum()

    def pair(rows: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return (w * square(rows)).sum(), w.sum()

    assert "sum of weights" in str(told(mean, w=weights))
    assert told(pair, w=weights) == ""


def test_labels_count_as_targets_and_others_do_not() -> None:
    labels = torch.tensor([[0, -100, -100, -100], [1, 2, 0, 1]])
    assert told(per_token, labels=labels) == ""
    assert "targets that are not in labels" in str(
        told(lambda rows, answers: per_token(rows, answers), answers=labels)
    )
    assert told(per_token, labels=torch.full((2, 4), -100)) is None


def test_a_model_that_keeps_a_state_of_a_batch_is_left_as_it_was() -> None:
    class Recurrent(Model):
        def forward(self, x: Tensor, **batch: Tensor) -> Tensor | tuple[Tensor, Tensor]:
            self.state = x + self.state  # of another size than a batch of one sample
            return super().forward(x, **batch)

    model = Recurrent(lambda rows: square(rows).mean())
    model.state = state = torch.zeros(2, 4)
    assert _losses(model, {"x": torch.randn(2, 4)}) is not None
    assert model.state is state
    model.state = torch.zeros(3, 4)
    assert _losses(model, {"x": torch.randn(2, 4)}) is None
