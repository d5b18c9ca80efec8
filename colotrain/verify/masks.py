"""Unequal masks for a proof: with none, a wrong weighting of micro-batches would go unseen."""

from __future__ import annotations

from torch import Tensor

from colotrain.data.loader import IGNORE_INDEX, Samples


class MaskedSamples:
    """The samples of a dataset, with part of their labels masked as a function of the sample.

    Every sixth loses all of its targets, the others up to four fifths from the front. Samples
    without `labels` of at least one dimension stay as they are.
    """

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = dict(self.samples[index])
        labels = sample.get("labels")
        if labels is not None and labels.ndim:
            sample["labels"] = labels.clone()
            share = 1.0 if index % 6 == 0 else (index % 5) / 5
            sample["labels"][: round(share * len(labels))] = IGNORE_INDEX
        return sample
