"""Ranges of numbers that settings may have. Standard library only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers that a setting may have."""

    expected: str
    """In words, as in `expected a number above 0`."""
    contains: Callable[[float], bool]


def at_least(least: float) -> Range:
    return Range(f"{least} or more", lambda value: value >= least)


ABOVE_ZERO = Range("a number above 0", lambda value: value > 0)
AT_LEAST_ZERO = at_least(0)
SHARE = Range("a number from 0 to 1", lambda value: 0 <= value <= 1)
