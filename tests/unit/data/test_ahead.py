"""Micro-batches that other processes read are those that the rank would have read itself."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from colotrain.data.read.ahead import AheadLoader
from colotrain.data.read.loader import BatchLoader, SampleOrder
from colotrain.errors import ConfigError
from colotrain.spec.plan import BatchPlan

BATCH = BatchPlan(global_batch=12, micro_batch=2, accumulation_steps=3, data_parallel=2)


class Numbers:
    """Sample i is i; `drawn` is a sum of what the three generators give."""

    def __init__(self, draws: bool = False, bad: int = -1, pids: Path | None = None) -> None:
        self.draws, self.bad, self.pids = draws, bad, pids

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == self.bad:
            raise KeyError("no such thing")
        if self.pids is not None:
            (self.pids / str(os.getpid())).touch()
        drawn = float(torch.rand(())) + random.random() + np.random.rand() if self.draws else 0.0
        return {"x": torch.tensor([index]), "drawn": torch.tensor(drawn)}


def loaders(samples: Numbers, *, rank: int = 1, workers: int = 2, end: int | None = None) -> Any:
    order = SampleOrder(50, seed=3, shuffle=True)
    plain = BatchLoader(samples, order, BATCH, rank=rank, draw_seed=3, end=end)
    return plain, AheadLoader(plain, num_workers=workers)


def test_the_order_is_the_same_also_after_jumps_back_and_forth() -> None:
    plain, ahead = loaders(Numbers(draws=True))
    for step in (0, 1, 2, 2, 5, 6, 1):
        for index in range(3):
            wanted, found = plain.micro_batch(step, index), ahead.micro_batch(step, index)
            assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_evaluation_goes_round_without_new_processes(tmp_path: Path) -> None:
    plain, ahead = loaders(
        Numbers(pids=tmp_path), end=21
    )  # of rank 1, the last micro-batch is empty
    for _ in range(3):
        for number in range(6):
            found = ahead.micro_batch(*divmod(number, 3))["x"]
            assert torch.equal(found, plain.micro_batch(*divmod(number, 3))["x"])
    assert len(list(tmp_path.iterdir())) == 2 + 1  # this process read for the comparison


def test_what_a_sample_draws_depends_on_its_position_alone() -> None:
    split = BatchPlan(global_batch=12, micro_batch=3, accumulation_steps=4, data_parallel=1)
    samples, order = Numbers(draws=True), SampleOrder(50, seed=3, shuffle=True)
    alone = BatchLoader(samples, order, split, rank=0, draw_seed=3)
    whole = [alone.micro_batch(1, index) for index in range(4)]
    of = {int(i): d for batch in whole for i, d in zip(batch["x"], batch["drawn"], strict=True)}
    for rank in (0, 1):
        _, ahead = loaders(samples, rank=rank, workers=1)
        for index in range(3):
            batch = ahead.micro_batch(1, index)
            assert [of[int(i)] for i in batch["x"]] == batch["drawn"].tolist()
    assert len({float(value) for value in of.values()}) == 12


def test_reading_leaves_the_generators_of_the_rank_where_they_are() -> None:
    plain, _ = loaders(Numbers(draws=True))
    before = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    plain.micro_batch(0, 0)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), str(np.random.get_state()))


def test_a_sample_that_comes_twice_in_a_micro_batch_is_drawn_twice() -> None:
    samples, order = Numbers(draws=True), SampleOrder(1, seed=3, shuffle=True)
    batch = BatchPlan(global_batch=2, micro_batch=2, accumulation_steps=1, data_parallel=1)
    first, second = BatchLoader(samples, order, batch, 0, draw_seed=3).micro_batch(0, 0)["drawn"]
    assert first != second


def test_an_error_is_raised_where_its_sample_is_asked_for() -> None:
    plain, ahead = loaders(Numbers(bad=7))
    places = [(step, index) for step in range(4) for index in range(3)]
    bad = next(place for place in places if 7 in plain.ids(*place))
    for place in places:
        if place == bad:
            with pytest.raises(ConfigError, match=r"sample 7 raised KeyError"):
                ahead.micro_batch(*place)
        else:
            assert ahead.micro_batch(*place)["x"].flatten().tolist() == plain.ids(*place)


def test_processes_end_with_the_one_that_they_read_for(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        _, ahead = loaders(Numbers(pids=tmp_path))
        ahead.micro_batch(0, 0)
        os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    readers = [int(entry.name) for entry in tmp_path.iterdir()]
    assert readers
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in readers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(Path(f"/proc/{pid}").exists() for pid in readers)
