"""A run's numbers for Prometheus, which asks the launcher for them on the loopback address.

The text has Prometheus' exposition format, version 0.0.4. Counters begin at zero with each launch,
as Prometheus expects of a process that was started again.
"""

from __future__ import annotations

import http.server
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from colotrain.addresses import LOOPBACK
from colotrain.events.event import Event
from colotrain.events.kinds import Step
from colotrain.events.view import ENDED, LIVE, RunView, unit
from colotrain.show.thread_warnings import ThreadWarnings
from colotrain.spec.plan import RunPlan

PATH = "/metrics"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MOST_CLIENTS = 16
CLIENT_S = 10.0
"""Seconds after which a client that sends nothing is left."""
PARTS = ("data", "compute", "reduce", "optimizer")
"""Parts of a step whose seconds a `Step` event has."""

Labels = tuple[tuple[str, str], ...]
Sample = tuple[str, Labels, float]
"""Suffix of the metric's name, labels, value."""


@dataclass(slots=True)
class Counts:
    """Sums over the steps of this launch, repeated ones included."""

    steps: int = 0
    tokens: float = 0.0
    seconds: float = 0.0
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    def add(self, step: Step) -> None:
        self.steps += 1
        self.tokens += step.tokens or 0.0
        self.seconds += step.step_s or 0.0
        for part in PARTS:
            self.parts[part] += getattr(step, f"{part}_s") or 0.0


@dataclass(frozen=True, slots=True)
class State:
    """What the metrics are computed from."""

    plan: RunPlan
    view: RunView
    counts: Counts


def _one(get: Callable[[State], float | None]) -> Callable[[State], Iterable[Sample]]:
    """Return a function to the metric's single sample; none while the value is not known."""

    def samples(state: State) -> Iterator[Sample]:
        value = get(state)
        if value is not None:
            yield "", (), value

    return samples


def _last(series: Sequence[tuple[int, float]]) -> float | None:
    return series[-1][1] if series else None


def _about(state: State) -> Iterator[Sample]:
    plan = state.plan
    labels = {
        "run": plan.name,
        "plugin": plan.plugin.name,
        "device": plan.cluster.device,
        "world_size": str(state.view.world_size or plan.world_size),
    }
    yield "", tuple(labels.items()), 1.0


def _status(state: State) -> Iterator[Sample]:
    for status in (*LIVE, *ENDED):
        yield "", (("status", status),), float(status == state.view.status)


def _step_seconds(state: State) -> Iterator[Sample]:
    yield "_sum", (), state.counts.seconds
    yield "_count", (), state.counts.steps


def _parts(state: State) -> Iterator[Sample]:
    for part, seconds in state.counts.parts.items():
        yield "", (("part", part),), seconds


def _tokens(state: State) -> Iterator[Sample]:
    yield "", (("unit", unit(state.view, state.plan)),), state.counts.tokens


def _by_rank(get: Callable[[RunView], Sequence[int]]) -> Callable[[State], Iterable[Sample]]:
    def samples(state: State) -> Iterator[Sample]:
        for rank, value in enumerate(get(state.view)):
            yield "", (("rank", str(rank)),), float(value)

    return samples


def _rank_steps(state: State) -> Iterator[Sample]:
    for rank in state.view.ranks:
        yield "", (("rank", str(rank.rank)),), float(rank.step)


METRICS: tuple[tuple[str, str, str, Callable[[State], Iterable[Sample]]], ...] = (
    ("run_info", "gauge", "The run; always 1.", _about),
    ("run_status", "gauge", "1 for the status that the run has, 0 for the others.", _status),
    ("step", "gauge", "Optimizer steps done.", _one(lambda s: s.view.steps)),
    ("max_steps", "gauge", "Steps of the whole run.", _one(lambda s: s.plan.train.max_steps)),
    ("loss", "gauge", "Loss of the last step.", _one(lambda s: _last(s.view.loss))),
    ("validation_loss", "gauge", "Last validation loss.", _one(lambda s: _last(s.view.evals))),
    ("learning_rate", "gauge", "Learning rate of the last step.", _one(lambda s: s.view.lr)),
    (
        "gradient_norm",
        "gauge",
        "Norm of the last step's gradient before clipping.",
        _one(lambda s: s.view.grad_norm),
    ),
    ("step_seconds", "summary", "Seconds of rank 0's steps.", _step_seconds),
    (
        "step_part_seconds_total",
        "counter",
        "Seconds of rank 0's steps by part; reduce is the wait for other ranks.",
        _parts,
    ),
    ("tokens_total", "counter", "Tokens (or the unit) trained on, repeated steps too.", _tokens),
    (
        "skipped_steps_total",
        "counter",
        "Steps without an update, because a value was not finite.",
        _one(lambda s: len(s.view.skipped_steps)),
    ),
    (
        "restarts_total",
        "counter",
        "Restarts of the workers.",
        _one(lambda s: s.view.restarts),
    ),
    (
        "checkpoint_step",
        "gauge",
        "Step of the newest checkpoint.",
        _one(lambda s: s.view.checkpoint.step if s.view.checkpoint else None),
    ),
    (
        "remaining_seconds",
        "gauge",
        "Estimated seconds to the end of the run.",
        _one(lambda s: s.view.eta_s),
    ),
    (
        "last_event_timestamp_seconds",
        "gauge",
        "Unix time of the last event.",
        _one(lambda s: s.view.last_event_at),
    ),
    (
        "memory_resident_bytes",
        "gauge",
        "Resident memory by rank.",
        _by_rank(lambda view: view.rss_by_rank),
    ),
    (
        "memory_peak_bytes",
        "gauge",
        "Peak memory by rank: on GPUs the device's, else the host's.",
        _by_rank(lambda view: view.peak_by_rank),
    ),
    ("rank_step", "gauge", "Last step that each rank has completed.", _rank_steps),
)
"""Name without `colotrain_`, type, help, and the samples."""


def render(state: State) -> str:
    """Return the metrics in Prometheus' text format; those without a value yet are left out."""
    lines = []
    for name, kind, about, samples in METRICS:
        full, found = f"colotrain_{name}", list(samples(state))
        if found:
            lines += [f"# HELP {full} {_escaped(about)}", f"# TYPE {full} {kind}"]
        for suffix, labels, value in found:
            inside = ",".join(f'{key}="{_quoted(text)}"' for key, text in labels)
            braces = f"{{{inside}}}" if inside else ""
            lines.append(f"{full}{suffix}{braces} {_number(value)}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _quoted(text: str) -> str:
    return _escaped(text).replace('"', r"\"")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)


class MetricsServer:
    """Answers Prometheus while a run goes on, if the plan has a port for that."""

    def __init__(self, plan: RunPlan) -> None:
        self._state = State(plan, RunView(), Counts())
        self._server: http.server.ThreadingHTTPServer | None = None
        self._warnings = ThreadWarnings()

    def __enter__(self) -> MetricsServer:
        port = self._state.plan.observe.metrics_port
        if port is None:
            return self
        try:
            self._server = _Server((LOOPBACK, port), _handler(lambda: render(self._state)))
        except OSError as error:
            self._warnings.add(f"observe.metrics_port={port}: {error.strerror}; no metrics")
            return self
        serve = self._server.serve_forever
        threading.Thread(target=serve, name="metrics", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def take(self, events: Sequence[Event], view: RunView) -> list[Event]:
        """Take the run's new state; return warnings as events of kind `note`."""
        counts = self._state.counts
        for event in events:
            if event.kind == Step.KIND and event.rank == 0:
                counts.add(Step.of(event))
        self._state = State(self._state.plan, view, counts)
        return self._warnings.take()


class _Server(http.server.ThreadingHTTPServer):
    """Answers `MOST_CLIENTS` at a time, a thread each, and closes further connections."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, *arguments: Any) -> None:
        self.places = threading.BoundedSemaphore(MOST_CLIENTS)
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self.places.acquire(blocking=False):
            return self.shutdown_request(request)
        try:
            return super().process_request(request, client_address)
        except BaseException:  # no thread could be started, as under `ulimit -u`
            self.places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that goes away or sends nonsense."""


def _handler(text: Callable[[], str]) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        timeout = CLIENT_S

        def do_GET(self) -> None:
            if self.path.partition("?")[0] != PATH:
                self.send_error(404)
                return
            body = text().encode()
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    return Handler
