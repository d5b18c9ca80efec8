"""Small text charts: each function turns numbers into lines of a given width.

Meaning never depends on colour alone: levels are heights and states have symbols of their own. The
colours are those of Okabe and Ito ("Color Universal Design", 2008); the heat map uses colours of
cividis (Nuñez, Anderton and Renslow 2018), which colour-vision deficiency leaves distinguishable.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from typing import TypeVar

from rich.text import Text

from colotrain.events.gradients import BY_WEIGHT, Cell, Heat
from colotrain.show.formatting import clean, shortened

BLUE, ORANGE, SKY, GREEN = "#0072B2", "#E69F00", "#56B4E9", "#009E73"
YELLOW, VERMILLION, PURPLE = "#F0E442", "#D55E00", "#CC79A7"
SERIES = (SKY, ORANGE, GREEN, YELLOW, PURPLE, BLUE, VERMILLION)
CIVIDIS = ("#4a6a9c", "#5f7396", "#757b88", "#8b867f", "#a39476", "#bda565", "#d9b84d", "#fee838")

LEVELS = "▁▂▃▄▅▆▇█"
MARK = "◆"
BAD = "!"
SYMBOLS = {"frozen": "f", "unused": "u", "zero": "0", "nonfinite": BAD}
STATUS_STYLES = {
    "frozen": SKY,
    "unused": PURPLE,
    "zero": ORANGE,
    "nonfinite": f"bold {VERMILLION}",
}

T = TypeVar("T")
Pairs = Sequence[tuple[int, float]]


def chart(
    series: Pairs, marks: Pairs = (), *, width: int, height: int, log: bool = False
) -> list[Text]:
    """Draw `series` as columns, `height` lines high, with `marks` at their steps and values.

    `log` is ignored unless all values are above zero. A value that is not finite is drawn as `!`.
    """
    plot_width = max(1, width - 8)
    columns = _columns(series, plot_width)
    values = [v for v in (*columns, *(v for _, v in marks)) if math.isfinite(v)]
    if not values or height < 1:
        return [Text("nothing yet", style="dim")][: max(0, height)]
    log = log and min(values) > 0
    scale = _Scale(min(values), max(values), height, log=log)
    lines = [_chart_row(columns, row, scale) for row in range(height - 1, -1, -1)]
    first, last = series[0][0] if series else 0, series[-1][0] if series else 0
    for step, value in marks:
        if first <= step <= last and math.isfinite(value):
            _put(lines, _column_of(step, first, last, len(columns)), scale.row(value))
    labels = {0: scale.high, height - 1: scale.low} if height > 1 else {0: scale.high}
    return [_labelled(labels.get(i), line) for i, line in enumerate(lines)]


def spark(series: Pairs, *, width: int) -> Text:
    """Draw `series` as one line without labels."""
    columns = _columns(series, width)
    values = [value for value in columns if math.isfinite(value)]
    if not values:
        return Text()
    return _chart_row(columns, 0, _Scale(min(values), max(values), 1, log=False))


class _Scale:
    """Maps values to heights in eighths of a line, from the bottom."""

    def __init__(self, low: float, high: float, height: int, *, log: bool) -> None:
        self.low, self.high, self.height, self.log = low, high, height, log

    def eighths(self, value: float) -> int:
        at, low, high = ((math.log(x) if self.log else x) for x in (value, self.low, self.high))
        share = (at / 2 - low / 2) / (high / 2 - low / 2) if high > low else 0.5
        return 1 + round(share * (8 * self.height - 1))

    def row(self, value: float) -> int:
        return (self.eighths(value) - 1) // 8


def _columns(series: Pairs, width: int) -> list[float]:
    """Return the means of `width` equal parts; a part with a non-finite value is non-finite."""
    num = len(series)
    if num == 0:
        return []
    found: list[float] = []
    for i in range(width):
        start = i * num // width
        part = [value for _, value in series[start : max(start + 1, (i + 1) * num // width)]]
        found.append(sum(part) / len(part))
    return found


def _chart_row(columns: Sequence[float], row: int, scale: _Scale) -> Text:
    cells = []
    for value in columns:
        if not math.isfinite(value):
            cells.append((BAD if row == 0 else " ", STATUS_STYLES["nonfinite"]))
            continue
        filled = scale.eighths(value) - 8 * row
        cells.append((" " if filled <= 0 else LEVELS[min(filled, 8) - 1], SKY))
    return _line(cells)


def _line(cells: Iterable[tuple[str, str]]) -> Text:
    """Join (text, style) pairs into a line; neighbours of the same style become one span."""
    runs = groupby(cells, key=lambda cell: cell[1])
    return Text.assemble(*(("".join(text for text, _ in run), style) for style, run in runs))


def _column_of(step: int, first: int, last: int, width: int) -> int:
    return round((step - first) / max(1, last - first) * (width - 1))


def _put(lines: list[Text], column: int, row: int) -> None:
    """Replace one character by a mark; columns count from the left, rows from the bottom."""
    at = len(lines) - 1 - row
    line = lines[at]
    if column < len(line):
        lines[at] = Text.assemble(line[:column], (MARK, f"bold {ORANGE}"), line[column + 1 :])


def _labelled(value: float | None, line: Text) -> Text:
    label = "" if value is None else f"{value:.4g}"
    return Text.assemble((f"{label[:7]:>7} ", "dim"), line)


def bar(value: float, *, of: float, width: int, style: str = SKY, mark: float = 0) -> Text:
    """Draw a bar of `width`, full at `of`, with a vertical line at `mark`."""
    filled = round(width * max(0.0, min(1.0, value / of))) if of > 0 else 0
    filled = max(filled, 1 if value > 0 else 0)
    line = Text.assemble(("█" * filled, style), ("·" * (width - filled), "dim"))
    return _marked(line, mark, of=of)


def stacked_bar(
    parts: Sequence[tuple[str, float]], *, of: float, width: int, mark: float = 0
) -> Text:
    """Draw the sum of `parts` like `bar`, and divide the bar among the parts like `stacked`."""
    value = sum(size for _, size in parts)
    filled = max(1, round(width * min(1.0, value / of))) if of > 0 and value < math.inf else 0
    line = stacked(parts, width=filled).append("·" * (width - filled), "dim")
    return _marked(line, mark, of=of)


def _marked(line: Text, mark: float, *, of: float) -> Text:
    """Add a vertical line at `mark`, where the full width is `of`."""
    if not 0 < mark <= of:
        return line
    at = min(len(line) - 1, round(len(line) * mark / of))
    return Text.assemble(line[:at], ("│", f"bold {ORANGE}"), line[at + 1 :])


def stacked(parts: Sequence[tuple[str, float]], *, width: int) -> Text:
    """Draw one bar in which each part has its share, its first letter, and a colour."""
    total, line, done = sum(value for _, value in parts), Text(), 0.0
    if not 0 < total < math.inf:
        return line
    for i, (name, value) in enumerate(parts):
        start, done = round(width * done / total), done + value
        text = name[:1] * (round(width * done / total) - start)
        line.append(text, f"black on {SERIES[i % len(SERIES)]}")
    return line


SMALL = 0.5
"""Bars below this share of their limit are drawn on a smaller scale."""


def scale_of(most: float, limit: float) -> float:
    """Return the value at full bar width: the limit, or less if bars would be too short to see."""
    return max(limit, most, 1) if most >= SMALL * limit else max(1.5 * most, 1)


def heat_lines(heat: Heat, *, width: int, height: int) -> list[Text]:
    """Draw a line per layer or group of layers and a column per record, the newest rightmost."""
    if not heat.steps or height < 1:
        return [Text("no gradient records yet", style="dim")][: max(0, height)]
    layers = _grouped_layers(heat.layers, height)
    label_width = min(max(len(label) for label, _ in layers), max(6, width // 3))
    columns = _grouped(list(heat.cells), max(1, width - label_width - 1))
    wide = max(1, min(4, (width - label_width - 1) // len(columns)))
    table = [
        [
            _joined([cells[i] for cells in column for i in part if i < len(cells)])
            for column in columns
        ]
        for _, part in layers
    ]
    norms = [c.norm for row in table for c in row if c.norm is not None and c.norm > 0]
    low, high = (math.log(min(norms)), math.log(max(norms))) if norms else (0.0, 0.0)
    return [
        _heat_line(label, row, label_width, wide, low, high)
        for (label, _), row in zip(layers, table, strict=True)
    ]


def _heat_line(
    label: str, row: Sequence[Cell], label_width: int, wide: int, low: float, high: float
) -> Text:
    cells = [(f"{shortened(label, label_width):<{label_width}} ", "")]
    return _line([*cells, *(_cell(cell, wide, low, high) for cell in row)])


def _cell(cell: Cell, wide: int, low: float, high: float) -> tuple[str, str]:
    if cell.status != "trained":
        return SYMBOLS.get(cell.status, "?") * wide, STATUS_STYLES.get(cell.status, "")
    if cell.norm is None or cell.norm <= 0:
        return " " * wide, ""
    share = (math.log(cell.norm) - low) / (high - low) if high > low else 0.5
    level = min(7, max(0, int(share * 8)))
    return LEVELS[level] * wide, CIVIDIS[level]


def _grouped_layers(layers: Sequence[str], height: int) -> list[tuple[str, list[int]]]:
    groups = _grouped(list(range(len(layers))), height)
    more = [f"+{len(part) - 1}" if len(part) > 1 else "" for part in groups]
    return [(clean(layers[part[0]]) + plus, part) for part, plus in zip(groups, more, strict=True)]


def _grouped(items: list[T], most: int) -> list[list[T]]:
    """Split `items` into at most `most` consecutive groups of nearly equal length."""
    num = min(most, len(items))
    bounds = [i * len(items) // num for i in range(num + 1)]
    return [items[start:end] for start, end in pairwise(bounds)]


def _joined(cells: Sequence[Cell]) -> Cell:
    """Merge several layers or records: the most serious status, the largest norm."""
    found = {cell.status for cell in cells}
    status = next((status for status in BY_WEIGHT if status in found), "")
    norms = [cell.norm for cell in cells if cell.norm is not None]
    return Cell(status=status, norm=max(norms, default=None) if status == "trained" else None)


def heat_legend() -> Text:
    line = Text(f"{LEVELS[0]}{LEVELS[3]}{LEVELS[7]} norm (log)", no_wrap=True)
    for status, symbol in SYMBOLS.items():
        line.append(f"  {symbol} ", STATUS_STYLES[status])
        line.append("not finite" if status == "nonfinite" else status)
    return line
