"""Other people's idioms: each trains right, is refused, or says what it does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.running import Colotrain, losses

OF_TOKENS = (
    "model.target=tests.dist.idioms:HalfLoss",
    "data.target=tests.dist.idioms:tokens",
    "train.global_batch=16",
    "train.micro_batch=4",
    "train.max_steps=3",
    "train.eval_steps=0",
    "optim.name=sgd",
    "optim.lr=0.1",
    "optim.schedule.name=constant",
    "cluster.procs_per_node=2",
)


@pytest.fixture
def here(colotrain: Colotrain, monkeypatch: pytest.MonkeyPatch) -> Colotrain:
    """A command line that finds these tests' modules."""
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in paths if path))
    return colotrain


def test_a_half_precision_mean_loss_is_weighted_in_float32(here: Colotrain) -> None:
    full = here.run(*OF_TOKENS)
    half = here.run(*OF_TOKENS, "train.precision=fp16", "name=half")
    steps = [e.fields["skipped"] for e in here.events("half") if e.kind == "step" and e.rank == 0]
    assert steps == [False] * 3
    assert losses(half) == pytest.approx(losses(full), rel=2e-3)
