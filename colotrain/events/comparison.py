"""Comparison of two runs: the first step whose losses or gradients differ."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from colotrain.events.gradients import GradientRecord, ParameterGradient, losses, records
from colotrain.rundir import RunDir

COMPARED = ("norm", "max_abs", "update_ratio")
NOISE = 1e-7
"""Norms below this share of the global norm count as single-precision rounding errors."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first loss or gradient in which two runs differ."""

    step: int
    parameter: str | None
    """Name of the parameter; None if the losses differ."""
    field: str
    values: tuple[float | str | None, float | str | None]
    num_parameters: int = 0
    """Number of parameters that differ in this record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Result of comparing two runs over the steps that both have."""

    losses: int
    """Number of steps whose losses were compared."""
    records: int
    """Number of gradient records that were compared."""
    loss: Difference | None
    gradient: Difference | None

    @property
    def first(self) -> Difference | None:
        """Earlier difference; the loss if both are in the same step, for it is computed first."""
        found = [part for part in (self.loss, self.gradient) if part is not None]
        return min(found, key=lambda part: part.step, default=None)


def compare(first: RunDir, second: RunDir, *, tolerance: float) -> Comparison:
    """Compare two runs; `tolerance` is relative to the larger of two values."""
    num_losses, loss = 0, None
    for step, ours, theirs in _joined(losses(first), losses(second)):
        num_losses += 1
        if not _same(ours, theirs, tolerance):
            loss = Difference(step=step, parameter=None, field="loss", values=(ours, theirs))
            break
    num_records, gradient = 0, None
    by_step = [((r.step, r) for r in records(rundir)) for rundir in (first, second)]
    for _, our_record, their_record in _joined(*by_step):
        num_records += 1
        if (gradient := compare_records(our_record, their_record, tolerance)) is not None:
            break
    return Comparison(losses=num_losses, records=num_records, loss=loss, gradient=gradient)


def compare_records(
    ours: GradientRecord, theirs: GradientRecord, tolerance: float
) -> Difference | None:
    """Return the first parameter, in model order, whose gradients differ."""
    other = {row.name: row for row in theirs.parameters}
    noise = NOISE * max(ours.global_norm or 0.0, theirs.global_norm or 0.0)
    pairs = [(row, other.get(row.name)) for row in ours.parameters]
    found = [d for row, their in pairs if (d := _row(row, their, tolerance, noise))]
    missing = [name for name in other if name not in {row.name for row in ours.parameters}]
    found += [(name, "name", (None, name)) for name in missing]
    if not found:
        return None
    name, field, values = found[0]
    return Difference(
        step=ours.step, parameter=name, field=field, values=values, num_parameters=len(found)
    )


_Found = tuple[str, str, tuple[float | str | None, float | str | None]]


def _row(
    ours: ParameterGradient, theirs: ParameterGradient | None, tolerance: float, noise: float
) -> _Found | None:
    if theirs is None:
        return ours.name, "name", (ours.name, None)
    if ours.shape != theirs.shape:
        return ours.name, "shape", (str(ours.shape), str(theirs.shape))
    if ours.status != theirs.status:
        return ours.name, "status", (ours.status, theirs.status)
    if (ours.norm or 0.0) <= noise and (theirs.norm or 0.0) <= noise:
        return None
    for field in COMPARED:
        pair = getattr(ours, field), getattr(theirs, field)
        if not _same(*pair, tolerance):
            return ours.name, field, pair
    return None


def _same(ours: float | None, theirs: float | None, tolerance: float) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    if not (math.isfinite(ours) and math.isfinite(theirs)):
        return str(ours) == str(theirs)
    return abs(ours - theirs) <= tolerance * max(abs(ours), abs(theirs))


def _joined(
    first: Iterator[tuple[int, T]], second: Iterator[tuple[int, T]]
) -> Iterator[tuple[int, T, T]]:
    """Yield (step, first's item, second's item) for the steps that both sorted iterators have."""
    ours, theirs = next(first, None), next(second, None)
    while ours is not None and theirs is not None:
        if ours[0] == theirs[0]:
            yield ours[0], ours[1], theirs[1]
        behind = ours[0] <= theirs[0], theirs[0] <= ours[0]
        ours = next(first, None) if behind[0] else ours
        theirs = next(second, None) if behind[1] else theirs
