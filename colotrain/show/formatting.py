"""Formatting of numbers, sizes, times and texts for people."""

from __future__ import annotations

import json
import math
from typing import Any

from colotrain.spec.plan import TrainPlan


def shown(value: Any, form: str) -> str:
    """Format a number as `form`, None as `-`; "nan", "inf" and other texts stay as they are."""
    if isinstance(value, int | float):
        return format(value, form)
    return "-" if value is None else clean(str(value))


def format_bytes(num_bytes: float) -> str:
    """Format bytes as `512MiB`, `1.5GiB`; `-` for 0."""
    units = ["TiB", "GiB", "MiB", "KiB", "B"]
    while num_bytes >= 1024 and len(units) > 1:
        num_bytes /= 1024
        units.pop()
    number = f"{num_bytes:.0f}" if num_bytes >= 100 else f"{num_bytes:.1f}".removesuffix(".0")
    return number + units[-1] if num_bytes > 0 else "-"


def format_duration(seconds: float | None) -> str:
    """Format seconds as `0.4s`, `12s`, `1m20s`, `3h05m`, `2d04h`; `-` if unknown."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if seconds < 9.95:
        return f"{max(seconds, 0):.1f}".removesuffix(".0") + "s"
    minutes, rest_s = divmod(round(seconds), 60)
    hours, rest_minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24}d{hours % 24:02d}h"
    if hours:
        return f"{hours}h{rest_minutes:02d}m"
    return f"{minutes}m{rest_s:02d}s" if minutes else f"{rest_s}s"


def epoch(step: int, train: TrainPlan) -> str:
    """Format the number of trained epochs as `2.31/3`; `train.epoch_steps` must be known."""
    return (
        f"{step / train.epoch_steps:.2f}/{train.epochs or train.max_steps / train.epoch_steps:.4g}"
    )


def clean(text: str) -> str:
    """Return `text` as one line without control characters: causes contain workers' output."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def quoted(value: Any) -> str:
    """Format the value of a `name=value` pair, with quotes unless it is a single word."""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = clean(str(value))
    return json.dumps(text, ensure_ascii=False) if set(text) & set(' "=') or not text else text


def shortened(name: str, width: int) -> str:
    """Shorten a name in the middle: `blocks.3.a…query.weight`."""
    if len(name) <= width:
        return name
    front = (width - 1) // 2
    return f"{name[:front]}…{name[front + 1 - width :]}"
