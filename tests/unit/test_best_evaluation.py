"""Which evaluation is the best so far."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

from colotrain.engine.evaluation import _is_best


def run(metric: str, mode: str = "min") -> Any:
    notes: list[str] = []
    return SimpleNamespace(
        plan=SimpleNamespace(checkpoint=SimpleNamespace(best_metric=metric, best_mode=mode)),
        step=1,
        rank=0,
        best=None,
        notes=notes,
        events=SimpleNamespace(write=lambda note: notes.append(note.text)),
    )


def test_the_validation_loss_is_the_runs_whatever_the_model_calls_its_metrics() -> None:
    one = run("validation_loss")
    assert _is_best(one, 2.0, {"validation_loss": 0.0})
    assert one.best == (1, 2.0)
    assert _is_best(one, 1.0, {"validation_loss": 3.0})


def test_a_metric_that_is_not_finite_is_said_and_never_the_best() -> None:
    one = run("accuracy", "max")
    assert not _is_best(one, 2.0, {"accuracy": math.nan})
    assert one.notes == [
        "checkpoint.best.metric=accuracy is nan: this evaluation is never the best"
    ]
    assert _is_best(one, 2.0, {"accuracy": 0.1})
    assert len(one.notes) == 1
