"""The first loss is plain torch's, whoever set a model's initial values, and where."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from colotrain.spec.plugins import ROWS
from tests.dist.random_constructors import compared
from tests.representatives import half_of_the_day

WITHIN = 1e-6
"""Largest relative difference of a loss in float32."""


def check(seeds: Sequence[int], plugins: list[str], ranks: tuple[int, ...], folder: Path) -> None:
    found = list(compared(seeds, plugins, ranks, folder))
    assert len(found) == len(seeds) * len(plugins) * len(ranks)
    assert not [text for text, off in found if off > WITHIN or not text.endswith("same")]


def test_first_losses_of_some_models(tmp_path: Path) -> None:
    check(range(6), ["zero3"], (2,), tmp_path)


@pytest.mark.slow
def test_first_losses_under_every_plugin(tmp_path: Path) -> None:
    check(half_of_the_day(range(6, 16)), list(ROWS), (1, 2), tmp_path)
