"""Plots of runs with matplotlib: loss, gradient norms by layer, memory, throughput."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from colotrain.errors import ColotrainError
from colotrain.events.fold import follow
from colotrain.events.gradients import Heat
from colotrain.events.view import Series, peak_memory, planned_memory, unit
from colotrain.records import to_plain
from colotrain.rundir import RunDir
from colotrain.show.formatting import clean
from colotrain.spec.memory import MemoryBreakdown
from colotrain.spec.quantities import short_size

MOST_LABELS = 16
MIB, GIB = 1 << 20, 1 << 30
PROCESS = "process"
"""Category of a measured peak without a breakdown, for example if tiers on disk are used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """Data of one run that is plotted."""

    name: str
    unit: str
    """Unit of the loss and of the throughput."""
    loss: Series
    evals: Series
    throughput: Series
    heat: Heat
    predicted: dict[str, int]
    """Predicted bytes by category, of the rank with the highest peak."""
    measured: dict[str, int]
    """Measured bytes by category, of the rank with the highest peak; empty if unknown."""
    peak: int
    """Bytes of the highest measured peak; 0 if unknown."""


def read_curves(rundir: RunDir) -> Curves:
    """Return the curves of a run; raise `ColotrainError` if it has no step."""
    view = follow(rundir)
    if not view.loss:
        fix = "name another run: `colotrain runs` shows them"
        raise ColotrainError(f"{rundir.name} ({view.status}): has made no step", fix)
    of_peak = peak_memory(view) or MemoryBreakdown()
    peak = max(view.peak_by_rank, default=0)
    return Curves(
        name=clean(rundir.name),
        unit=unit(view, rundir.plan()),
        loss=view.loss,
        evals=view.evals,
        throughput=view.throughput,
        heat=view.heat,
        predicted=_sizes(planned_memory(rundir.plan())),
        measured=_sizes(of_peak) or ({PROCESS: peak} if peak else {}),
        peak=peak,
    )


def _sizes(breakdown: MemoryBreakdown) -> dict[str, int]:
    return {name: size for name, size in to_plain(breakdown).items() if size}


LARGEST = 1e150
"""What matplotlib can find ticks for."""


def draw(runs: Sequence[Curves]) -> Any:
    """Return a matplotlib Figure with all runs in the same axes. Raises ImportError without it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained")
    (loss, norms), (memory, speed) = figure.subplots(2, 2)
    draw_loss(loss, runs)
    if len(runs) == 1:
        draw_layers_over_steps(norms, runs[0])
    else:
        draw_layers_of_runs(norms, runs)
    draw_memory(memory, runs)
    draw_throughput(speed, runs)
    figure.suptitle(", ".join(run.name for run in runs), fontsize=10)
    return figure


def draw_loss(axes: Any, runs: Sequence[Curves]) -> None:
    """Plot training loss as a line and validation loss as dots of the same colour."""
    for run in runs:
        (line,) = axes.plot(*_points(run.loss), linewidth=1, label=run.name)
        if run.evals:
            axes.plot(*_points(run.evals), "o", color=line.get_color(), label="validation")
    _title(axes, "loss", x="step", y=_per(runs), legend=True)


def _per(runs: Sequence[Curves]) -> str:
    """Return the unit of the loss: nats for cross-entropy per token, else the model's own unit."""
    units = {run.unit.removesuffix("s") for run in runs}
    per = " or ".join(sorted(units))
    return "nats per token" if units == {"token"} else f"loss per {per}"


def _rate(runs: Sequence[Curves]) -> str:
    return " or ".join(sorted({run.unit for run in runs})) + " per second"


def draw_layers_over_steps(axes: Any, run: Curves) -> None:
    """Plot one line per layer, from the first (dark) to the last (light)."""
    from matplotlib import colormaps

    layers = run.heat.layers
    colours = colormaps["viridis"]
    for index, layer in enumerate(layers):
        pairs = [
            (step, cells[index].norm)
            for step, cells in zip(run.heat.steps, run.heat.cells, strict=True)
            if index < len(cells) and _drawable(cells[index].norm)
        ]
        if pairs:
            shown = layer if len(layers) <= MOST_LABELS or index % 8 == 0 else None
            place = colours(index / max(len(layers) - 1, 1))
            axes.plot(*_points(pairs), color=place, linewidth=1, marker=".", label=shown)
    _norms(axes, "gradient norms by layer", x="step", any_drawn=bool(axes.lines))


def draw_layers_of_runs(axes: Any, runs: Sequence[Curves]) -> None:
    """Plot the last record of each run, layer by layer."""
    layers = list(dict.fromkeys(layer for run in runs for layer in run.heat.layers))
    for run in runs:
        if not run.heat.cells:
            continue
        norms = dict(zip(run.heat.layers, run.heat.cells[-1], strict=False))
        pairs = [
            (index, norms[layer].norm)
            for index, layer in enumerate(layers)
            if layer in norms and _drawable(norms[layer].norm)
        ]
        label = f"{run.name}, step {run.heat.steps[-1]}"
        axes.plot(*_points(pairs), marker="o", linewidth=1, label=label)
    every = max(1, len(layers) // MOST_LABELS)
    places = range(0, len(layers), every)
    axes.set_xticks(list(places), [layers[i] for i in places], rotation=45, ha="right", fontsize=7)
    _norms(axes, "gradient norms by layer, last record", x="", any_drawn=bool(axes.lines))


def draw_memory(axes: Any, runs: Sequence[Curves]) -> None:
    """Plot two stacked bars of bytes by category per run: predicted and measured at the peak.

    The measured activations include everything that exists only within a step.
    """
    bars = [bar for run in runs for bar in _bars(run)]
    most = max((sum(sizes.values()) for _, sizes in bars), default=0)
    unit, label = (GIB, "GiB") if most >= GIB else (MIB, "MiB")
    below = [0.0] * len(bars)
    categories = [*(field.name for field in fields(MemoryBreakdown)), PROCESS]
    for category in (name for name in categories if any(name in sizes for _, sizes in bars)):
        sizes = [sizes.get(category, 0) / unit for _, sizes in bars]
        axes.bar(range(len(bars)), sizes, bottom=below, width=0.6, label=category)
        below = [a + b for a, b in zip(below, sizes, strict=True)]
    slanted = {"rotation": 30, "ha": "right"} if len(runs) > 2 else {}
    axes.set_xticks(range(len(bars)), [name for name, _ in bars], fontsize=7, **slanted)
    axes.set_xlim(-0.8, len(bars) + 0.6)  # room for the legend
    axes.set_ylim(0, 1.05 * most / unit or 1)
    _title(axes, "memory by category, of the rank that peaks", y=label, legend=True)


def _bars(run: Curves) -> list[tuple[str, dict[str, int]]]:
    """Return (label, bytes by category) of the run's two stacked bars."""
    predicted = sum(run.predicted.values())
    return [
        (f"{run.name}\npredicted\n{_size(predicted)}", run.predicted),
        (f"{run.name}\nmeasured\n{_size(run.peak)}", run.measured),
    ]


def _size(num_bytes: int) -> str:
    return short_size(num_bytes) if num_bytes else "not known"


def draw_throughput(axes: Any, runs: Sequence[Curves]) -> None:
    for run in runs:
        axes.plot(*_points(run.throughput), linewidth=1, label=run.name)
    axes.set_ylim(bottom=0)
    _title(axes, "throughput", x="step", y=_rate(runs), legend=len(runs) > 1)


def _norms(axes: Any, title: str, *, x: str, any_drawn: bool) -> None:
    if any_drawn:
        axes.set_yscale("log")
    else:
        text = "no gradient records: set observe.grads_every"
        axes.text(0.5, 0.5, text, ha="center", transform=axes.transAxes)
    _title(axes, title, x=x, y="norm", legend=any_drawn)


def _title(axes: Any, title: str, *, x: str = "", y: str = "", legend: bool = False) -> None:
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    if legend and axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7)


def _points(pairs: Sequence[tuple[Any, Any]]) -> tuple[list[Any], list[Any]]:
    """Return the two coordinates; a gap stands for what is too large for ticks."""
    high = [y if abs(y) <= LARGEST else math.nan for _, y in pairs]
    return [x for x, _ in pairs], high


def _drawable(norm: float | None) -> bool:
    return norm is not None and math.isfinite(norm) and norm > 0
