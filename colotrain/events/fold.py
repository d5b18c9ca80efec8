"""Fold: turns a run's events into a `RunView`.

The fold is a pure function of the events: the order in which files are read does not matter, only
the order of the lines inside each file. After a restart, steps repeat: the later attempt's record
of a step replaces the earlier one, and steps after the one it resumed from are dropped.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from colotrain.errors import ColotrainError
from colotrain.events import kinds
from colotrain.events.attempt import Attempt, History, heat_of, merge
from colotrain.events.event import Event, Kind
from colotrain.events.goodput import Goodput, Recovery, wall_s
from colotrain.events.gradients import GradientRecord
from colotrain.events.log import EventReader
from colotrain.events.machines import NodeLeft
from colotrain.events.view import ENDED, RunView
from colotrain.rundir import RunDir


class Fold:
    """Accumulates events; `view()` returns the state of the run so far."""

    def __init__(self, *, max_steps: int = 0) -> None:
        """Create an empty fold; without `max_steps` (0) its views have no `eta_s`."""
        self._max_steps = max_steps
        self._attempts: dict[int, Attempt] = {}
        self._launches: list[kinds.LaunchStarted] = []
        self._restarts: list[kinds.Restart] = []
        self._rollbacks: list[kinds.Rollback] = []
        self._nodes_left: list[NodeLeft] = []
        self._done: kinds.LaunchEnded | None = None
        self._ends: list[float] = []
        """Unix times at which launches were over."""
        self._history: History | None = History()
        """Merged history of all attempts; None if it must be merged again."""
        self._first_steps: dict[int, float] = {}
        """Attempt → Unix time at which its first step was done."""
        self._last_event_at = -math.inf

    def add(self, events: Iterable[Event]) -> Fold:
        for event in events:
            self._last_event_at = max(event.t, self._last_event_at)
            if event.rank is None or event.attempt is None:
                self._add_launcher(event)
            else:
                self._add_worker(event, event.rank, event.attempt)
        return self

    def _add_launcher(self, event: Event) -> None:
        if event.kind == kinds.LaunchStarted.KIND:
            self._launches.append(kinds.LaunchStarted.of(event))
            self._done = None
        elif event.kind == kinds.Restart.KIND:
            self._restarts.append(kinds.Restart.of(event))
        elif event.kind == NodeLeft.KIND:
            self._nodes_left.append(NodeLeft.of(event))
        elif event.kind == kinds.LaunchEnded.KIND:
            self._done = kinds.LaunchEnded.of(event)
            self._ends.append(event.t)

    def _add_worker(self, event: Event, rank: int, number: int) -> None:
        attempt = self._attempts.setdefault(number, Attempt(number=number))
        attempt.add(event, rank)
        if event.kind in (kinds.WorkerStarted.KIND, kinds.Resumed.KIND):
            self._history = None
        elif event.kind == kinds.Rollback.KIND:
            self._rollbacks.append(kinds.Rollback.of(event))
        elif event.kind == kinds.Step.KIND and rank == 0:
            self._first_steps[number] = min(event.t, self._first_steps.get(number, math.inf))
            self._extend(attempt, attempt.ranks[0].step)

    def _extend(self, attempt: Attempt, step: int) -> None:
        """Append `step` to the history if it is the next one; otherwise mark it for merging."""
        last = self._history.last if self._history else None
        follows = last is None or (last.attempt == attempt.number and last.step < step)
        latest = attempt.number == max(self._attempts)
        if self._history is not None and follows and latest and step in attempt.steps:
            self._history.append(attempt.steps[step])
        else:
            self._history = None

    def view(self) -> RunView:
        attempts = self._ordered()
        if self._history is None:
            self._history = History()
            for step in merge(attempts, lambda attempt: attempt.steps).values():
                self._history.append(step)
        view = with_latest(self._outcome(attempts), attempts)
        view = with_ranks(view, attempts)
        saves = attempts[-1].saves if attempts else ()
        times, lost_s = self._history.times(saves), self._history.lost_s(self._launches)
        view = replace(with_history(view, self._history), times=times, lost_s=lost_s)
        view = replace(view, goodput=self._goodput(attempts, self._history))
        return self._with_progress(view, attempts)

    def _outcome(self, attempts: list[Attempt]) -> RunView:
        """Return a view with the status of the run, why it has it, and when what happened."""
        done, status = self._done, self._status()
        failures = attempts[-1].failures if attempts else []
        failure = min(failures, key=lambda f: (f.t, f.rank), default=None)
        return RunView(
            status=status,
            cause=_ended_early(attempts[-1:]) if status == "finished" else self._cause(failure),
            failure=failure,
            exit_code=done.exit_code if done else None,
            world_size=self._world_size(),
            attempt=attempts[-1].number if attempts else None,
            max_steps=self._max_steps,
            restarts=len(self._restarts),
            restart_causes=tuple(restart.cause for restart in self._restarts),
            rollbacks=tuple(self._rollbacks),
            nodes_left=tuple(self._nodes_left),
            launched_at=_finite(self._launches[0].t) if self._launches else None,
            last_event_at=_finite(self._last_event_at),
            ended_at=done.t if done else None,
            time_to_first_step_s=self._time_to_first_step_s(),
        )

    def _with_progress(self, view: RunView, attempts: list[Attempt]) -> RunView:
        """Add the steps done, the time to the end, and what is under way; `view` has the pace."""
        base = (attempts[-1].base() if attempts else None) or 0
        last = self._history.last if self._history else None
        steps, running = max(base, last.step if last else 0), self._done is None
        to_go = self._max_steps - steps if self._max_steps > 0 and running else None
        newest = attempts[-1] if attempts else Attempt(number=0)
        progress, pace_s = newest.progress if running else None, view.pace_s
        if pace_s is None and progress is not None and progress.what == "step":
            pace_s = progress.whole_s
        return replace(
            view,
            steps=steps,
            progress=progress,
            eta_s=eta_s(pace_s, view.lost_s, steps, to_go),
            saving=newest.saving() if running else None,
            save_failure=newest.save_failure(),
            nonfinite=newest.nonfinite,
        )

    def _goodput(self, attempts: list[Attempt], history: History) -> Goodput:
        """Return what restarts cost, over all launches."""
        signs = [attempt.ready_at for attempt in attempts]
        signs += [self._last_event_at] if self._done is None else []
        return Goodput(
            recoveries=recoveries(attempts, self._restarts, self._launches),
            rolled_back=sum(rollback.lost_steps for rollback in self._rollbacks),
            useful_s=history.useful_s,
            wall_s=wall_s(self._launches, self._ends, signs),
        )

    def _time_to_first_step_s(self) -> float | None:
        """Seconds from the start of the newest command that completed a step to that first step."""
        for launch in sorted(self._launches, key=lambda event: event.t, reverse=True):
            began_at = launch.began_at or launch.t
            first_at = min((t for t in self._first_steps.values() if t >= began_at), default=None)
            if first_at is not None:
                return first_at - began_at
        return None

    def _ordered(self) -> list[Attempt]:
        return [self._attempts[number] for number in sorted(self._attempts)]

    def _status(self) -> str:
        if self._done is not None:
            return self._done.status if self._done.status in ENDED else "failed"
        since = max((event.t for event in (*self._launches, *self._restarts)), default=-math.inf)
        ready_at = max((attempt.ready_at for attempt in self._ordered()), default=-math.inf)
        return "running" if ready_at > since else "starting"

    def _cause(self, failure: kinds.Failure | None) -> str | None:
        stopped = _latest(self._ordered()[-1:], kinds.WorkerStopped) if self._done else None
        given = self._done.cause if self._done else ""
        reason = stopped.reason if stopped else ""
        return given or reason or (str(failure) if failure else None)

    def _world_size(self) -> int:
        for attempt in reversed(self._ordered()):
            if attempt.started:
                return max(worker.world_size for worker in attempt.started.values())
        return self._launches[-1].world_size if self._launches else 0


def fold(events: Iterable[Event], *, max_steps: int = 0) -> RunView:
    """Return the view of `events`, whose files may be interleaved in any order."""
    return Fold(max_steps=max_steps).add(events).view()


def follow(
    rundir: RunDir, *, ranks: Collection[int] | None = None, outline: bool = False
) -> RunView:
    """Read all events of a run so far; `ranks` and `outline` are those of `EventReader`."""
    try:
        max_steps = rundir.plan().train.max_steps
    except ColotrainError:
        max_steps = 0
    reader = EventReader(rundir, ranks=ranks, outline=outline)
    found = Fold(max_steps=max_steps).add(reader.poll())
    while reader.behind:
        found.add(reader.poll())
    return found.view()


def with_latest(view: RunView, attempts: list[Attempt]) -> RunView:
    """Add the last evaluation, gradient record and checkpoint, and what rank 0 said once."""
    peak_flops, tiers = _latest(attempts, kinds.PeakFlops), _latest(attempts, kinds.TierBytes)
    evaluation = _latest(attempts, kinds.Evaluation)
    return replace(
        view,
        evals=tuple(merge(attempts, lambda attempt: attempt.evals).items()),
        metrics=(evaluation.metrics if evaluation else None) or {},
        tiers=tiers.bytes if tiers else {},
        gradients=_last_record(attempts),
        heat=heat_of(attempts),
        resumed=tuple(resumed.step for a in attempts if (resumed := a.last(kinds.Resumed))),
        checkpoint=_last_checkpoint(attempts),
        peak_flops_per_s=peak_flops.flops_per_s if peak_flops else None,
        peak_flops_what=peak_flops.what if peak_flops else "",
    )


def with_ranks(view: RunView, attempts: list[Attempt]) -> RunView:
    """Add memory and progress of each rank."""
    view = replace(view, peak_by_rank=_by_rank([attempt.peaks for attempt in attempts]))
    working = next((attempt for attempt in reversed(attempts) if attempt.ranks), None)
    if working is None:
        return view
    return replace(
        view,
        rss_by_rank=_by_rank([{rank: its.rss for rank, its in working.ranks.items()}]),
        memory_by_rank=dict(sorted(working.memory_by_rank.items())),
        device_memory=dict(sorted(working.device_memory.items())),
        ranks=tuple(working.ranks[rank] for rank in sorted(working.ranks)),
    )


def with_history(view: RunView, history: History) -> RunView:
    """Add the columns of `history` and what its last step reported."""
    view = replace(
        view,
        skipped_steps=tuple(history.skipped),
        loss=tuple(history.loss),
        grad_norms=tuple(history.grad_norms),
        throughput=tuple(history.throughput),
        step_times=tuple(history.step_times),
        tokens_per_s_smooth=history.speed(),
        pace_s=history.pace_s(),
    )
    last = history.last
    if last is None:
        return view
    return replace(
        view,
        optimizer_steps=last.optimizer_steps or 0,
        micro_batches=last.total_micro_batches or 0,
        tokens_per_step=last.tokens,
        tokens_per_s=last.tokens_per_s,
        step_s=last.step_s,
        data_s=last.data_s,
        grad_norm=last.grad_norm,
        clip_ratio=last.clip_ratio,
        lr=last.lr,
    )


def eta_s(pace_s: float | None, lost_s: float, steps: int, steps_to_go: int | None) -> float | None:
    """Estimate the seconds for the remaining steps, assuming restarts cost as much as so far."""
    if pace_s is None or steps_to_go is None:
        return None
    return (pace_s + lost_s / max(steps, 1)) * max(0, steps_to_go)


def _last_record(attempts: list[Attempt]) -> GradientRecord | None:
    """Return the newest gradient record that no later attempt has rolled back."""
    base: float = math.inf
    for attempt in reversed(attempts):
        record = attempt.gradients.record()
        if record is not None and record.step <= base:
            return record
        begun = attempt.base()
        base = base if begun is None else min(base, begun)
    return None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _by_rank(attempts: Iterable[dict[int, int]]) -> tuple[int, ...]:
    """Return each rank's highest value; 0 for a rank without one."""
    highest: dict[int, int] = {}
    for values in attempts:
        for rank, value in values.items():
            highest[rank] = max(value, highest.get(rank, 0))
    return tuple(highest.get(rank, 0) for rank in range(max(highest, default=-1) + 1))


def _ended_early(newest: list[Attempt]) -> str | None:
    finished = newest[0].last(kinds.WorkerFinished) if newest else None
    return finished.reason if finished else None


def _latest(attempts: list[Attempt], kind: type[Kind]) -> Kind | None:
    return next((found for a in reversed(attempts) if (found := a.last(kind))), None)


def _last_checkpoint(attempts: list[Attempt]) -> kinds.Checkpoint | None:
    for attempt in reversed(attempts):
        event = attempt.latest.get(kinds.Checkpoint.KIND) or attempt.latest.get(kinds.Resumed.KIND)
        if event is not None and not event.fields.get("in_memory"):
            return kinds.Checkpoint.of(event)
    return None


def recoveries(
    attempts: Sequence[Attempt],
    restarts: Sequence[kinds.Restart],
    launches: Sequence[kinds.LaunchStarted],
) -> tuple[Recovery, ...]:
    """Return the restarts in `restarts`, oldest first, each with the first step after it.

    A restart whose workers died again before a step is part of the next one that led to a step. A
    launch that had to make steps again, because the launch before it was killed, counts too; the
    time between the two does not.
    """
    found, before = [], None
    for attempt in attempts:
        if not attempt.steps:
            continue
        first, base = attempt.steps[min(attempt.steps)], attempt.base() or 0
        if before is not None:
            last = before.steps[max(before.steps)]
            counts = [step.t for number, step in before.steps.items() if number <= base]
            began = max(counts, default=before.steps[min(before.steps)].t)
            lost_steps = max(0, last.step - base)
            decided = [r.t for r in restarts if last.t <= r.t <= first.t]
            again = [launch.began_at or launch.t for launch in launches]
            again = [t for t in again if lost_steps and last.t <= t <= first.t]
            if decided or again:
                pause_s = 0.0 if decided else max(again) - last.t
                found.append(
                    Recovery(
                        lost_steps=lost_steps,
                        lost_s=max(0.0, first.t - began - pause_s - (first.step_s or 0.0)),
                        restart_s=first.t - (min(decided) if decided else max(again)),
                    )
                )
        before = attempt
    return tuple(found)
