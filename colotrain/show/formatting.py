"""Formatting of numbers and texts for people."""

from __future__ import annotations

import json
import re
from typing import Any

from colotrain.errors import one_line
from colotrain.spec.plan import TrainPlan
from colotrain.spec.quantities import as_float


def shown(value: Any, form: str) -> str:
    """Format a number as `form`, None as `-`; "nan", "inf" and other texts stay as they are."""
    if isinstance(value, int | float):
        return format(value if form == "d" else as_float(value), form)
    return "-" if value is None else clean(str(value))


def shown_loss(value: Any) -> str:
    """Format a loss as `shown` does, with four decimals; as a power of ten where it diverged."""
    diverged = isinstance(value, int | float) and abs(value) >= 1e6
    return shown(value, ".4g" if diverged else ".4f")


def epoch(step: int, train: TrainPlan) -> str:
    """Format the number of trained epochs as `2.31/3`; `train.epoch_steps` must be known."""
    return (
        f"{step / train.epoch_steps:.2f}/{train.epochs or train.max_steps / train.epoch_steps:.4g}"
    )


clean = one_line
"""What prints foreign text: causes contain workers' output."""


def quoted(value: Any) -> str:
    """Format the value of a `name=value` pair, with quotes unless it is a single word."""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = clean(str(value))
    return json.dumps(text, ensure_ascii=False) if set(text) & set(' "=') or not text else text


def shortened(name: str, width: int) -> str:
    """Shorten a name in the middle, but keep its first number: `model.layers.10…q_proj.weight`."""
    if len(name) <= width:
        return name
    front, number = name[: (width - 1) // 2], re.search(r"\.\d+(?=\.)", name)
    if number and number.end() > len(front):
        most = 2 * width // 3
        front = name[: number.end()]
        front = front if len(front) <= most else f"…{front[1 - most :]}"
    return f"{front}…{name[len(front) + 1 - width :]}"
