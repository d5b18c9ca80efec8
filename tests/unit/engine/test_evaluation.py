"""Which evaluation is the best so far."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

from colotrain.engine.state.manifest import History
from colotrain.engine.step.evaluation import _is_best, note_evaluation, why_over


def run(metric: str, mode: str = "min") -> Any:
    notes: list[str] = []
    return SimpleNamespace(
        plan=SimpleNamespace(checkpoint=SimpleNamespace(best_metric=metric, best_mode=mode)),
        step=1,
        rank=0,
        history=History(),
        notes=notes,
        events=SimpleNamespace(write=lambda note: notes.append(note.text)),
    )


def test_the_validation_loss_is_the_runs_whatever_the_model_calls_its_metrics() -> None:
    one = run("validation_loss")
    assert _is_best(one, 2.0, {"validation_loss": 0.0})
    assert one.history.best == (1, 2.0)
    assert _is_best(one, 1.0, {"validation_loss": 3.0})


def test_a_metric_that_is_not_finite_is_said_and_never_the_best() -> None:
    one = run("accuracy", "max")
    assert not _is_best(one, 2.0, {"accuracy": math.nan})
    assert one.notes == [
        "checkpoint.best.metric=accuracy is nan: this evaluation is never the best"
    ]
    assert _is_best(one, 2.0, {"accuracy": 0.1})
    assert len(one.notes) == 1


def test_an_evaluation_that_only_the_end_asked_for_does_not_count_for_an_early_end() -> None:
    """So a run that is ended at step 5 and goes on ends as one that was not ended."""
    rule = SimpleNamespace(metric="accuracy", mode="max", patience=2, min_delta=0.0)
    one: Any = SimpleNamespace(
        plan=SimpleNamespace(train=SimpleNamespace(stop_early=rule, eval_every=2)),
        history=History(),
    )
    for one.step in (0, 2, 4, 5):
        note_evaluation(one, {"accuracy": 0.5})
    assert one.history.evaluations.waited == 1
    assert one.history.evaluations.last_step == 5
    assert why_over(one) is None
    one.step = 6
    note_evaluation(one, {"accuracy": 0.5})
    assert str(why_over(one)).endswith("in 2 evaluations; the best was 0.5 at step 2")
