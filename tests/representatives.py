"""Parametrised tests of which `make test` runs a part: the other cases are marked slow."""

from __future__ import annotations

import os
import random
from collections.abc import Collection, Iterable
from typing import Any

import pytest

EVERY_COMBINATION = bool(os.environ.get("EVERY_COMBINATION"))
"""Whether whole products of values run, which take hours; else what was chosen from them."""


def representatives(values: Iterable[Any], *, kept: Collection[Any]) -> list[Any]:
    """Parameters of which those in `kept` run in `make test`, and the others in `make test-slow`.

    Their test ids are those of `values` themselves.
    """
    values = list(values)
    assert all(value in values for value in kept), kept
    return [v if v in kept else pytest.param(v, marks=pytest.mark.slow) for v in values]


def half_of_the_day(values: Iterable[Any], *, of: str = "") -> list[Any]:
    """Half of `values` in their order, another every day (and for another `of`).

    EVERY_COMBINATION=1 has all of them, and TESTS_DAY=2026-11-29 those of that day again.
    """
    values = list(values)
    draw = random.Random(f"{os.environ['TESTS_DAY']} {of} {len(values)}")
    half = set(draw.sample(range(len(values)), -(-len(values) // 2)))
    return [v for n, v in enumerate(values) if EVERY_COMBINATION or n in half]


def of_each_day(values: Iterable[Any], *, kept: Collection[Any]) -> list[Any]:
    """As `representatives`, for long tables: of what is not in `kept`, every day has a half."""
    values = list(values)
    todays = half_of_the_day(value for value in values if value not in kept)
    return representatives([v for v in values if v in kept or v in todays], kept=kept)


def selected(request: pytest.FixtureRequest, *names: str) -> set[tuple[Any, ...]]:
    """Values of the parameters `names` in those tests of the requesting module that will run.

    A fixture that carries out many cases at once leaves out those that no test asks for.
    """
    items = [item for item in request.session.items if item.module is request.module]  # type: ignore[attr-defined]
    every = [item.callspec.params for item in items if hasattr(item, "callspec")]
    return {tuple(params[n] for n in names) for params in every if params.keys() >= set(names)}


def any_without_parameters(request: pytest.FixtureRequest) -> bool:
    """Whether a test of the requesting module will run that has no parameters."""
    items = [item for item in request.session.items if item.module is request.module]  # type: ignore[attr-defined]
    return any(not hasattr(item, "callspec") for item in items)


def chosen(values: Iterable[Any], *, among: Collection[Any]) -> list[Any]:
    """Of `values`, those in `among`; with EVERY_COMBINATION=1 all."""
    values = list(values)
    assert all(value in values for value in among), among
    return [value for value in values if EVERY_COMBINATION or value in among]
