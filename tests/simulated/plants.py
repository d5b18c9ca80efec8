"""What to change in a run: mistakes, of which the harness must say so, and how often it copies."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch


@contextlib.contextmanager
def nothing() -> Iterator[None]:
    yield


@contextlib.contextmanager
def no_wait_stream() -> Iterator[None]:
    """Streams do not wait for one another."""
    with mock.patch.object(torch.cuda.Stream, "wait_stream"):
        yield


@contextlib.contextmanager
def no_synchronize() -> Iterator[None]:
    """The host does not wait for streams."""
    with mock.patch.object(torch.cuda.Stream, "synchronize"):
        yield


@contextlib.contextmanager
def each_step_copied() -> Iterator[None]:
    """Copies in memory are made after each step, however long they take."""
    from colotrain.engine.state.memory_copy import MemoryCopies

    with mock.patch.object(MemoryCopies, "note_durations"):
        yield


@contextlib.contextmanager
def stays_on_host() -> Iterator[None]:
    """What the host adds to a step's sums is not brought to the device."""
    from colotrain.engine.gradients import gradients

    with mock.patch.object(gradients, "to_device", lambda values, device: values):
        yield


@contextlib.contextmanager
def slow_optimizer() -> Iterator[None]:
    """Every update keeps the device busy for ten seconds, and the host not at all."""
    from colotrain.engine.optim.shard_optimizer import ShardOptimizer
    from tests.simulated.device import current

    update = ShardOptimizer._update

    def slow(self: ShardOptimizer, *args: Any) -> None:
        update(self, *args)
        current().num_launches += 10_000

    with mock.patch.object(ShardOptimizer, "_update", slow):
        yield
