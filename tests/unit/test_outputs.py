"""What a model returns, as losses, counts and metrics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from colotrain.engine.accumulation import weighted_output
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
