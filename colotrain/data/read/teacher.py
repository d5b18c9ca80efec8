"""Samples with what the teacher of a distillation says of them, from the files of a run."""

from __future__ import annotations

import math
import struct
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save as serialized
from torch import Tensor

from colotrain.data.prepare.prepared import Split
from colotrain.rundir import write_atomically

(UNKNOWN,) = struct.unpack("=i", struct.pack("=f", math.nan))
"""The bits of a float NaN, as an integer."""


class WithTeacher:
    """Samples with an entry `teacher` [seq, width]; where nothing is known, its loss is NaN.

    `folder` has files of rows and the ids of their samples, each written at once; they are found
    when a sample is asked for, so that processes which were forked before see them.
    """

    def __init__(self, samples: Any, folder: Path, split: Split, width: int) -> None:
        self.samples, self.folder, self.split, self.width = samples, folder, split, width
        self._places: dict[int, tuple[Any, int]] = {}
        self._read: set[str] = set()

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = self.samples[index]
        if not self.knows(index):
            shape = (len(sample["labels"]), self.width)
            return {**sample, "teacher": torch.full(shape, UNKNOWN, dtype=torch.int32)}
        file, row = self._places[index]
        return {**sample, "teacher": file.get_slice("rows")[row]}

    def knows(self, index: int) -> bool:
        """Whether the teacher's rows of a sample are in a file."""
        if index not in self._places:
            self._find()
        return index in self._places

    def write(self, ids: Sequence[int], rows: Sequence[Tensor]) -> None:
        """Keep the rows of some samples in a file."""
        content = serialized({"ids": torch.tensor(ids), "rows": torch.stack(list(rows))})
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder / f"{self.split}-{uuid.uuid4().hex}.safetensors", content)

    def _find(self) -> None:
        for path in self.folder.glob(f"{self.split}-*.safetensors"):
            if path.name not in self._read:
                file = safe_open(path, "pt")
                ids = file.get_tensor("ids").tolist()
                self._places |= {index: (file, row) for row, index in enumerate(ids)}
                self._read.add(path.name)


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
