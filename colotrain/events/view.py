"""RunView: an immutable snapshot of a run, computed from its events, and its JSON summary."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field, replace
from typing import Any

from colotrain.events.goodput import Goodput
from colotrain.events.gradients import GradientRecord, Heat
from colotrain.events.kinds import (
    Checkpoint,
    DeviceMemory,
    Failure,
    Nonfinite,
    Rollback,
    StepProgress,
)
from colotrain.events.log import json_safe
from colotrain.events.machines import NodeLeft, Pressure
from colotrain.records import to_plain
from colotrain.rundir import RunDir
from colotrain.spec.axes import Ranks
from colotrain.spec.batch import tokens_per_count
from colotrain.spec.memory import MemoryBreakdown
from colotrain.spec.pipeline_schedule import bubble
from colotrain.spec.plan import RunPlan

LIVE = ("starting", "running")
"""Statuses of a run that has not ended, and states of one whose processes are alive."""
ENDED = ("finished", "failed", "preempted", "interrupted")
SMOOTHING_STEPS = 20
Series = tuple[tuple[int, float], ...]
"""(step, value) pairs, ordered by step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """State of one rank of the latest attempt that completed a step."""

    rank: int
    step: int
    """Last step that the rank completed."""
    t: float
    """Unix time at which the rank completed `step`."""
    rss: int
    """Resident memory in bytes."""
    peak: int
    """Peak memory in bytes within this attempt."""
    busy_s: float
    """Smoothed seconds per step without waiting, as far as the wait is known."""
    data_s: float
    """Smoothed seconds per step of waiting for data."""
    wait_s: float | None
    """Seconds of the last step spent waiting for other ranks; None where they are not known."""
    wait_share: float | None = None
    """Median share of the last steps spent waiting for other ranks; None where it is not known."""
    pressure: Pressure | None = None
    """What the rank lacked lately."""
    stage: int | None = None
    """Pipeline stage of the rank; None where each rank has all blocks."""
    attempt: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageView:
    """One stage, planned and measured."""

    stage: int
    first_rank: int
    last_rank: int
    """Its ranks follow one another."""
    blocks: tuple[tuple[int, int], ...]
    """First and last position, from 0, of each of its chunks among the model's blocks."""
    peak: int | None
    """Peak bytes of its fullest rank; None before a step."""
    wait: float | None
    """Median share of a step for which its ranks waited for others; None where it is not known."""
    planned_wait: float
    """The same as planned; that of equal stages where the plan knows no times."""

    @property
    def place(self) -> str:
        """Text like `ranks 2-3, block 4`."""
        ranks = _named("rank", self.first_rank, self.last_rank)
        (first, last), *others = self.blocks
        if not others:
            return f"{ranks}, {_named('block', first, last)}"
        return f"{ranks}, blocks {', '.join(_range(*chunk) for chunk in self.blocks)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """Immutable snapshot of a run. None, 0 and () mean: not known yet."""

    status: str = "starting"
    """starting, running, or how it ended: finished, failed, preempted, interrupted.

    `events.liveness.state` tells whether its processes are alive.
    """
    cause: str | None = None
    """Why the run failed, stopped or is failing."""
    failure: Failure | None = None
    """Failure of the rank that failed first in the latest attempt."""
    exit_code: int | None = None
    world_size: int = 0
    attempt: int | None = None
    steps: int = 0
    max_steps: int = 0
    progress: StepProgress | None = None
    """Progress of a long step or evaluation that is running now."""
    optimizer_steps: int = 0
    micro_batches: int = 0
    skipped_steps: tuple[int, ...] = ()
    """Steps without an update, because loss or gradients were not finite."""
    loss: Series = ()
    evals: Series = ()
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics that the model returned beside the loss in the last evaluation."""
    grad_norms: Series = ()
    throughput: Series = ()
    """Tokens per second, without the first step of each attempt, which is a warm-up."""
    step_times: Series = ()
    """Seconds per step, without the first step of each attempt."""
    tokens_per_step: float | None = None
    """Count of the last step in the unit that `unit` returns: tokens, samples, or targets."""
    tokens_per_s: float | None = None
    tokens_per_s_smooth: float | None = None
    """Mean over the last `SMOOTHING_STEPS` steps."""
    step_s: float | None = None
    data_s: float | None = None
    pace_s: float | None = None
    """Mean seconds from step to step, including validation and checkpoints in between."""
    lost_s: float = 0.0
    """Seconds lost to restarts: repeated steps and the time to start again."""
    goodput: Goodput = field(default_factory=Goodput)
    """What restarts cost over the run's whole life."""
    eta_s: float | None = None
    """Estimated seconds to the end, including restarts at their rate so far."""
    times: tuple[tuple[str, float], ...] = ()
    """(activity, mean seconds per step) over the last `SMOOTHING_STEPS` steps."""
    grad_norm: float | None = None
    clip_ratio: float | None = None
    lr: float | None = None
    peak_by_rank: tuple[int, ...] = ()
    """Peak bytes per rank over all attempts."""
    rss_by_rank: tuple[int, ...] = ()
    """Resident bytes per rank in the latest attempt that completed a step."""
    tiers: dict[str, dict[str, int]] = field(default_factory=dict)
    """gemini only: category (parameters, gradients, optimizer) → tier → bytes per rank."""
    memory_by_rank: dict[int, MemoryBreakdown] = field(default_factory=dict)
    """Rank → memory breakdown at its peak; activations include everything else within a step."""
    device_memory: dict[int, DeviceMemory] = field(default_factory=dict)
    """Rank → what its GPU holds, in the latest attempt that completed a step."""
    ranks: tuple[RankView, ...] = ()
    gradients: GradientRecord | None = None
    """Newest gradient record."""
    heat: Heat = field(default_factory=Heat)
    nonfinite: Nonfinite | None = None
    """Origin of the first non-finite number in the latest attempt."""
    restarts: int = 0
    restart_causes: tuple[str, ...] = ()
    rollbacks: tuple[Rollback, ...] = ()
    """Each return to a checkpoint because a loss or gradient was not finite."""
    nodes_left: tuple[NodeLeft, ...] = ()
    """Nodes that held the others up, and without which the run went on."""
    resumed: tuple[int, ...] = ()
    """Steps from which attempts resumed."""
    checkpoint: Checkpoint | None = None
    saving: tuple[int, float] | None = None
    """(step, start as Unix time) of the checkpoint that is being written."""
    save_failure: str | None = None
    """Why the last save failed; None if it did not."""
    launched_at: float | None = None
    last_event_at: float | None = None
    ended_at: float | None = None
    time_to_first_step_s: float | None = None
    """Seconds from the start of the newest command that completed a step to that first step."""
    peak_flops_per_s: float | None = None
    peak_flops_what: str = ""


def summary(view: RunView, plan: RunPlan, rundir: RunDir) -> dict[str, Any]:
    """Return the content of `summary.json`; numbers that JSON cannot represent are strings."""
    losses = [loss for _, loss in view.loss]
    tokens_per_s, step_s = overall_tokens_per_s(view), typical_step_s(view)
    measured, predicted = max(view.peak_by_rank, default=0), planned_memory(plan).total
    of_peak, of_stages = peak_memory(view), stages(view, plan)
    document = {
        "status": view.status,
        **({"stopped_early": view.cause} if view.cause and view.status == "finished" else {}),
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
            "predicted_peak": predicted,
            "measured_peak": measured,
            **({"measured": to_plain(of_peak)} if of_peak else {}),
            "error": error(predicted, measured),
            **({"device": _device_memory(view)} if view.device_memory else {}),
            **({"tiers": view.tiers} if view.tiers else {}),
        },
        "time": {
            "step_s": step_s,
            "predicted_step_s": plan.time.step_s,
            "error": error(plan.time.step_s, step_s),
        },
        **({"stages": [to_plain(stage) for stage in of_stages]} if of_stages else {}),
        "restarts": view.restarts,
        **({"rollbacks": [back.fields() for back in view.rollbacks]} if view.rollbacks else {}),
        **({"skipped_steps": len(view.skipped_steps)} if view.skipped_steps else {}),
        **({"nodes_left": [left.fields() for left in view.nodes_left]} if view.nodes_left else {}),
        "goodput": {
            "share": view.goodput.goodput,
            "useful_s": view.goodput.useful_s,
            "wall_s": view.goodput.wall_s,
            "lost_steps": view.goodput.lost_steps,
            "restart_s": view.goodput.restart_s,
            "recoveries": [to_plain(recovery) for recovery in view.goodput.recoveries],
        },
        "plugin": plan.plugin.name,
        "time_to_first_step_s": view.time_to_first_step_s,
        "run_dir": str(rundir.path),
    }
    safe: dict[str, Any] = json_safe(document)
    return safe


def _named(what: str, first: int, last: int) -> str:
    """Return `rank 3` or `ranks 3-5`."""
    return f"{what}{'s' if last > first else ''} {_range(first, last)}"


def _range(first: int, last: int) -> str:
    return f"{first}" if first == last else f"{first}-{last}"


def stages(view: RunView, plan: RunPlan) -> tuple[StageView, ...]:
    """Return the stages of a run; none where each rank has all blocks."""
    mesh, found = plan.mesh, []
    ranks_of = Ranks.of(mesh, world=view.world_size or plan.world_size)
    if mesh.pp == 1 or not ranks_of.world or mesh.pp > len(mesh.pp_split):
        return ()
    same = bubble(mesh.pp, plan.batch.accumulation_steps, mesh.pp_chunks)
    for stage in range(mesh.pp):
        ranks = ranks_of.of_stage(stage)
        shares = [r.wait_share for r in view.ranks if r.rank in ranks and r.wait_share is not None]
        found.append(
            StageView(
                stage=stage,
                first_rank=ranks[0],
                last_rank=ranks[-1],
                blocks=mesh.blocks_of(stage),
                peak=max(view.peak_by_rank[ranks[0] : ranks[-1] + 1], default=None),
                wait=statistics.median(shares) if shares else None,
                planned_wait=plan.time.waits[stage] if plan.time.waits else same,
            )
        )
    return tuple(found)


def peak_memory(view: RunView) -> MemoryBreakdown | None:
    """Return the measured breakdown of the rank that needed most; None if none was measured."""
    return max(view.memory_by_rank.values(), key=lambda breakdown: breakdown.total, default=None)


def planned_memory(plan: RunPlan) -> MemoryBreakdown:
    """Planned memory that a rank's peak is compared with: on CUDA tensors, else the process."""
    on_cuda = plan.cluster.device == "cuda"
    return replace(plan.memory, baseline=0) if on_cuda else plan.memory


def _device_memory(view: RunView) -> dict[str, list[int]]:
    """What torch's allocator kept at most, what is free, and what is outside it, by rank."""
    names, by_rank = ("reserved", "free", "outside"), view.device_memory.values()
    return {f"{name}_by_rank": [getattr(its, name) for its in by_rank] for name in names}


def error(predicted: float, measured: float) -> float | None:
    """Return the relative error of a prediction; None if either value is missing."""
    return predicted / measured - 1 if predicted and measured else None


def unit(view: RunView, plan: RunPlan) -> str:
    """Return the unit of throughput and loss: tokens, samples, or the dataset's own targets."""
    return unit_of(view.tokens_per_step, plan)


def unit_of(count: float | None, plan: RunPlan) -> str:
    """Return the unit of a step's `count`; before there is a step, `count` is None."""
    if plan.data.source != "target":
        texts = bool(plan.data.classes) and not plan.data.classes_of_words
        known = {"pairs": plan.data.pairs, "texts": texts, "samples": plan.data.rows}
        return next((word for word, holds in known.items() if holds), "tokens")
    return "samples" if count in (None, plan.batch.global_batch) else "targets"


def overall_tokens_per_s(view: RunView) -> float:
    """Return the median step's tokens per second, without warm-up steps; 0.0 without any step."""
    steady = [value for _, value in view.throughput]
    return statistics.median(steady) if steady else view.tokens_per_s or 0.0


def typical_step_s(view: RunView) -> float:
    """Return the median step's measured seconds, without warm-up steps; 0.0 without any step.

    This is not derived from tokens per second, because a user's dataset may count tokens
    differently from the plan.
    """
    steady = [seconds for _, seconds in view.step_times]
    return statistics.median(steady) if steady else view.step_s or 0.0


def mfu(view: RunView, plan: RunPlan, tokens_per_s: float) -> float:
    """Return the model FLOPs utilization: share of all ranks' measured peak; 0.0 without a peak."""
    ideal = (view.world_size or plan.world_size) * (view.peak_flops_per_s or 0.0)
    tokens = tokens_per_count(plan.data) or 1
    return plan.flops_per_token * tokens * tokens_per_s / ideal if ideal else 0.0
