"""Ending a run whose evaluations no longer improve: `train.stop_early`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from colotrain.engine.run_state import Run
from colotrain.errors import ColotrainError
from colotrain.spec.batch import is_due


def note_evaluation(run: Run, found: Mapping[str, float]) -> None:
    """Count the evaluations since the last one that improved, from values that all ranks have.

    Neither the evaluation before the first step counts nor one that only the end of the run asked
    for: a run that goes on longer would otherwise end at another step than one that was not ended.
    """
    rule, before = run.plan.train.stop_early, run.history.evaluations
    run.history.evaluations = replace(before, last_step=run.step)
    if rule is None:
        return
    if rule.metric not in found:
        raise ColotrainError(
            f"train.stop_early.metric={rule.metric}: the evaluation has no such value",
            f"name one of {', '.join(found)}",
        )
    if run.step == 0 or not is_due(run.step, run.plan.train.eval_every):
        return
    value, sign = found[rule.metric], 1.0 if rule.mode == "max" else -1.0
    gain = math.inf if before.best is None else sign * (value - before.best)
    if math.isfinite(value) and gain > rule.min_delta:
        step = run.step
        run.history.evaluations = replace(
            run.history.evaluations, improved_step=step, best=value, waited=0
        )
    else:
        run.history.evaluations = replace(run.history.evaluations, waited=before.waited + 1)


def is_over(run: Run) -> bool:
    """Whether the run has made its last step."""
    return run.step >= run.plan.train.max_steps or why_over(run) is not None


def why_over(run: Run) -> str | None:
    """Return why the run ends before its last step, the same on every rank; None: it goes on."""
    rule, so_far = run.plan.train.stop_early, run.history.evaluations
    if rule is None or so_far.waited < rule.patience:
        return None
    best = ""
    if so_far.best is not None:
        best = f"; the best was {so_far.best:.6g} at step {so_far.improved_step}"
    number = f"{so_far.waited} evaluation{'s' * (so_far.waited > 1)}"
    return f"stopped early: {rule.metric} did not improve in {number}{best}"
