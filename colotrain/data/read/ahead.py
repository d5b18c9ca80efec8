"""Reading micro-batches ahead in other processes during training: `data.num_workers`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from colotrain.data.read.loader import BatchLoader
from colotrain.data.read.samples import StreamSamples
from colotrain.errors import ConfigError, Problem
from colotrain.parent_process import die_with
from colotrain.spec.plan import RunPlan

AHEAD = 2
"""Micro-batches that each process reads ahead."""


def read_ahead(loader: BatchLoader, plan: RunPlan) -> BatchLoader:
    """The loader, or one whose micro-batches are read by `data.num_workers` processes.

    Raises `ConfigError` for a stream, which only a single process can read in order.
    """
    if not plan.data.num_workers:
        return loader
    if isinstance(loader.samples, StreamSamples):
        key, value, expected = "data.num_workers", plan.data.num_workers, "0 for a stream"
        fix = "read ahead inside the stream, or give a map-style dataset"
        raise ConfigError([Problem(key=key, value=value, expected=expected, fix=fix)])
    return AheadLoader(loader, num_workers=plan.data.num_workers)


class AheadLoader(BatchLoader):
    """A loader whose micro-batches are read in order by processes of torch's DataLoader.

    The processes are forked in the constructor, while this one uses little memory, and persist. If
    a micro-batch other than the next is requested, they continue from it. After the loader's
    `end` reading restarts at the first one, as needed for evaluation.
    """

    def __init__(self, loader: BatchLoader, *, num_workers: int) -> None:
        super().__init__(
            loader.samples,
            loader.order,
            loader.batch,
            loader.rank,
            draw_seed=loader.draw_seed,
            end=loader.end,
            collate=loader.collate,
        )
        rank_pid = os.getpid()
        self._numbers = _Numbers(self.num_micro_batches)
        self._read: DataLoader[Any] = DataLoader(
            _Read(loader),
            batch_size=None,  # an item is a micro-batch
            sampler=self._numbers,
            num_workers=num_workers,
            prefetch_factor=AHEAD,
            persistent_workers=True,
            multiprocessing_context="fork",
            collate_fn=lambda item: item,
            worker_init_fn=lambda _: die_with(rank_pid),
        )
        self._batches = iter(self._read)
        self._next = 0

    def restart(self) -> None:
        """Read again what was read ahead: the samples have changed."""
        self._next = -1

    def micro_batch(self, step: int, micro_batch_index: int) -> dict[str, Tensor]:
        number = step * self.batch.accumulation_steps + micro_batch_index
        if number != self._next:
            self._numbers.first = number
            self._batches = iter(self._read)
        self._next = self._numbers.after(number)
        found = next(self._batches)
        if isinstance(found, Exception):
            raise found
        return found


class _Numbers:
    """Sampler of micro-batch numbers from `first` on; after `cycle - 1` comes 0 again."""

    def __init__(self, cycle: int | None) -> None:
        self.first, self.cycle = 0, cycle

    def __iter__(self) -> Iterator[int]:
        number = self.first
        while True:
            yield number
            number = self.after(number)

    def after(self, number: int) -> int:
        return (number + 1) % self.cycle if self.cycle else number + 1


class _Read(Dataset[Any]):
    """Dataset of micro-batches, numbered over all steps; the loader raises an error it returns."""

    def __init__(self, loader: BatchLoader) -> None:
        self.loader = loader

    def __getitem__(self, number: int) -> Any:
        try:
            return self.loader.micro_batch(*divmod(number, self.loader.batch.accumulation_steps))
        except Exception as error:
            return error
