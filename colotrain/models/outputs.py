"""The loss, the number of targets and further metrics in the output of a model's forward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from colotrain.spec.objectives import IGNORE_INDEX

COUNT = "num_targets"
"""Key or attribute of the number of targets that the loss is the mean of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetRule:
    """Which labels a mean loss is the mean of; `engine.step.loss_trial` finds it."""

    entry: str = "labels"
    """Entry of a batch with the labels; where there is none, each sample is a target."""
    ignored: int | None = IGNORE_INDEX
    """Integer label that does not count; None: all labels count. Floating labels always count."""
    shifted: bool = False
    """Whether the first label of each row does not count: the model shifts labels itself."""
    by_sample: bool = False
    """Whether each sample counts once, whatever its labels are."""

    def count(self, batch: Mapping[str, Tensor]) -> int | None:
        """Number of targets of a batch; None for a batch without labels."""
        labels = batch.get(self.entry)
        if labels is None:
            return None
        if self.by_sample:
            return len(labels)
        counted = labels[:, 1:] if self.shifted else labels
        if self.ignored is None or labels.is_floating_point():
            return counted.numel()
        return int((counted != self.ignored).sum())

    def per_sample(self, batch: Mapping[str, Tensor]) -> int:
        """Number of targets of a sample without masks: at least 1."""
        labels = batch.get(self.entry)
        return 1 if labels is None or self.by_sample else max(1, labels[0].numel())

    @property
    def target(self) -> int:
        """A label that counts."""
        return 1 if self.ignored == 0 else 0

    @property
    def named(self) -> str:
        """What the loss is a mean over, for people."""
        if self.by_sample:
            return "samples"
        which = "" if self.ignored is None else f" that are not {self.ignored}"
        shifted = ", without each row's first: the model shifts them" if self.shifted else ""
        return f"{self.entry}{which}{shifted}"


def loss_in(output: Any) -> Any:
    """The loss: `output["loss"]`, `output.loss`, or `output` itself."""
    if isinstance(output, Mapping):
        return output.get("loss")
    return getattr(output, "loss", output)


def pair_in(output: Any) -> tuple[Any, Any] | None:
    """`(loss_sum, count)`, returned itself or as the loss of `output`; else None."""
    found = output if isinstance(output, tuple) else loss_in(output)
    return found if isinstance(found, tuple) and len(found) == 2 else None


def count_in(output: Any) -> Any:
    """The number of targets, or None where the model does not return it."""
    return output.get(COUNT) if isinstance(output, Mapping) else getattr(output, COUNT, None)


def metrics_in(
    output: Any, weight: Tensor, own: Mapping[str, Tensor] | None = None
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """(name, sum, count) of each further scalar of a mapping.

    A pair is taken as (sum, count); any other scalar as the mean over `weight` targets, or over
    those that `own` has under its name.
    """
    for name, value in _further_in(output):
        if isinstance(value, tuple):
            yield name, _exact(value[0]), _exact(value[1])
        else:
            over = (own or {}).get(name, weight).double().cpu()
            yield name, _exact(value) * over, over


def means_in(output: Any) -> dict[str, float]:
    """The further scalars of a mapping that have no count of their own."""
    plain = ((name, value) for name, value in _further_in(output) if not isinstance(value, tuple))
    return {name: _exact(value).item() for name, value in plain}


def _further_in(output: Any) -> Iterator[tuple[str, Any]]:
    for name, value in output.items() if isinstance(output, Mapping) else ():
        is_pair = isinstance(value, tuple) and len(value) == 2 and all(map(_is_number, value))
        if name not in ("loss", COUNT) and (is_pair or _is_number(value)):
            yield name, value


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.ndim < 2 and not value.is_complex()
    return isinstance(value, int | float)


def _exact(value: Any) -> Tensor:
    return torch.as_tensor(value).detach().double().cpu().reshape(())
