"""Samples with an entry that a model computed before the first step, from the files of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save as serialized
from torch import Tensor

from colotrain.data.prepare.prepared import Split
from colotrain.rundir import RunDir


class WithPrecomputed:
    """Samples with the entry `name`; what `unknown` makes of a sample's labels until it is known.

    `folder`, in `rundir`, has files of rows and the ids of their samples, each written at once;
    they are found when a sample is asked for, so that processes which were forked before see them.
    """

    def __init__(
        self,
        samples: Any,
        name: str,
        unknown: Callable[[Tensor], Tensor],
        *,
        rundir: RunDir,
        folder: Path,
        split: Split,
    ) -> None:
        self.samples, self.name, self.unknown = samples, name, unknown
        self.rundir, self.folder, self.split = rundir, folder, split
        self._places: dict[int, tuple[Any, int]] = {}
        self._read: set[str] = set()

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = self.samples[index]
        if not self.knows(index):
            return {**sample, self.name: self.unknown(sample["labels"])}
        file, row = self._places[index]
        return {**sample, self.name: file.get_slice("rows")[row]}

    def knows(self, index: int) -> bool:
        """Whether the entry of a sample is in a file."""
        if index not in self._places:
            self._find()
        return index in self._places

    def write(self, ids: Sequence[int], rows: Sequence[Tensor]) -> None:
        """Keep the entries of some samples, of which no file has one, in a file."""
        content = serialized({"ids": torch.tensor(ids), "rows": torch.stack(list(rows))})
        self.rundir.write(self.folder / f"{self.split}-{ids[0]}.safetensors", content)

    def _find(self) -> None:
        for path in self.folder.glob(f"{self.split}-*.safetensors"):
            if path.name not in self._read:
                file = safe_open(path, "pt")
                ids = file.get_tensor("ids").tolist()
                self._places |= {index: (file, row) for row, index in enumerate(ids)}
                self._read.add(path.name)


def wanted(order: Any, num_samples: int, num_positions: int) -> np.ndarray[Any, Any]:
    """Ids of the samples at the first positions of an order, ascending.

    All samples where the positions cover an epoch.
    """
    if num_positions >= num_samples:
        return np.arange(num_samples)
    return np.unique(order.samples_at(range(num_positions)))
