"""Samples drawn by weights: `data.sampler`."""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np

from colotrain.data.read.samples import StreamSamples, WithoutValidation
from colotrain.dotted import described, import_target
from colotrain.errors import ColotrainError, ConfigError, Problem

Weights = np.ndarray[Any, np.dtype[np.float64]]


class Epochs(Protocol):
    """What `WeightedOrder` needs of an order without weights."""

    seed: int
    num_used: int


class WeightedOrder:
    """Order in which the sample at a position is drawn with replacement, by weight.

    It depends on seed and position alone: each epoch has Philox numbers of its own, made from
    (seed, epoch), as in `SampleOrder`. A sample may come several times in an epoch, or not at all.
    """

    def __init__(self, order: Epochs, weights: Weights) -> None:
        self.seed, self.num_used = order.seed, order.num_used
        self._ends = np.cumsum(weights) / weights.sum()
        self._epoch, self._drawn = -1, np.empty(0, np.int64)

    def sample_at(self, position: int) -> int:
        epoch, index = divmod(position, self.num_used)
        if epoch != self._epoch:
            key = np.array([self.seed % 2**64, epoch], dtype=np.uint64)
            numbers = np.random.Philox(key=key).random_raw(self.num_used)
            shares = (numbers >> np.uint64(11)) / float(1 << 53)
            drawn = np.searchsorted(self._ends, shares, side="right")
            self._drawn, self._epoch = np.minimum(drawn, self._last), epoch
        return int(self._drawn[index])

    @property
    def _last(self) -> int:
        """The last sample that has a weight; rounding must not reach those behind it."""
        return int(np.searchsorted(self._ends, self._ends[-1], side="left"))

    def samples_at(self, positions: range) -> list[int]:
        return [self.sample_at(position) for position in positions]


def sample_weights(samples: Any, dotted: str) -> Weights:
    """The weights of the training samples, from the function that `data.sampler` names.

    It is called with the dataset of `data.target`, those samples included that are kept for
    validation. Raises `ConfigError` unless it returns a number for each of its samples.
    """
    if isinstance(samples, StreamSamples):
        raise _wrong(dotted, "null for a stream, whose order is its own")
    function = import_target("data.sampler", dotted)
    dataset: Any = samples.dataset if isinstance(samples, WithoutValidation) else samples
    try:
        found = np.asarray(function(dataset), dtype=np.float64).reshape(-1)
    except (OSError, ColotrainError):
        raise
    except Exception as error:
        expected = f"a function of the dataset that returns weights ({described(error)})"
        raise _wrong(dotted, expected) from error
    if len(found) != len(dataset):
        raise _wrong(dotted, f"a weight for each of {len(dataset)} samples, not {len(found)}")
    weights = found[: len(samples)]
    if not np.isfinite(weights).all() or (weights < 0).any() or not weights.sum() > 0:
        bad = next((w for w in weights if not (math.isfinite(w) and w >= 0)), 0.0)
        raise _wrong(dotted, f"weights of 0 or more, and one above 0 (there is {bad:g})")
    return weights


def _wrong(dotted: str, expected: str) -> ConfigError:
    fix = "correct the function, or set data.sampler=null"
    return ConfigError([Problem(key="data.sampler", value=dotted, expected=expected, fix=fix)])
