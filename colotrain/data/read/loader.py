"""Samples, their order, and the micro-batches of a rank."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from colotrain import generators
from colotrain.data.prepare.prepared import Split
from colotrain.data.prepare.tokens import parts_of, prepare_shards
from colotrain.data.read.images import open_images, pad_together
from colotrain.data.read.masking import open_masked
from colotrain.data.read.mixtures import Mixture, MixtureOrder
from colotrain.data.read.packing import TokenSamples, pack
from colotrain.data.read.samples import StreamSamples, user_samples
from colotrain.data.read.weighted import WeightedOrder, sample_weights
from colotrain.dotted import described, import_target
from colotrain.errors import ColotrainError, ConfigError, Problem
from colotrain.spec.batch import endless_evaluation, refuse_rules_of_metrics, too_few
from colotrain.spec.plan import BatchPlan, DataPlan, RunPlan

__all__ = [
    "BatchLoader",
    "SampleOrder",
    "Samples",
    "Split",
    "TokenSamples",
    "count_evaluated",
    "open_samples",
    "order_of",
    "planned_collate",
    "planned_draw_seed",
    "planned_order",
    "read_batch",
    "read_sample",
    "refuse_empty",
    "stack",
]


Collate = Callable[[list[Any]], Any]
"""Function `data.collate`: samples → the dict of tensors that is their batch."""


class Samples(Protocol):
    """A map-style dataset of dicts of tensors."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def open_samples(plan: DataPlan, split: Split, *, cache: Path | None = None) -> Samples:
    """The samples of a split, from the plan's files or from the user's `data.target`.

    A split without samples is no error here. An iterable-style dataset with `state_dict` becomes
    `data.read.samples.StreamSamples`: it has its own order, and resuming reads forward. How a
    user's dataset is split is described at `data.read.samples.user_samples`.
    """
    if plan.source == "target":
        return user_samples(plan, split)
    parts = parts_of(plan)
    pack_ = pack if plan.masked is None else open_masked
    if plan.images:
        pack_ = open_images
    opened = [pack_(prepare_shards(part, cache=cache), part, split) for part in parts]
    if plan.source != "mixture":
        return opened[0]
    return Mixture(opened, [part.weight for part in plan.mixture])


def planned_order(
    samples: Samples, plan: RunPlan, split: Split = "train"
) -> SampleOrder | MixtureOrder | WeightedOrder:
    """The order of a run's samples; raises `ConfigError` where there are too few."""
    drops = split == "train" and plan.train.last_batch == "drop"
    whole = plan.batch.global_batch if drops else 1
    if 0 < len(samples) < whole:
        raise ConfigError([too_few(len(samples), whole)])
    if split == "train" and plan.data.sampler is not None:
        refuse_empty(samples)
        with generators.seeded(plan.train.seed):
            weights = sample_weights(samples, plan.data.sampler)
        return WeightedOrder(SampleOrder(len(samples), plan.train.seed, False, whole), weights)
    return order_of(samples, seed=plan.train.seed, shuffle=plan.data.shuffle, whole=whole)


def planned_collate(plan: DataPlan) -> Collate | None:
    """The function that makes batches of samples, the user's or that of images; None: they are
    stacked."""
    if plan.images:
        return pad_together
    return None if plan.collate is None else import_target("data.collate", plan.collate)


def count_evaluated(samples: Samples, plan: RunPlan) -> int:
    """Number of positions that an evaluation reads: at most one pass over the validation samples.

    Only a mixture repeats samples of small parts, to keep its shares, and a stream those of its
    beginning, because its length is not known. Raises `ConfigError` for all samples of a stream,
    and for no samples where the best evaluation's checkpoint is to be kept.
    """
    steps, num = plan.train.eval_steps, len(samples)
    if steps == "all" and num == sys.maxsize:
        raise ConfigError([endless_evaluation()])
    if steps and num == 0:
        refuse_rules_of_metrics(plan)
    if steps == "all":
        return num
    wanted = steps * plan.batch.global_batch
    return wanted if isinstance(samples, Mixture) else min(wanted, num)


def planned_draw_seed(samples: Samples, plan: RunPlan) -> int | None:
    """The seed of what samples draw at random; None for files and streams.

    Files draw nothing but the tokens to hide, and a stream is read in one order whose draws are its
    own. Where several ranks divide a sample, it has to be the same on each of them, so that a
    stream is seeded, too.
    """
    of_its_own = isinstance(samples, StreamSamples) and plan.mesh.together == 1
    draws = plan.data.source == "target" or plan.data.masked is not None
    return plan.train.seed if draws and not of_its_own else None


def order_of(
    samples: Samples, *, seed: int, shuffle: bool, whole: int = 1
) -> SampleOrder | MixtureOrder:
    """The order of samples; raises `ConfigError` where there are none.

    The number of samples used per epoch is rounded down to a multiple of `whole`.
    """
    refuse_empty(samples)
    if isinstance(samples, Mixture):
        return MixtureOrder(
            samples.sizes, samples.weights, seed=seed, shuffle=shuffle, order=SampleOrder
        )
    return SampleOrder(len(samples), seed=seed, shuffle=shuffle, whole=whole)


def refuse_empty(samples: Samples) -> None:
    if len(samples) == 0:
        fix = "give more data, or lower data.seq_len or data.validation_fraction"
        raise ConfigError([Problem(key="data", expected="at least one sample", fix=fix)])


class SampleOrder:
    """Order of samples: the sample at a position depends on seed and position alone.

    Each epoch, `position // num_used`, has its own permutation, made from (seed, epoch) by sorting
    raw Philox numbers, whose stream numpy keeps the same in every version (NEP 19). Only the
    current epoch's is in memory: 4 or 8 bytes per sample. A stream keeps its own order. An epoch
    uses `num_used` samples, the largest multiple of `whole`.
    """

    def __init__(self, num_samples: int, seed: int, shuffle: bool, whole: int = 1) -> None:
        self.num_samples = num_samples
        self.num_used = num_samples // whole * whole
        self.seed = seed
        self.shuffle = shuffle and num_samples < sys.maxsize
        self._epoch = -1
        self._permutation = np.empty(0, np.uint32)

    def sample_at(self, position: int) -> int:
        epoch, index = divmod(position, self.num_used)
        if not self.shuffle:
            return index
        if epoch != self._epoch:
            self._permutation = permutation(self.num_samples, self.seed, epoch)
            self._epoch = epoch
        return int(self._permutation[index])

    def samples_at(self, positions: range) -> list[int]:
        return [self.sample_at(position) for position in positions]


@functools.lru_cache(maxsize=1)
def permutation(num_samples: int, seed: int, epoch: int) -> np.ndarray[Any, Any]:
    """Return the sample at each position of an epoch; `verify` asks for the same in every case."""
    key = np.array([seed % 2**64, epoch], dtype=np.uint64)
    numbers = np.random.Philox(key=key).random_raw(num_samples)
    dtype = np.uint32 if num_samples < 2**32 else np.int64
    return np.argsort(numbers, kind="stable").astype(dtype)


class BatchLoader:
    """The micro-batches of one rank.

    Sample i of micro-batch j on rank r in step k is at position `k*G + (j*W + r)*m + i` of the
    order (G the global batch, W the data-parallel size, m the micro-batch; steps count from 0), so
    the samples of a step are the same however the global batch is divided. With `draw_seed` this
    includes what samples draw at random: the generators are seeded for each position.

    With `end` only positions before it are read: a micro-batch at the end is smaller, or has no
    position of its own on a rank without samples left, which then reads the last sample again.
    """

    def __init__(
        self,
        samples: Samples,
        order: SampleOrder | MixtureOrder | WeightedOrder,
        batch: BatchPlan,
        rank: int,
        draw_seed: int | None = None,
        end: int | None = None,
        collate: Collate | None = None,
    ) -> None:
        refuse_empty(samples)
        self.collate = collate
        self.end = end
        self.draw_seed = draw_seed
        self.samples = samples
        self.order = order
        self.batch = batch
        self.rank = rank

    def ids(self, step: int, micro_batch_index: int) -> list[int]:
        """Ids of the samples in a micro-batch of this rank."""
        return self.order.samples_at(self.positions(step, micro_batch_index))

    def positions(self, step: int, micro_batch_index: int) -> range:
        """Positions in the order of the samples in a micro-batch of this rank."""
        batch = self.batch
        block = micro_batch_index * batch.data_parallel + self.rank
        start = step * batch.global_batch + block * batch.micro_batch
        stop = start + batch.micro_batch
        return range(start, stop if self.end is None else min(stop, self.end))

    @property
    def num_micro_batches(self) -> int | None:
        """Number of micro-batches up to `end`, the same on all ranks; None if there is no end."""
        per_row = self.batch.data_parallel * self.batch.micro_batch
        return None if self.end is None else math.ceil(self.end / per_row)

    def micro_batch(self, step: int, micro_batch_index: int) -> dict[str, Tensor]:
        """The stacked samples: each value is `[micro_batch, ...]`, or shorter at the end."""
        positions = self.positions(step, micro_batch_index)
        if not positions and self.end is not None:
            positions = range(self.end - 1, self.end)
        return read_batch(
            self.samples, self.order, positions, draw_seed=self.draw_seed, collate=self.collate
        )


def read_batch(
    samples: Samples,
    order: SampleOrder | MixtureOrder | WeightedOrder,
    positions: range,
    *,
    draw_seed: int | None,
    collate: Collate | None = None,
) -> dict[str, Tensor]:
    """Stack the samples at some positions of the order, or let `collate` make a batch of them.

    With `draw_seed` the generators are seeded for each position, and put back afterwards.
    """
    found = []
    with generators.kept() if draw_seed is not None else nullcontext():
        for position in positions:
            if draw_seed is not None:
                generators.seed_draws(draw_seed, position)
            index = order.sample_at(position)
            found.append((index, read_sample(samples, index)))
        return stack(found, collate)


def read_sample(samples: Samples, index: int) -> Any:
    """Read a sample; errors of the user's dataset become a `ConfigError` that names the line.

    `OSError` stays, because a restart may help against errors of a disk or a network.
    """
    try:
        return samples[index]
    except (OSError, ColotrainError):
        raise
    except Exception as error:
        expected = f"samples that can be read (sample {index} raised {described(error)})"
        raise _wrong(expected, "correct the dataset") from error


def stack(samples: Sequence[tuple[int, Any]], collate: Collate | None = None) -> dict[str, Tensor]:
    """Stack (id, sample) pairs to a batch in their order; `ConfigError` if their shapes differ.

    With `collate`, the batch is what it returns for the samples.
    """
    if collate is not None:
        return _collated([sample for _, sample in samples], collate)
    tensors = [(index, _tensors(index, sample)) for index, sample in samples]
    first_id, first = tensors[0]
    shapes = {name: tensor.shape for name, tensor in first.items()}
    for index, sample in tensors:
        found = {name: tensor.shape for name, tensor in sample.items()}
        if found != shapes:
            got = f"sample {index} is {_show(found)}, sample {first_id} is {_show(shapes)}"
            raise _wrong(f"samples of one shape ({got})", "pad them (labels with -100) or cut them")
    return {name: torch.stack([sample[name] for _, sample in tensors]) for name in first}


def _collated(samples: list[Any], collate: Collate) -> dict[str, Tensor]:
    try:
        batch = collate(samples)
    except (OSError, ColotrainError):
        raise
    except Exception as error:
        expected = f"a function that makes a batch of {len(samples)} samples ({described(error)})"
        raise _wrong(expected, "correct the function", key="data.collate") from error
    fix = "return a dict of tensors whose first dimension is the samples"
    if not isinstance(batch, Mapping) or not batch:
        expected = f"a function that returns a dict of tensors (it returned {_kind(batch)})"
        raise _wrong(expected, fix, key="data.collate")
    for name, value in batch.items():
        if not isinstance(value, Tensor) or not value.ndim or len(value) != len(samples):
            expected = f"tensors of {len(samples)} rows, as many as samples ({name}: "
            raise _wrong(f"{expected}{_kind(value)})", fix, key="data.collate")
    return dict(batch)


def _kind(value: Any) -> str:
    return f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _tensors(index: int, sample: Any) -> dict[str, Tensor]:
    if not isinstance(sample, Mapping) or not sample:
        expected = f"samples that are dicts of tensors (sample {index} is {type(sample).__name__})"
        raise _wrong(expected, 'return {"input_ids": ..., "labels": ...} from the dataset')
    found = {}
    for name, value in sample.items():
        try:
            found[str(name)] = torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError) as error:
            got = f"{name} of sample {index} is {type(value).__name__}: {error}"
            raise _wrong(f"samples that are dicts of tensors ({got})", "return tensors") from error
    return found


def _show(shapes: Mapping[str, torch.Size]) -> str:
    return ", ".join(f"{name}{list(shape)}" for name, shape in shapes.items())


def _wrong(expected: str, fix: str, *, key: str = "data.target") -> ConfigError:
    return ConfigError([Problem(key=key, expected=expected, fix=fix)])
