"""RunView: what a run's events say about it, as one immutable picture, and its summary."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

from colotrain.events.gradients import GradientRecord, Heat
from colotrain.events.kinds import Checkpoint, Failure, Nonfinite, StepProgress
from colotrain.events.log import json_safe
from colotrain.records import to_plain
from colotrain.rundir import RunDir
from colotrain.spec.memory import Ledger
from colotrain.spec.plan import RunPlan

ENDED = ("finished", "failed", "preempted", "interrupted")
SMOOTHING_STEPS = 20
Series = tuple[tuple[int, float], ...]
"""(step, value) pairs, by step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """One rank of the latest attempt that has done a step."""

    rank: int
    step: int
    """The last step it has done."""
    t: float
    """When: Unix seconds."""
    rss: int
    """Bytes."""
    peak: int
    """Bytes, of this attempt."""
    busy_s: float
    """Smoothed seconds of a step that it did not wait, as far as it tells; else the whole step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """Immutable snapshot of a run. None, 0 and () mean: not known yet."""

    status: str = "starting"
    """starting, running, or how it ended: finished, failed, preempted, interrupted.

    Whether its processes still live is for `events.liveness.state` to say."""
    cause: str | None = None
    """Why it failed, stopped or is failing, in words."""
    failure: Failure | None = None
    """The rank of the latest attempt that failed first."""
    exit_code: int | None = None
    world_size: int = 0
    attempt: int | None = None
    steps: int = 0
    max_steps: int = 0
    progress: StepProgress | None = None
    """How far the step, or the evaluation, that takes long just now is."""
    optimizer_steps: int = 0
    micro_batches: int = 0
    skipped_steps: int = 0
    loss: Series = ()
    evals: Series = ()
    metrics: dict[str, float] = field(default_factory=dict)
    """What the model returned beside the loss in the last evaluation."""
    grad_norms: Series = ()
    throughput: Series = ()
    """Tokens per second, without the first step of each attempt, which warms up."""
    step_times: Series = ()
    """Seconds, without those first steps."""
    tokens_per_step: float | None = None
    """What the last step counted: tokens, samples, or targets (`unit`)."""
    tokens_per_s: float | None = None
    tokens_per_s_smooth: float | None = None
    """Mean over the last `SMOOTHING_STEPS` steps."""
    step_s: float | None = None
    data_s: float | None = None
    pace_s: float | None = None
    """Mean time from step to step, with what happens in between (validation, checkpoints)."""
    lost_s: float = 0.0
    """Time lost to restarts: what was done over again, and what it took to start."""
    eta_s: float | None = None
    """Restarts included, at the rate they came so far."""
    times: tuple[tuple[str, float], ...] = ()
    """(what, mean seconds per step) over the last `SMOOTHING_STEPS` steps."""
    grad_norm: float | None = None
    clip_ratio: float | None = None
    lr: float | None = None
    peak_by_rank: tuple[int, ...] = ()
    """Bytes, the highest of all attempts."""
    rss_by_rank: tuple[int, ...] = ()
    """Bytes, of the latest attempt that has done a step."""
    tiers: dict[str, dict[str, int]] = field(default_factory=dict)
    """gemini: what of the model (parameters, gradients, optimizer) → tier → bytes per rank."""
    ledgers: dict[int, Ledger] = field(default_factory=dict)
    """Rank → what it held at its peak; activations with all else that is there within a step."""
    ranks: tuple[RankView, ...] = ()
    gradients: GradientRecord | None = None
    """The newest record."""
    heat: Heat = field(default_factory=Heat)
    nonfinite: Nonfinite | None = None
    """Where the latest attempt first met a number that is not finite."""
    restarts: int = 0
    restart_causes: tuple[str, ...] = ()
    resumed: tuple[int, ...] = ()
    """The steps that attempts resumed from."""
    checkpoint: Checkpoint | None = None
    saving: tuple[int, float] | None = None
    """(step, since when) of the checkpoint that is being written."""
    save_failure: str | None = None
    """What went wrong with the last save, if anything did."""
    launched_at: float | None = None
    first_step_at: float | None = None
    last_event_at: float | None = None
    ended_at: float | None = None
    time_to_first_step_s: float | None = None
    """From the start of the newest command that made a step to the end of its first one."""
    peak_flops_per_s: float | None = None
    peak_flops_what: str = ""


def summary(view: RunView, plan: RunPlan, rundir: RunDir) -> dict[str, Any]:
    """The document `summary.json` of the design; numbers that JSON cannot hold are texts."""
    losses = [loss for _, loss in view.loss]
    tokens_per_s, step_s = overall_tokens_per_s(view), typical_step_s(view)
    measured = measured_peak(view, plan)
    of_peak = max(view.ledgers.values(), key=lambda ledger: ledger.total, default=None)
    document = {
        "status": view.status,
        "steps": view.steps,
        "optimizer_steps": view.optimizer_steps,
        "micro_batches": view.micro_batches,
        "loss": {
            "first": losses[0] if losses else None,
            "last": losses[-1] if losses else None,
            "history": [list(pair) for pair in view.loss],
        },
        "validation_loss": view.evals[-1][1] if view.evals else None,
        **({"metrics": view.metrics} if view.metrics else {}),
        "tokens_per_s": tokens_per_s,
        "unit": unit(view, plan),
        "mfu": mfu(view, plan, tokens_per_s),
        "memory": {
            "peak_by_rank": list(view.peak_by_rank),
            "ledger": to_plain(plan.memory),
            "predicted_peak": plan.memory.total,
            "measured_peak": measured,
            **({"measured": to_plain(of_peak)} if of_peak else {}),
            "error": error(plan.memory.total, measured),
            **({"tiers": view.tiers} if view.tiers else {}),
        },
        "time": {
            "step_s": step_s,
            "predicted_step_s": plan.time.step_s,
            "error": error(plan.time.step_s, step_s),
        },
        "restarts": view.restarts,
        "plugin": plan.plugin.name,
        "time_to_first_step_s": view.time_to_first_step_s,
        "run_dir": str(rundir.path),
    }
    safe: dict[str, Any] = json_safe(document)
    return safe


def measured_peak(view: RunView, plan: RunPlan) -> int:
    """Of the rank that peaked. What CUDA reports leaves out the context, which the plan has in."""
    highest = max(view.peak_by_rank, default=0)
    return highest + plan.memory.baseline if plan.cluster.device == "cuda" and highest else highest


def error(predicted: float, measured: float) -> float | None:
    """How much more was predicted than measured, as a share of that; None where either lacks."""
    return predicted / measured - 1 if predicted and measured else None


def unit(view: RunView, plan: RunPlan) -> str:
    """What speeds and losses are of: tokens, samples, or targets of the user's own counting."""
    if plan.data.source != "target":
        return "tokens"
    return "samples" if view.tokens_per_step in (None, plan.batch.global_batch) else "targets"


def overall_tokens_per_s(view: RunView) -> float:
    """The median step's speed, without the steps that warm up; 0.0 where there is none."""
    steady = [value for _, value in view.throughput]
    return statistics.median(steady) if steady else view.tokens_per_s or 0.0


def typical_step_s(view: RunView) -> float:
    """The median step's seconds by its own clock; 0.0 where there is none.

    A dataset of the user's own may count other tokens than the plan does.
    """
    steady = [seconds for _, seconds in view.step_times]
    return statistics.median(steady) if steady else view.step_s or 0.0


def mfu(view: RunView, plan: RunPlan, tokens_per_s: float) -> float:
    """The share of the measured peak of all ranks that `tokens_per_s` uses; 0.0 without a peak."""
    ideal = (view.world_size or plan.world_size) * (view.peak_flops_per_s or 0.0)
    return plan.flops_per_token * tokens_per_s / ideal if ideal else 0.0
