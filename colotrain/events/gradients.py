"""Gradient records, by parameter and layer, from rank 0's `parameters` and `gradients` events.

A `parameters` event lists the parameter names once per attempt; each `gradients` event holds
columns in the order of these names. A damaged file raises no error: unreadable values are None.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from colotrain.events.log import Event, decode, event_files
from colotrain.rundir import RunDir

MOST_COLUMNS = 256
"""Maximum number of records in a heat map; a longer history is thinned out evenly."""
STATUSES = ("trained", "frozen", "unused", "zero", "nonfinite")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterGradient:
    """The gradient of one parameter in one step."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    status: str
    """One of `STATUSES`."""
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
    """Worst of the parameters' states: `nonfinite`, then `trained`, `zero`, `unused`, `frozen`."""
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

    names: Event | None = None
    newest: Event | None = None
    layers: dict[str, list[int]] = field(default_factory=dict)
    """Layer → column indices of its parameters."""
    columns: dict[int, tuple[Cell, ...]] = field(default_factory=dict)
    """Step → one cell per layer; every `stride`-th record is kept."""
    stride: int = 1
    seen: int = 0
    _shown: GradientRecord | None = None

    def add(self, event: Event) -> None:
        """Add a `parameters` or `gradients` event; ignore any other."""
        if event.kind == "parameters":
            self.names, self.layers = event, {}
            for index, name in enumerate(_texts(event, "names")):
                self.layers.setdefault(layer_of(name), []).append(index)
        elif event.kind == "gradients" and event.count("step") > 0:
            self.newest, self._shown = event, None
            if self.seen % self.stride == 0:
                self._append(event)
            self.seen += 1

    def _append(self, event: Event) -> None:
        statuses = _texts(event, "status")
        norms = _numbers(event, "norm", len(statuses))
        cells = [
            _cell([(statuses[i], norms[i]) for i in columns if i < len(statuses)])
            for columns in self.layers.values()
        ]
        self.columns[event.count("step")] = tuple(cells)
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
    by_weight = ("nonfinite", "trained", "zero", "unused")
    status = next((status for status in by_weight if status in found), "frozen")
    squares = [norm * norm for _, norm in parts if norm is not None and math.isfinite(norm)]
    return Cell(status=status, norm=math.sqrt(sum(squares)) if status == "trained" else None)


def record_of(names: Event, event: Event) -> GradientRecord:
    """Build the record of a `gradients` event; `names` is its attempt's `parameters` event."""
    known = _texts(names, "names")
    rows = zip(
        known,
        _lists(names, "shapes", len(known)),
        _padded(_texts(names, "dtypes"), len(known), ""),
        _padded(_texts(event, "status"), len(known), ""),
        *(_numbers(event, column, len(known)) for column in _COLUMNS),
        strict=True,
    )
    reasons, aliases = _mapping(event, "reason"), _mapping(names, "aliases")
    return GradientRecord(
        step=event.count("step"),
        attempt=event.attempt or 0,
        t=event.t,
        global_norm=event.number("global_norm"),
        clipped_to=event.number("clipped_to"),
        parameters=tuple(_parameter(row, reasons, aliases) for row in rows),
        noise=_noise(event, known),
    )


def _noise(event: Event, names: list[str]) -> NoiseRecord | None:
    if not isinstance(event.fields.get("noise"), dict):
        return None
    found = replace(event, fields=event.fields["noise"])
    columns = (_numbers(found, column, len(names)) for column in ("scales", "cosines"))
    pairs = zip(*columns, strict=True)
    return NoiseRecord(
        scale=found.number("scale"),
        cosine=found.number("cosine"),
        micro_batches=found.count("micro_batches"),
        samples=found.count("samples"),
        parameters={
            name: Noise(scale=scale, cosine=cosine)
            for name, (scale, cosine) in zip(names, pairs, strict=True)
        },
    )


_COLUMNS = ("norm", "rms", "max_abs", "zero_fraction", "nonfinite", "update_ratio")


def _parameter(
    row: tuple[Any, ...], reasons: dict[str, Any], aliases: dict[str, Any]
) -> ParameterGradient:
    name, shape, dtype, status, norm, rms, max_abs, zero_fraction, nonfinite, update_ratio = row
    reason, others = reasons.get(name), aliases.get(name)
    return ParameterGradient(
        name=name,
        shape=tuple(size for size in shape if isinstance(size, int)),
        dtype=dtype,
        status=status,
        reason=None if reason is None else str(reason),
        norm=norm,
        rms=rms,
        max_abs=max_abs,
        zero_fraction=zero_fraction,
        nonfinite=int(nonfinite) if nonfinite is not None and math.isfinite(nonfinite) else 0,
        update_ratio=update_ratio,
        aliases=tuple(str(other) for other in others) if isinstance(others, list) else (),
    )


def _padded(values: list[Any], length: int, blank: Any) -> list[Any]:
    return [*values[:length], *[blank] * (length - len(values))]


def _texts(event: Event, name: str) -> list[str]:
    values = event.fields.get(name)
    return [str(value) for value in values] if isinstance(values, list) else []


def _numbers(event: Event, name: str, length: int) -> list[float | None]:
    values = event.fields.get(name)
    found = values if isinstance(values, list) else []
    numbers = [float(v) if isinstance(v, int | float) else None for v in found]
    return _padded(numbers, length, None)


def _lists(event: Event, name: str, length: int) -> list[list[Any]]:
    values = event.fields.get(name)
    found = [v if isinstance(v, list) else [] for v in values] if isinstance(values, list) else []
    return _padded(found, length, [])


def _mapping(event: Event, name: str) -> dict[str, Any]:
    value = event.fields.get(name)
    return value if isinstance(value, dict) else {}


def records(rundir: RunDir) -> Iterator[GradientRecord]:
    """Yield all gradient records of a run by step, without those that a later attempt replaced."""
    files = [(path, attempt) for path, rank, attempt in event_files(rundir, ranks={0}) if rank == 0]
    limits = _limits([path for path, _ in files])
    for (path, attempt), limit in zip(files, limits, strict=True):
        names = None
        for event in _events(path, ("parameters", "gradients"), attempt):
            if event.kind == "parameters":
                names = event
            elif names is not None and 0 < event.count("step") <= limit:
                yield record_of(names, event)


def losses(rundir: RunDir) -> Iterator[tuple[int, float | None]]:
    """Yield (step, loss) of a run by step, without steps that a later attempt replaced."""
    files = [(path, attempt) for path, rank, attempt in event_files(rundir, ranks={0}) if rank == 0]
    for (path, attempt), limit in zip(files, _limits([path for path, _ in files]), strict=True):
        for event in _events(path, ("step",), attempt):
            if 0 < event.count("step") <= limit:
                yield event.count("step"), event.number("loss")


def _limits(paths: Sequence[Path]) -> list[float]:
    """Return the last step of each attempt that no later attempt replaced."""
    limits, limit = [], math.inf
    for path in reversed(paths):
        limits.append(limit)
        started = next(_events(path, ("started", "resumed"), None), None)
        if started is not None:
            limit = min(limit, started.count("step"))
    return limits[::-1]


def _events(path: Path, kinds: tuple[str, ...], attempt: int | None) -> Iterator[Event]:
    """Yield the events of `kinds`; skip other lines without parsing them."""
    marks = [f'"{kind}"'.encode() for kind in kinds]
    try:
        with path.open("rb") as file:
            for line in file:
                head = line[:200]
                if not line.endswith(b"\n") or not any(mark in head for mark in marks):
                    continue
                event = decode(line, rank=0, attempt=attempt)
                if event is not None and event.kind in kinds:
                    yield event
    except OSError:  # the run is being deleted
        return
