"""Ratios of sketches: by which factor one set of gradients is another. Without torch."""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Mapping, Sequence

Sketch = list[float]
CLOSE = 2e-3
"""Relative difference that rounding explains, also of autocast and of another order of sums."""


def unpacked(text: str) -> Sketch:
    """Return the sketch that `sketch.packed` wrote."""
    found = array("d")
    found.frombytes(base64.b64decode(text))
    return found.tolist()


def mean(sketches: Sequence[Mapping[str, Sketch]]) -> dict[str, Sketch]:
    """Return the mean of the ranks' sketches, of the parameters that all of them have."""
    names = [name for name in sketches[0] if all(name in other for other in sketches)]
    return {
        name: [
            sum(values) / len(sketches) for values in zip(*(s[name] for s in sketches), strict=True)
        ]
        for name in names
    }


def norm(values: Mapping[str, Sketch]) -> float:
    return math.sqrt(sum(v * v for each in values.values() for v in each))


def differs(one: Sketch, other: Sketch) -> float:
    """Return the norm of the difference, relative to that of the other."""
    return math.dist(one, other) / (math.hypot(*other) or 1.0)


def ratio(found: Mapping[str, Sketch], wanted: Mapping[str, Sketch]) -> tuple[float, float]:
    """Return the factor by which `found` is `wanted`, by least squares, and what is left.

    What is left is the largest remaining difference of one parameter, relative to the norm of
    `wanted`; nan where `wanted` is zero.
    """
    names = [name for name in wanted if name in found]
    square = sum(v * v for name in names for v in wanted[name])
    if not square or not math.isfinite(square):
        return math.nan, math.nan
    product = sum(a * b for n in names for a, b in zip(found[n], wanted[n], strict=True))
    factor = product / square
    left = max(
        math.sqrt(sum((a - factor * b) ** 2 for a, b in zip(found[n], wanted[n], strict=True)))
        for n in names
    )
    return factor, left / math.sqrt(square)


def near(value: float, wanted: float) -> bool:
    return math.isfinite(value) and abs(value - wanted) <= CLOSE * abs(wanted)
