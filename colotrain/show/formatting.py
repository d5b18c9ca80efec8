"""Numbers, sizes, times and texts as people read them."""

from __future__ import annotations

import json
import math
from typing import Any

from colotrain.spec.plan import TrainPlan


def shown(value: Any, form: str) -> str:
    """A number in the format `form`, `-` where there is none; "nan" and "inf" as they are."""
    if isinstance(value, int | float):
        return format(value, form)
    return "-" if value is None else clean(str(value))


def format_bytes(num_bytes: float) -> str:
    """`512MiB`, `1.5GiB`; `-` for nothing."""
    units = ["TiB", "GiB", "MiB", "KiB", "B"]
    while num_bytes >= 1024 and len(units) > 1:
        num_bytes /= 1024
        units.pop()
    number = f"{num_bytes:.0f}" if num_bytes >= 100 else f"{num_bytes:.1f}".removesuffix(".0")
    return number + units[-1] if num_bytes > 0 else "-"


def format_duration(seconds: float | None) -> str:
    """`0.4s`, `12s`, `1m20s`, `3h05m`, `2d04h`; `-` where it is not known."""
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
    """`2.31/3`: how many epochs were trained, where it is known what one is."""
    return (
        f"{step / train.epoch_steps:.2f}/{train.epochs or train.max_steps / train.epoch_steps:.4g}"
    )


def clean(text: str) -> str:
    """`text` as one line without control characters: causes hold whatever a worker raised."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def quoted(value: Any) -> str:
    """A value of a `name=value` pair, in quotes where it would not be one word."""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = clean(str(value))
    return json.dumps(text, ensure_ascii=False) if set(text) & set(' "=') or not text else text


def shortened(name: str, width: int) -> str:
    """Both ends of a name: `blocks.3.a…query.weight`."""
    if len(name) <= width:
        return name
    front = (width - 1) // 2
    return f"{name[:front]}…{name[front + 1 - width :]}"
