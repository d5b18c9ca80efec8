"""Bytes and seconds as text: with a space in sentences and tables, short in narrow columns."""

from __future__ import annotations

import math


def as_float(value: float) -> float:
    """Return a number as a float: infinity for integers of hundreds of digits, as in files."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def format_size(num_bytes: float) -> str:
    """Format `1536` as `1.5 KiB`, with three significant digits."""
    size, units = as_float(num_bytes), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.3g} {units[0]}"


def format_seconds(seconds: float) -> str:
    """Format seconds as `85 ms`, `1.25 s`, `20 min`, `10.5 h`, `46.3 days`."""
    seconds = as_float(seconds)
    if seconds < 0.9995:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        return f"{seconds / 60:.3g} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.3g} h"
    days = seconds / 86400
    return f"{days:,.0f} days" if 100 <= days < 1e9 else f"{days:.3g} days"


def short_size(num_bytes: float) -> str:
    """Format bytes for a narrow column, as `512MiB`, `1.5GiB`; `-` for 0."""
    num_bytes, units = as_float(num_bytes), ["TiB", "GiB", "MiB", "KiB", "B"]
    while num_bytes >= 1024 and len(units) > 1:
        num_bytes /= 1024
        units.pop()
    number = f"{num_bytes:.0f}" if num_bytes >= 100 else f"{num_bytes:.1f}".removesuffix(".0")
    return number + units[-1] if num_bytes > 0 else "-"


def short_duration(seconds: float | None) -> str:
    """Format seconds for a narrow column, as `0.4s`, `12s`, `1m20s`, `2d04h`; `-` if unknown."""
    if seconds is None or not math.isfinite(seconds := as_float(seconds)):
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
