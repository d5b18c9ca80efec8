"""Preference pairs with the log-probabilities of the run's reference, once these are known."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


class WithReferences:
    """Pairs with an entry `reference` [2]: NaN until `values` has the log-probabilities.

    `values` [samples, 2] is in shared memory, so that processes which were forked before see them.
    """

    def __init__(self, samples: Any) -> None:
        self.samples = samples
        self.values = torch.full((len(samples), 2), torch.nan, dtype=torch.float64).share_memory_()

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {**self.samples[index], "reference_log_probs": self.values[index]}


def wanted(order: Any, num_samples: int, num_positions: int) -> np.ndarray[Any, Any]:
    """Ids of the samples at the first positions of an order, ascending.

    All samples where the positions cover an epoch.
    """
    if num_positions >= num_samples:
        return np.arange(num_samples)
    return np.unique(order.samples_at(range(num_positions)))
