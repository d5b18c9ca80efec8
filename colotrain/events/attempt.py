"""State that the fold keeps per attempt, and the step history that survives rollbacks."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from colotrain.events import kinds
from colotrain.events.event import Event, Kind
from colotrain.events.gradients import Cell, GradientHistory, Gradients, Heat, Parameters
from colotrain.events.machines import Pressure
from colotrain.events.view import SMOOTHING_STEPS, RankView
from colotrain.spec.memory import MemoryBreakdown

SMOOTHING = 0.2
"""Weight of a rank's newest step in the moving average of its step time."""
SAVES_KEPT = 64

T = TypeVar("T")


@dataclass(slots=True, kw_only=True)
class Attempt:
    """State of one attempt, accumulated from the events of its workers."""

    number: int
    started: dict[int, kinds.WorkerStarted] = field(default_factory=dict)
    steps: dict[int, kinds.Step] = field(default_factory=dict)
    evals: dict[int, float] = field(default_factory=dict)
    peaks: dict[int, int] = field(default_factory=dict)
    memory_by_rank: dict[int, MemoryBreakdown] = field(default_factory=dict)
    """Memory breakdown of each rank at its peak."""
    device_memory: dict[int, kinds.DeviceMemory] = field(default_factory=dict)
    ranks: dict[int, RankView] = field(default_factory=dict)
    pressures: dict[int, Pressure] = field(default_factory=dict)
    wait_shares: dict[int, deque[float]] = field(default_factory=dict)
    """Rank → shares of its last steps for which it waited for others."""
    failures: list[kinds.Failure] = field(default_factory=list)
    gradients: GradientHistory = field(default_factory=GradientHistory)
    nonfinite: kinds.Nonfinite | None = None
    """First nonfinite event of the attempt."""
    saves: deque[kinds.Checkpoint] = field(default_factory=lambda: deque(maxlen=SAVES_KEPT))
    latest: dict[str, Event] = field(default_factory=dict)
    """Rank 0's last event of each kind that has no field of its own here; `last` reads it."""
    progress: kinds.StepProgress | None = None
    """Progress of a long step or evaluation that is running now; None where none is."""
    ready_at: float = -math.inf
    """Latest Unix time at which any rank started or completed a step."""

    def add(self, event: Event, rank: int) -> None:
        if event.kind in (kinds.WorkerStarted.KIND, kinds.Step.KIND):
            self.ready_at = max(self.ready_at, event.t)
        if rank == 0 and event.kind in (kinds.Step.KIND, kinds.Evaluation.KIND):
            self.progress = None
        match event.kind:
            case kinds.WorkerStarted.KIND:
                self.started[rank] = kinds.WorkerStarted.of(event)
            case kinds.Failure.KIND:
                self.failures.append(kinds.Failure.of(event))
            case kinds.Step.KIND:
                self._add_step(kinds.Step.of(event), rank)
            case Pressure.KIND:
                self.pressures[rank] = Pressure.of(event)
            case kinds.PeakMemory.KIND:
                self.memory_by_rank[rank] = kinds.PeakMemory.of(event).breakdown()
            case kinds.DeviceMemory.KIND:
                self.device_memory[rank] = kinds.DeviceMemory.of(event)
            case _ if rank == 0:
                self._add_of_first_rank(event)

    def _add_of_first_rank(self, event: Event) -> None:
        match event.kind:
            case kinds.StepProgress.KIND:
                self.progress = kinds.StepProgress.of(event)
            case kinds.Nonfinite.KIND:
                self.nonfinite = self.nonfinite or kinds.Nonfinite.of(event)
            case Parameters.KIND | Gradients.KIND:
                self.gradients.add(event)
            case _:
                self.latest[event.kind] = event
        match event.kind:
            case kinds.Evaluation.KIND if (
                evaluation := kinds.Evaluation.of(event)
            ).loss is not None:
                self.evals[evaluation.step] = evaluation.loss
            case kinds.Resumed.KIND:
                self._forget(kinds.Resumed.of(event).step)
            case kinds.Checkpoint.KIND:
                self.saves.append(kinds.Checkpoint.of(event))

    def last(self, kind: type[Kind]) -> Kind | None:
        """Return rank 0's last event of a kind, if there is one in `latest`."""
        event = self.latest.get(kind.KIND)
        return kind.of(event) if event else None

    def _forget(self, step: int) -> None:
        """Roll back: drop the records of steps after `step`, which will be run again."""
        self.steps = {n: done for n, done in self.steps.items() if n <= step}
        self.evals = {n: loss for n, loss in self.evals.items() if n <= step}

    def saving(self) -> tuple[int, float] | None:
        """Return (step, start as Unix time) of the checkpoint that is being written, if any."""
        started = self.last(kinds.CheckpointStarted)
        ended = [e.t for e in (self.last(kinds.Checkpoint), self.last(kinds.CheckpointFailed)) if e]
        if started is None or max(ended, default=-math.inf) >= started.t:
            return None
        return started.step, started.t

    def save_failure(self) -> str | None:
        """Return why the last save failed, or None if it did not."""
        failed, saved = self.last(kinds.CheckpointFailed), self.last(kinds.Checkpoint)
        if failed is None or (saved is not None and saved.t > failed.t):
            return None
        return f"checkpoint of step {failed.step} failed: {failed.error}"

    def _add_step(self, step: kinds.Step, rank: int) -> None:
        self.peaks[rank] = max(self.peaks.get(rank, 0), step.peak)
        before, busy_s, data_s = self.ranks.get(rank), step.busy_s, step.data_s or 0.0
        if before is not None and math.isfinite(before.busy_s):
            busy_s = before.busy_s + SMOOTHING * (busy_s - before.busy_s)
            data_s = before.data_s + SMOOTHING * (data_s - before.data_s)
        self.ranks[rank] = RankView(
            rank=rank,
            step=step.step,
            t=step.t,
            rss=step.rss,
            peak=self.peaks[rank],
            busy_s=busy_s,
            data_s=data_s,
            wait_s=step.wait_s,
            wait_share=self._wait_share(step, rank),
            pressure=self.pressures.get(rank),
            stage=self.started[rank].stage if rank in self.started else None,
            attempt=self.number,
        )
        if rank == 0 and step.step > 0:
            self.steps[step.step] = step

    def _wait_share(self, step: kinds.Step, rank: int) -> float | None:
        """Return the rank's median share of waiting over its last steps, with `step`."""
        recent = self.wait_shares.setdefault(rank, deque(maxlen=SMOOTHING_STEPS))
        if step.wait_s is not None and step.step_s:
            recent.append(step.wait_s / step.step_s)
        return statistics.median(recent) if recent else None

    def base(self) -> int | None:
        """Return how many steps were done before this attempt, or None while that is not known."""
        if self.started:
            return self.started[min(self.started)].step
        if resumed := self.last(kinds.Resumed):
            return resumed.step
        return min(self.steps) - 1 if self.steps else None


@dataclass(slots=True)
class History:
    """The surviving steps of all attempts, as columns."""

    loss: list[tuple[int, float]] = field(default_factory=list)
    grad_norms: list[tuple[int, float]] = field(default_factory=list)
    throughput: list[tuple[int, float]] = field(default_factory=list)
    step_times: list[tuple[int, float]] = field(default_factory=list)
    recent: deque[kinds.Step] = field(default_factory=lambda: deque(maxlen=SMOOTHING_STEPS))
    """Last steps, all of the attempt that did the newest one."""
    gaps: list[tuple[float, float]] = field(default_factory=list)
    """Unix times (end of an attempt's last surviving step, end of the next attempt's first)."""
    last: kinds.Step | None = None
    skipped: list[int] = field(default_factory=list)
    useful_s: float = 0.0
    """Seconds in these steps."""

    def append(self, step: kinds.Step) -> None:
        warm = self.last is not None and self.last.attempt == step.attempt
        if not warm:
            self.recent.clear()
        if self.last is not None and not warm:
            self.gaps.append((self.last.t, step.t))
        if step.loss is not None:
            self.loss.append((step.step, step.loss))
        if step.grad_norm is not None:
            self.grad_norms.append((step.step, step.grad_norm))
        if step.tokens_per_s is not None and warm:
            self.throughput.append((step.step, step.tokens_per_s))
        if step.step_s is not None and warm:
            self.step_times.append((step.step, step.step_s))
        if step.skipped:
            self.skipped.append(step.step)
        self.useful_s += step.step_s or 0.0
        self.recent.append(step)
        self.last = step

    def speed(self) -> float | None:
        values = [step.tokens_per_s for step in self.recent if step.tokens_per_s is not None]
        return statistics.fmean(values) if values else None

    def pace_s(self) -> float | None:
        if len(self.recent) < 2:
            return self.last.step_s if self.last else None
        return max(0.0, (self.recent[-1].t - self.recent[0].t) / (len(self.recent) - 1))

    def lost_s(self, launches: Sequence[kinds.LaunchStarted]) -> float:
        """Return the seconds lost to restarts; gaps that contain a new launch do not count."""
        lost = [
            end - start
            for start, end in self.gaps
            if not any(start <= launch.t <= end for launch in launches)
        ]
        return max(0.0, sum(lost))

    def times(self, saves: Iterable[kinds.Checkpoint]) -> tuple[tuple[str, float], ...]:
        """Return (activity, mean seconds) of the recent steps, each from its predecessor's end."""
        if self.last is None:
            return ()
        steps = list(self.recent)[1:] or [self.last]
        data, wait, optimizer, copying = (
            sum(value or 0.0 for value in column)
            for column in zip(
                *((s.data_s, s.known_wait_s, s.optimizer_s, s.copy_s) for s in steps), strict=True
            )
        )
        whole = sum(step.step_s or 0.0 for step in steps)
        start = self.recent[0].t
        saving = sum(save.stall_s for save in saves if start < save.t <= self.last.t)
        between = max(0.0, (self.pace_s() or 0.0) * len(steps) - whole - saving)
        seconds = {
            "data": data,
            "compute": max(0.0, whole - data - wait - optimizer - copying),
            "wait": wait,
            "optimizer": optimizer,
            "saving": saving + copying,
            "between": between,
        }
        return tuple((name, value / len(steps)) for name, value in seconds.items())


def merge(attempts: Iterable[Attempt], part: Callable[[Attempt], dict[int, T]]) -> dict[int, T]:
    """Merge `part` by step; an attempt replaces all after the step that it resumed from."""
    merged: dict[int, T] = {}
    for attempt in attempts:
        base = attempt.base()
        kept = {step: item for step, item in merged.items() if base is None or step <= base}
        merged = kept | part(attempt)
    return dict(sorted(merged.items()))


def heat_of(attempts: Sequence[Attempt]) -> Heat:
    """Return the heat map over all attempts that have the same layers as the newest records."""
    known = [attempt for attempt in attempts if attempt.gradients.columns]
    if not known:
        return Heat()
    layers = tuple(known[-1].gradients.layers)
    same = [attempt for attempt in attempts if tuple(attempt.gradients.layers) in ((), layers)]
    columns: dict[int, tuple[Cell, ...]] = merge(same, lambda attempt: attempt.gradients.columns)
    return Heat(layers=layers, steps=tuple(columns), cells=tuple(columns.values()))
