"""Gradient records, by parameter and layer, from rank 0's `parameters` and `gradients` events.

A `parameters` event lists the parameter names once per attempt; each `gradients` event holds
columns in the order of these names. A damaged file raises no error: unreadable values are None.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from colotrain.events.event import READ_ONLY, Event, EventKind, event_kind
from colotrain.events.kinds import Resumed, Step, WorkerStarted
from colotrain.events.log import decode, event_files, lines_of
from colotrain.rundir import RunDir

BY_WEIGHT = ("nonfinite", "trained", "zero", "unused", "frozen")
"""Statuses of gradients, the most serious first; several parameters have the first of theirs."""
MOST_COLUMNS = 256
"""Maximum number of records in a heat map; a longer history is thinned out evenly."""
T = TypeVar("T")


@event_kind("parameters")
class Parameters(EventKind):
    """The parameters of an attempt, in the order of the columns of its `Gradients`."""

    names: list[str]
    shapes: list[list[int]]
    dtypes: list[str]
    aliases: dict[str, list[str]]
    stages: dict[str, list[int]] | None = None
    """Pipeline stages that hold each parameter; None where each rank has all blocks."""


@event_kind("gradients")
class Gradients(EventKind):
    """The gradients of one step as columns; `ParameterGradient` says what each holds."""

    attempt: int = field(default=0, metadata=READ_ONLY)
    step: int
    global_norm: float | None
    clipped_to: float | None
    status: list[str]
    reason: dict[str, str]
    norm: list[float | None]
    rms: list[float | None]
    max_abs: list[float | None]
    zero_fraction: list[float | None]
    nonfinite: list[int]
    update_ratio: list[float | None]
    noise: dict[str, Any] | None = None
    """Fields of `NoiseColumns`; None unless noise was measured."""


@event_kind("noise")
class NoiseColumns(EventKind):
    """Gradient noise in a `Gradients` event, as columns; `NoiseRecord` says what they hold."""

    micro_batches: int
    samples: int
    scale: float | None
    cosine: float | None
    scales: list[float | None]
    cosines: list[float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterGradient:
    """The gradient of one parameter in one step."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    status: str
    """One of `BY_WEIGHT`."""
    reason: str | None
    norm: float | None
    rms: float | None
    max_abs: float | None
    zero_fraction: float | None
    nonfinite: int
    """Number of elements that are not finite."""
    update_ratio: float | None
    """Norm of the optimizer's change over the norm of the parameter."""
    aliases: tuple[str, ...]
    stages: tuple[int, ...] = ()
    """Pipeline stages that hold it; empty where each rank has all blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """How well the gradients of single micro-batches agree; None where that is unknown."""

    scale: float | None
    """Gradient noise scale in samples: larger batches pay up to about this size."""
    cosine: float | None
    """Mean cosine similarity between the gradients of two micro-batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseRecord(Noise):
    """Gradient noise of one step: over all parameters and per parameter."""

    micro_batches: int
    """Number of micro-batches, summed over all ranks."""
    samples: int
    """Samples per micro-batch."""
    parameters: dict[str, Noise]


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientRecord:
    """All gradients of one step, before clipping."""

    step: int
    attempt: int
    t: float
    global_norm: float | None
    clipped_to: float | None
    """Norm after clipping; None if nothing was clipped."""
    parameters: tuple[ParameterGradient, ...]
    """Gradients in the model's parameter order."""
    noise: NoiseRecord | None = None
    """Gradient noise; None unless it was measured in this step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """The gradient of one layer in one step."""

    status: str
    """The parameters' first status in `BY_WEIGHT`."""
    norm: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Heat:
    """Layers × steps: `cells[i]` has the cells of step `steps[i]`, in the order of `layers`."""

    layers: tuple[str, ...] = ()
    steps: tuple[int, ...] = ()
    cells: tuple[tuple[Cell, ...], ...] = ()


@dataclass(slots=True, kw_only=True)
class GradientHistory:
    """The gradient records of one attempt, in bounded memory."""

    names: Parameters | None = None
    newest: Gradients | None = None
    layers: dict[str, list[int]] = field(default_factory=dict)
    """Layer → column indices of its parameters."""
    columns: dict[int, tuple[Cell, ...]] = field(default_factory=dict)
    """Step → one cell per layer; every `stride`-th record is kept."""
    stride: int = 1
    seen: int = 0
    _shown: GradientRecord | None = None

    def add(self, event: Event) -> None:
        """Add a `parameters` or `gradients` event; ignore any other."""
        if event.kind == Parameters.KIND:
            self.names, self.layers = Parameters.of(event), {}
            for index, name in enumerate(self.names.names):
                self.layers.setdefault(layer_of(name), []).append(index)
        elif event.kind == Gradients.KIND and (newest := Gradients.of(event)).step > 0:
            self.newest, self._shown = newest, None
            if self.seen % self.stride == 0:
                self._append(newest)
            self.seen += 1

    def _append(self, gradients: Gradients) -> None:
        statuses = gradients.status
        norms = _padded(gradients.norm, len(statuses), None)
        cells = [
            _cell([(statuses[i], norms[i]) for i in columns if i < len(statuses)])
            for columns in self.layers.values()
        ]
        self.columns[gradients.step] = tuple(cells)
        if len(self.columns) > MOST_COLUMNS:
            self.columns = dict(list(self.columns.items())[::2])
            self.stride *= 2

    def record(self) -> GradientRecord | None:
        """Return the newest record, or None."""
        if self._shown is None and self.names is not None and self.newest is not None:
            self._shown = record_of(self.names, self.newest)
        return self._shown


def layer_of(name: str) -> str:
    """Return the module's name up to its first number: `blocks.3` of `blocks.3.attn.wq.weight`."""
    module, _, _ = name.rpartition(".")
    parts = (module or name).split(".")
    numbers = [i for i, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[: numbers[0] + 1] if numbers else parts)


def _cell(parts: Sequence[tuple[str, float | None]]) -> Cell:
    found = {status for status, _ in parts}
    status = next((status for status in BY_WEIGHT if status in found), "frozen")
    squares = [norm * norm for _, norm in parts if norm is not None and math.isfinite(norm)]
    return Cell(status=status, norm=math.sqrt(sum(squares)) if status == "trained" else None)


_BLANKS: dict[str, Any] = {
    "status": "",
    "norm": None,
    "rms": None,
    "max_abs": None,
    "zero_fraction": None,
    "nonfinite": 0,
    "update_ratio": None,
}
"""Column of `Gradients` → value of a parameter that it lacks."""


def record_of(names: Parameters, gradients: Gradients) -> GradientRecord:
    """Build the record of a step; `names` are the parameters of its attempt."""
    num = len(names.names)
    rows = zip(
        names.names,
        _padded(names.shapes, num, []),
        _padded(names.dtypes, num, ""),
        zip(*(_padded(getattr(gradients, n), num, v) for n, v in _BLANKS.items()), strict=True),
        strict=True,
    )
    return GradientRecord(
        step=gradients.step,
        attempt=gradients.attempt,
        t=gradients.t,
        global_norm=gradients.global_norm,
        clipped_to=gradients.clipped_to,
        parameters=tuple(
            ParameterGradient(
                name=name,
                shape=tuple(shape),
                dtype=dtype,
                reason=gradients.reason.get(name),
                aliases=tuple(names.aliases.get(name, ())),
                stages=tuple((names.stages or {}).get(name, ())),
                **dict(zip(_BLANKS, values, strict=True)),
            )
            for name, shape, dtype, values in rows
        ),
        noise=None if gradients.noise is None else _noise(gradients.noise, names.names),
    )


def _noise(fields: dict[str, Any], names: list[str]) -> NoiseRecord:
    found = NoiseColumns.of(Event(kind=NoiseColumns.KIND, t=0.0, fields=fields))
    scales, cosines = (_padded(v, len(names), None) for v in (found.scales, found.cosines))
    return NoiseRecord(
        scale=found.scale,
        cosine=found.cosine,
        micro_batches=found.micro_batches,
        samples=found.samples,
        parameters={
            name: Noise(scale=scale, cosine=cosine)
            for name, scale, cosine in zip(names, scales, cosines, strict=True)
        },
    )


def _padded(values: list[T], length: int, blank: T) -> list[T]:
    return [*values[:length], *[blank] * (length - len(values))]


def records(rundir: RunDir) -> Iterator[GradientRecord]:
    """Yield all gradient records of a run by step, without those that a later attempt replaced."""
    files = [(path, attempt) for path, rank, attempt in event_files(rundir, ranks={0}) if rank == 0]
    limits = _limits(rundir, [path for path, _ in files])
    for (path, attempt), limit in zip(files, limits, strict=True):
        names = None
        for event in _events(rundir, path, (Parameters.KIND, Gradients.KIND), attempt):
            if event.kind == Parameters.KIND:
                names = Parameters.of(event)
            elif names and 0 < (gradients := Gradients.of(event)).step <= limit:
                yield record_of(names, gradients)


def losses(rundir: RunDir) -> Iterator[tuple[int, float | None]]:
    """Yield (step, loss) of a run by step, without steps that a later attempt replaced."""
    files = [(path, attempt) for path, rank, attempt in event_files(rundir, ranks={0}) if rank == 0]
    limits = _limits(rundir, [path for path, _ in files])
    for (path, attempt), limit in zip(files, limits, strict=True):
        for event in _events(rundir, path, (Step.KIND,), attempt):
            if 0 < (step := Step.of(event)).step <= limit:
                yield step.step, step.loss


def _limits(rundir: RunDir, paths: Sequence[Path]) -> list[float]:
    """Return the last step of each attempt that no later attempt replaced."""
    limits, limit = [], math.inf
    for path in reversed(paths):
        limits.append(limit)
        started = next(_events(rundir, path, (WorkerStarted.KIND, Resumed.KIND), None), None)
        if started is not None:
            limit = min(limit, WorkerStarted.of(started).step)
    return limits[::-1]


def _events(
    rundir: RunDir, path: Path, kinds: tuple[str, ...], attempt: int | None
) -> Iterator[Event]:
    """Yield the events of `kinds`; skip other lines without parsing them."""
    marks = [f'"{kind}"'.encode() for kind in kinds]
    try:
        for line in lines_of(path, rundir.open):
            head = line[:200]
            if not any(mark in head for mark in marks):
                continue
            event = decode(line, rank=0, attempt=attempt)
            if event is not None and event.kind in kinds:
                yield event
    except OSError:  # the run is being deleted
        return
