"""The learning rate over a run, as factors of its peak."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

from colotrain.dotted import import_target
from colotrain.errors import UsageError
from colotrain.records import from_plain
from colotrain.spec.plan import OptimPlan, RunPlan


def own_factor(dotted: str, step: int, max_steps: int) -> float:
    """Return what a schedule of the user's own says of a step; `ColotrainError` if not finite."""
    factor = float(_imported(dotted)(step, max_steps))
    if not math.isfinite(factor) or factor < 0:
        raise UsageError(
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
        decay = plan.num_decay_steps(max_steps)
        progress = min(max(step - (max_steps - 1 - decay), 0) / decay, 1.0)
    if plan.schedule in ("linear", "wsd"):
        return 1.0 - (1.0 - plan.final_ratio) * progress
    return plan.final_ratio + (1.0 - plan.final_ratio) * 0.5 * (1 + math.cos(math.pi * progress))


def rate_warning(plan: RunPlan, then: Mapping[str, Any], step: int) -> str | None:
    """Tell where the plan that made a checkpoint had another schedule; None if the rate goes on.

    `then` is that plan as plain data, `step` the number of updates made with it. Both schedules are
    asked for the last of these, which both have. A peak that alone is another is what was asked.
    """
    if step == 0 or "optim" not in then:
        return None
    optim, max_steps = from_plain(OptimPlan, then["optim"]), then["train"]["max_steps"]
    old = schedule(optim, step - 1, max_steps)
    new = schedule(plan.optim, step - 1, plan.train.max_steps)
    following = schedule(plan.optim, step, plan.train.max_steps)
    if math.isclose(old, new, rel_tol=1e-6) or math.isclose(old, following, rel_tol=1e-6):
        return None
    changed = {
        "optim.lr": (optim.lr, plan.optim.lr),
        "train.max_steps": (max_steps, plan.train.max_steps),
        "optim.schedule.name": (optim.schedule, plan.optim.schedule),
        "optim.schedule.min_lr_ratio": (optim.final_ratio, plan.optim.final_ratio),
        "optim.schedule.warmup_steps": (optim.warmup_steps, plan.optim.warmup_steps),
        "optim.schedule.decay_steps": (optim.decay_steps, plan.optim.decay_steps),
    }
    settings = ", ".join(f"{key}={a}" for key, (a, b) in changed.items() if a != b)
    return (
        f"was made with {settings}: the last learning rate was {old * optim.lr:.3g}, and the next "
        f"is {following * plan.optim.lr:.3g}"
    )
