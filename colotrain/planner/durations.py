"""Warnings of a plan about steps and evaluations that take minutes or hours."""

from __future__ import annotations

import math
from collections.abc import Iterator

from colotrain.spec.plan import BatchPlan, Prediction, TrainPlan
from colotrain.spec.quantities import format_seconds

LONG_STEP_S = 60.0
"""Seconds from which on a step gets a warning."""
LONG_EVALUATION_S = 300.0
"""Seconds from which on an evaluation gets a warning, and is skipped before the first step."""
FORWARD_SHARE = 1 / 3
"""Forward's share of a step's computation: backward takes twice as long as forward."""


def evaluation_s(train: TrainPlan, batch: BatchPlan, time: Prediction) -> float:
    """Predicted seconds of an evaluation; 0.0 where nothing is known."""
    num, steps = train.num_validation, train.eval_steps
    asked = math.inf if steps == "all" else float(steps)
    if num is not None:
        micro_batches = math.ceil(num / (batch.data_parallel * batch.micro_batch))
        asked = min(asked, micro_batches / batch.accumulation_steps)
    return asked * time.step_s * FORWARD_SHARE if asked < math.inf else 0.0


def evaluates_first(train: TrainPlan, batch: BatchPlan, time: Prediction) -> bool:
    """Whether to evaluate before the first step, which is skipped where it would take long.

    For all samples it never is: their number may be known to one of two equal commands only.
    """
    return train.eval_steps == "all" or evaluation_s(train, batch, time) < LONG_EVALUATION_S


def warn_of_durations(train: TrainPlan, batch: BatchPlan, time: Prediction) -> Iterator[str]:
    """Warnings about long steps and evaluations, with settings that shorten them."""
    if time.step_s >= LONG_STEP_S:
        yield f"a step is predicted to take {format_seconds(time.step_s)}{_shorter(batch, time)}"
    whole_s = evaluation_s(train, batch, time)
    if whole_s >= LONG_EVALUATION_S:
        first = evaluates_first(train, batch, time)
        left_out = "" if first else ", and is left out before the first step"
        yield (
            f"train.eval_steps={train.eval_steps}: an evaluation is predicted to take "
            f"{format_seconds(whole_s)}{left_out}; "
            f"train.eval_steps=1 makes it {format_seconds(time.step_s * FORWARD_SHARE)}, 0 turns "
            "evaluations off"
        )


def _shorter(batch: BatchPlan, time: Prediction) -> str:
    """Hint with the fewest samples per step, and the seconds such a step takes."""
    steps, micro = batch.accumulation_steps, batch.micro_batch
    still = "shorter samples (data.seq_len), a smaller model or more ranks shorten it"
    if steps == 1 and micro == 1:
        return f"; {still}"
    micro_batch_s = time.step_s / steps
    what = f" ({steps} micro-batches of {format_seconds(micro_batch_s)})" if steps > 1 else ""
    least = f"train.global_batch={batch.data_parallel} train.micro_batch=1"
    return f"{what}; {least} makes it {format_seconds(micro_batch_s / micro)}, and {still} further"
