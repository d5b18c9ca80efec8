"""Changes to a model and its samples for a verification, in the reference and the plugins alike.

Labels are masked unequally, so that a wrong weighting of micro-batches shows. Dropout is turned
off, because its random numbers depend on how a batch is split.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from colotrain import module_tree
from colotrain.data.read.loader import Samples
from colotrain.spec.objectives import IGNORE_INDEX
from colotrain.torch_internals import Dropouts


class MaskedSamples:
    """The samples of a dataset, with part of their labels masked as a function of the index.

    Every sixth sample has all of its labels masked, the others up to the first four fifths.
    With `whole` no other samples are masked: the answers of a preference pair stay as they are.
    `ignored` is the label that the loss leaves out; None: it leaves out none.
    Samples without `labels` of at least one dimension stay as they are, and so do floating labels:
    the losses for those know no masks, and would take -100 for a value.
    """

    def __init__(
        self, samples: Samples, *, whole: bool = False, ignored: int | None = IGNORE_INDEX
    ) -> None:
        self.samples, self.whole, self.ignored = samples, whole, ignored

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        found = self.samples[index]
        if not isinstance(found, Mapping):  # data.collate makes a batch of it
            return found
        sample = dict(found)
        labels = sample.get("labels")
        if self.ignored is None or not isinstance(labels, Tensor) or not labels.ndim:
            return sample
        if not labels.is_floating_point():
            sample["labels"] = labels.clone()
            share = 1.0 if index % 6 == 0 else 0.0 if self.whole else (index % 5) / 5
            sample["labels"][: round(share * len(labels))] = self.ignored
        return sample


DROPOUTS = (
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "alpha_dropout",
    "feature_alpha_dropout",
)


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Turn off the dropout of modules, for good, and of `torch.nn.functional`, in the context.

    Functions are replaced, because a torch mode would not reach a backward that recomputes the
    forward in another thread. Calls of `torch.dropout` and other random numbers stay.
    """
    for module in module_tree.modules(model):
        if isinstance(module, Dropouts):
            module.p = 0.0
        elif isinstance(module, nn.RNNBase):
            module.dropout = 0.0
    attend = functional.scaled_dot_product_attention

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        return attend(query, key, value, attn_mask, 0.0, *args, **kwargs)

    instead: dict[str, Any] = dict.fromkeys(DROPOUTS, _as_it_is)
    instead["scaled_dot_product_attention"] = attention
    before = {name: getattr(functional, name) for name in instead}
    for name, function in instead.items():
        setattr(functional, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(functional, name, function)


def _as_it_is(
    input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    return input
