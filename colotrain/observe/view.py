"""RunView: what a run's events say about it, folded into one immutable picture.

The fold is a pure function of the events: the order in which files are read does not matter, only
the order of the lines inside each file. After a restart steps repeat; the later attempt's record
of a step replaces the earlier, and steps above the one it resumed from are forgotten.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from colotrain.errors import ColotrainError
from colotrain.observe.events import Checkpoint, Event, EventReader, Failure, Step, json_safe
from colotrain.plan import RunPlan
from colotrain.records import to_plain
from colotrain.rundir import RunDir

ENDED = ("finished", "failed", "preempted", "interrupted")
SMOOTHING_STEPS = 20

T = TypeVar("T")
Series = tuple[tuple[int, float], ...]
"""(step, value) pairs, by step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """Immutable snapshot of a run. None, 0 and () mean: not known yet."""

    status: str = "starting"
    """starting, running, or how it ended: finished, failed, preempted, interrupted.

    Whether its processes still live is for `observe.liveness.state` to say."""
    cause: str | None = None
    """Why it failed, stopped or is failing, in words."""
    failure: Failure | None = None
    """The rank of the latest attempt that failed first."""
    exit_code: int | None = None
    world_size: int = 0
    attempt: int | None = None
    steps: int = 0
    max_steps: int = 0
    optimizer_steps: int = 0
    micro_batches: int = 0
    skipped_steps: int = 0
    loss: Series = ()
    evals: Series = ()
    grad_norms: Series = ()
    throughput: Series = ()
    """Tokens per second, without the first step of each attempt, which warms up."""
    tokens_per_s: float | None = None
    tokens_per_s_smooth: float | None = None
    """Mean over the last `SMOOTHING_STEPS` steps."""
    step_s: float | None = None
    data_s: float | None = None
    pace_s: float | None = None
    """Mean time from step to step, with what happens in between (validation, checkpoints)."""
    eta_s: float | None = None
    grad_norm: float | None = None
    clip_ratio: float | None = None
    lr: float | None = None
    peak_by_rank: tuple[int, ...] = ()
    """Bytes, the highest of all attempts."""
    rss_by_rank: tuple[int, ...] = ()
    """Bytes, of the latest attempt that has done a step."""
    restarts: int = 0
    restart_causes: tuple[str, ...] = ()
    resumed: tuple[int, ...] = ()
    """The steps that attempts resumed from."""
    checkpoint: Checkpoint | None = None
    launched_at: float | None = None
    first_step_at: float | None = None
    last_event_at: float | None = None
    ended_at: float | None = None
    time_to_first_step_s: float | None = None
    """From the first launch to the end of the first step."""
    peak_flops_per_s: float | None = None
    peak_flops_what: str = ""


@dataclass(slots=True, kw_only=True)
class _Attempt:
    """What the workers of one attempt have written so far."""

    number: int
    started: dict[int, Event] = field(default_factory=dict)
    steps: dict[int, Step] = field(default_factory=dict)
    evals: dict[int, float] = field(default_factory=dict)
    peaks: dict[int, int] = field(default_factory=dict)
    rss: dict[int, int] = field(default_factory=dict)
    failures: list[Failure] = field(default_factory=list)
    latest: dict[str, Event] = field(default_factory=dict)
    """Rank 0's last event of every other kind."""

    ready_at: float = -math.inf
    """When a rank last started or did a step."""

    def add(self, event: Event, rank: int) -> None:
        if event.kind in ("started", "step"):
            self.ready_at = max(self.ready_at, event.t)
        match event.kind:
            case "started":
                self.started[rank] = event
            case "failed":
                self.failures.append(Failure.of(event))
            case "step":
                self.rss[rank] = event.count("rss")
                self.peaks[rank] = max(self.peaks.get(rank, 0), event.count("peak"))
                if rank == 0 and event.count("step") > 0:
                    self.steps[event.count("step")] = Step.of(event)
            case "eval" if rank == 0 and (loss := event.number("loss")) is not None:
                self.evals[event.count("step")] = loss
            case _ if rank == 0:
                self.latest[event.kind] = event

    def base(self) -> int | None:
        """Steps done before this attempt, or None while that is not known."""
        if self.started:
            return self.started[min(self.started)].count("step")
        if "resumed" in self.latest:
            return self.latest["resumed"].count("step")
        return min(self.steps) - 1 if self.steps else None


@dataclass(slots=True)
class _History:
    """The surviving steps of all attempts, as columns."""

    loss: list[tuple[int, float]] = field(default_factory=list)
    grad_norms: list[tuple[int, float]] = field(default_factory=list)
    throughput: list[tuple[int, float]] = field(default_factory=list)
    recent: deque[Step] = field(default_factory=lambda: deque(maxlen=SMOOTHING_STEPS))
    """The last steps of the attempt that did the very last one."""
    last: Step | None = None
    skipped: int = 0

    def append(self, step: Step) -> None:
        warm = self.last is not None and self.last.attempt == step.attempt
        if not warm:
            self.recent.clear()
        if step.loss is not None:
            self.loss.append((step.step, step.loss))
        if step.grad_norm is not None:
            self.grad_norms.append((step.step, step.grad_norm))
        if step.tokens_per_s is not None and warm:
            self.throughput.append((step.step, step.tokens_per_s))
        self.skipped += step.skipped
        self.recent.append(step)
        self.last = step

    def speed(self) -> float | None:
        values = [step.tokens_per_s for step in self.recent if step.tokens_per_s is not None]
        return statistics.fmean(values) if values else None

    def pace_s(self) -> float | None:
        if len(self.recent) < 2:
            return self.last.step_s if self.last else None
        return max(0.0, (self.recent[-1].t - self.recent[0].t) / (len(self.recent) - 1))


class Fold:
    """Accumulates events; `view()` is the picture so far."""

    def __init__(self, *, max_steps: int = 0) -> None:
        """Without `max_steps` (0) there is no `eta_s`."""
        self._max_steps = max_steps
        self._attempts: dict[int, _Attempt] = {}
        self._launches: list[Event] = []
        self._restarts: list[Event] = []
        self._done: Event | None = None
        self._history: _History | None = _History()
        """None: has to be merged again from the attempts."""
        self._first_step_at = math.inf
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
        if event.kind == "launch":
            self._launches.append(event)
            self._done = None
        elif event.kind == "restart":
            self._restarts.append(event)
        elif event.kind == "done":
            self._done = event

    def _add_worker(self, event: Event, rank: int, number: int) -> None:
        attempt = self._attempts.setdefault(number, _Attempt(number=number))
        attempt.add(event, rank)
        if event.kind in ("started", "resumed"):
            self._history = None
        elif event.kind == "step" and rank == 0:
            self._first_step_at = min(event.t, self._first_step_at)
            self._extend(attempt, event.count("step"))

    def _extend(self, attempt: _Attempt, step: int) -> None:
        """Append to the history where the step follows its last; otherwise merge it anew."""
        last = self._history.last if self._history else None
        follows = last is None or (last.attempt == attempt.number and last.step < step)
        latest = attempt.number == max(self._attempts)
        if self._history is not None and follows and latest and step in attempt.steps:
            self._history.append(attempt.steps[step])
        else:
            self._history = None

    def view(self) -> RunView:
        if self._history is None:
            self._history = _History()
            for step in _merge(self._ordered(), lambda attempt: attempt.steps).values():
                self._history.append(step)
        attempts, history, done = self._ordered(), self._history, self._done
        last, status = history.last, self._status()
        base = (attempts[-1].base() if attempts else None) or 0
        steps = max(base, last.step if last else 0)
        failures = attempts[-1].failures if attempts else []
        failure = min(failures, key=lambda f: (f.t, f.rank), default=None)
        launched_at = self._launches[0].t if self._launches else math.inf
        timed = self._max_steps > 0 and done is None
        peak_flops = _latest(attempts, "peak_flops")
        return RunView(
            status=status,
            cause=None if status == "finished" else self._cause(failure),
            failure=failure,
            exit_code=done.count("exit_code") if done else None,
            world_size=self._world_size(),
            attempt=attempts[-1].number if attempts else None,
            steps=steps,
            max_steps=self._max_steps,
            optimizer_steps=last.optimizer_steps if last else 0,
            micro_batches=last.micro_batches if last else 0,
            skipped_steps=history.skipped,
            loss=tuple(history.loss),
            evals=tuple(_merge(attempts, lambda attempt: attempt.evals).items()),
            grad_norms=tuple(history.grad_norms),
            throughput=tuple(history.throughput),
            tokens_per_s=last.tokens_per_s if last else None,
            tokens_per_s_smooth=history.speed(),
            step_s=last.step_s if last else None,
            data_s=last.data_s if last else None,
            pace_s=history.pace_s(),
            eta_s=_eta_s(history.pace_s(), self._max_steps - steps) if timed else None,
            grad_norm=last.grad_norm if last else None,
            clip_ratio=last.clip_ratio if last else None,
            lr=last.lr if last else None,
            peak_by_rank=_by_rank([a.peaks for a in attempts]),
            rss_by_rank=_by_rank([a.rss for a in attempts if a.rss][-1:]),
            restarts=len(self._restarts),
            restart_causes=tuple(event.text("cause") for event in self._restarts),
            resumed=tuple(
                a.latest["resumed"].count("step") for a in attempts if "resumed" in a.latest
            ),
            checkpoint=_last_checkpoint(attempts),
            launched_at=_finite(launched_at),
            first_step_at=_finite(self._first_step_at),
            last_event_at=_finite(self._last_event_at),
            ended_at=done.t if done else None,
            time_to_first_step_s=_finite(self._first_step_at - launched_at),
            peak_flops_per_s=peak_flops.number("flops_per_s") if peak_flops else None,
            peak_flops_what=peak_flops.text("what") if peak_flops else "",
        )

    def _ordered(self) -> list[_Attempt]:
        return [self._attempts[number] for number in sorted(self._attempts)]

    def _status(self) -> str:
        if self._done is not None:
            status = self._done.text("status")
            return status if status in ENDED else "failed"
        since = max((event.t for event in self._launches + self._restarts), default=-math.inf)
        ready_at = max((attempt.ready_at for attempt in self._ordered()), default=-math.inf)
        return "running" if ready_at > since else "starting"

    def _cause(self, failure: Failure | None) -> str | None:
        stopped = _latest(self._ordered()[-1:], "stopped") if self._done else None
        given = self._done.text("cause") if self._done else ""
        reason = stopped.text("reason") if stopped else ""
        return given or reason or (str(failure) if failure else None)

    def _world_size(self) -> int:
        for attempt in reversed(self._ordered()):
            if attempt.started:
                return max(event.count("world_size") for event in attempt.started.values())
        return self._launches[-1].count("world_size") if self._launches else 0


def fold(events: Iterable[Event], *, max_steps: int = 0) -> RunView:
    """The view that `events` give, in any interleaving of their files."""
    return Fold(max_steps=max_steps).add(events).view()


def follow(rundir: RunDir, *, ranks: Collection[int] | None = None) -> RunView:
    """Read everything a run has written until now; `ranks` limits whose files are read."""
    try:
        max_steps = rundir.plan().train.max_steps
    except ColotrainError:
        max_steps = 0
    reader = EventReader(rundir, ranks=ranks)
    found = Fold(max_steps=max_steps).add(reader.poll())
    while reader.behind:
        found.add(reader.poll())
    return found.view()


def summary(view: RunView, plan: RunPlan, rundir: RunDir) -> dict[str, Any]:
    """The document `summary.json` of the design; numbers that JSON cannot hold are texts."""
    losses = [loss for _, loss in view.loss]
    tokens_per_s = overall_tokens_per_s(view)
    ideal = (view.world_size or plan.world_size) * (view.peak_flops_per_s or 0.0)
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
        "tokens_per_s": tokens_per_s,
        "mfu": plan.flops_per_token * tokens_per_s / ideal if ideal else 0.0,
        "memory": {
            "peak_by_rank": list(view.peak_by_rank),
            "ledger": to_plain(plan.memory),
            "predicted_peak": plan.memory.total,
        },
        "restarts": view.restarts,
        "plugin": plan.plugin.name,
        "time_to_first_step_s": view.time_to_first_step_s,
        "run_dir": str(rundir.path),
    }
    safe: dict[str, Any] = json_safe(document)
    return safe


def overall_tokens_per_s(view: RunView) -> float:
    """The median step's speed, without the steps that warm up; 0.0 where there is none."""
    steady = [value for _, value in view.throughput]
    return statistics.median(steady) if steady else view.tokens_per_s or 0.0


def _merge(attempts: Iterable[_Attempt], part: Callable[[_Attempt], dict[int, T]]) -> dict[int, T]:
    """`part` of every attempt by step: each keeps its past only up to the step it resumed from."""
    merged: dict[int, T] = {}
    for attempt in attempts:
        base = attempt.base()
        kept = {step: item for step, item in merged.items() if base is None or step <= base}
        merged = kept | part(attempt)
    return dict(sorted(merged.items()))


def _eta_s(pace_s: float | None, num_steps: int) -> float | None:
    return None if pace_s is None else pace_s * max(0, num_steps)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _by_rank(attempts: Iterable[dict[int, int]]) -> tuple[int, ...]:
    """The highest value of each rank; 0 for a rank that has said nothing."""
    highest: dict[int, int] = {}
    for values in attempts:
        for rank, value in values.items():
            highest[rank] = max(value, highest.get(rank, 0))
    return tuple(highest.get(rank, 0) for rank in range(max(highest, default=-1) + 1))


def _latest(attempts: list[_Attempt], kind: str) -> Event | None:
    found = [attempt.latest[kind] for attempt in attempts if kind in attempt.latest]
    return found[-1] if found else None


def _last_checkpoint(attempts: list[_Attempt]) -> Checkpoint | None:
    for attempt in reversed(attempts):
        event = attempt.latest.get("checkpoint") or attempt.latest.get("resumed")
        if event is not None:
            return Checkpoint.of(event)
    return None
