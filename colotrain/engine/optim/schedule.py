"""The learning rate over a run, as factors of its peak."""

from __future__ import annotations

import functools
import math
from typing import Any

from colotrain.dotted import import_target
from colotrain.errors import ColotrainError
from colotrain.spec.plan import OptimPlan


def own_factor(dotted: str, step: int, max_steps: int) -> float:
    """Return what a schedule of the user's own says of a step; `ColotrainError` if not finite."""
    factor = float(_imported(dotted)(step, max_steps))
    if not math.isfinite(factor) or factor < 0:
        raise ColotrainError(
            f"optim.schedule.name={dotted}: of step {step} it returned {factor:g}",
            "return a factor of 0 or more",
        )
    return factor


@functools.cache
def _imported(dotted: str) -> Any:
    return import_target("optim.schedule.name", dotted)


def schedule(plan: OptimPlan, step: int, max_steps: int) -> float:
    """Return the fraction of the peak learning rate in `step`, from 0: warm-up, then the shape.

    cosine: SGDR's half cosine (Loshchilov and Hutter 2017), down to `final_ratio`. wsd: constant,
    then a straight line down over the last `decay_steps` (Hu et al. 2024).
    """
    if ":" in plan.schedule:
        return own_factor(plan.schedule, step, max_steps)
    if step < plan.warmup_steps:
        return (step + 1) / plan.warmup_steps
    if plan.schedule == "constant":
        return 1.0
    span = max(max_steps - 1 - plan.warmup_steps, 1)
    progress = min((step - plan.warmup_steps) / span, 1.0)
    if plan.schedule == "wsd":
        decay = min(plan.decay_steps or max(max_steps // 5, 1), max_steps)
        progress = min(max(step - (max_steps - 1 - decay), 0) / decay, 1.0)
    if plan.schedule in ("linear", "wsd"):
        return 1.0 - (1.0 - plan.final_ratio) * progress
    return plan.final_ratio + (1.0 - plan.final_ratio) * 0.5 * (1 + math.cos(math.pi * progress))
