"""What makes a model and its samples fit for a proof, in the reference and the plugins alike.

Unequal masks, because with none a wrong weighting of micro-batches would go unseen; and no
dropout, whose draws depend on how a batch is cut.
"""

from __future__ import annotations

from torch import Tensor, nn

from colotrain.data.read.loader import IGNORE_INDEX, Samples
from colotrain.torch_internals import Dropouts


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


def without_dropout_(model: nn.Module) -> None:
    """Turn off every dropout module. What calls `dropout` as a function is not reached."""
    for module in model.modules():
        if isinstance(module, Dropouts):
            module.p = 0.0
