"""Killed at any moment, a run goes on with the same losses and leaves nothing behind."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.faults.kills import Kill, draw, history, inflict, straight
from tests.running import Colotrain


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return straight(Colotrain(tmp_path_factory.mktemp("straight")), "zero2")[1]


KILLS = [
    Kill(whom="rank 1", after_s=0.2),
    Kill(whom="launcher", after_s=0.3),
    Kill(whom="rank 0", rank=0, operation=4),
    Kill(whom="launcher", rank=0, operation=8),
    Kill(whom="rank 1", rank=1, operation=3),
    draw(random.Random(8), 1.0),
]


@pytest.mark.parametrize("kill", KILLS, ids=str)
def test_a_killed_run_goes_on_as_if_nothing_had_happened(
    tmp_path: Path, expected: list[float], kill: Kill
) -> None:
    colotrain = Colotrain(tmp_path)
    inflict(colotrain, "killed", "zero2", kill)
    assert history(colotrain, "killed") == expected
