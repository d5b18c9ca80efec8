"""The calls of torch's cross-entropy in a forward, and which labels of a batch they get."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from colotrain.models.outputs import TargetRule

Batch = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class LossCall:
    """A call of torch's cross-entropy with classes as targets."""

    target: Tensor
    ignored: int
    is_mean: bool
    has_weights: bool


class LossCalls(TorchFunctionMode):
    """Collects the calls of torch's cross-entropy in its context."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[LossCall] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (F.cross_entropy, F.nll_loss):
            given = inspect.signature(func).bind(*args, **(kwargs or {}))
            given.apply_defaults()
            call = given.arguments
            if not call["target"].is_floating_point():
                is_mean, weights = call["reduction"] == "mean", call["weight"]
                self.found.append(
                    LossCall(call["target"], call["ignore_index"], is_mean, weights is not None)
                )
        return func(*args, **(kwargs or {}))


def entry_of(calls: tuple[LossCall, ...], samples: Batch, known: TargetRule) -> str:
    """The entry of the samples that cross-entropy got as targets; without a call, the known one."""
    if known.entry in samples or not calls:
        return known.entry
    candidates = (n for n, t in samples.items() if not t.is_floating_point() and not t.is_complex())
    is_target = (n for n in candidates if any(shift_in(c, samples[n]) is not None for c in calls))
    return next(is_target, known.entry)


def shift_in(call: LossCall, labels: Tensor) -> bool | None:
    """Whether the targets of cross-entropy are the labels without each row's first.

    None where they are neither these nor all labels, or where both would be the same.
    """
    target = call.target.flatten().to(labels.dtype)
    if target.numel() == labels.numel() and torch.equal(target, labels.flatten()):
        return False
    if labels.ndim != 2:
        return None
    later = labels[:, 1:].flatten()
    if target.numel() == later.numel() and torch.equal(target, later):
        return True
    if target.numel() == labels.numel():
        rows = target.view(labels.shape)
        if torch.equal(rows[:, :-1], labels[:, 1:]) and bool((rows[:, -1] == call.ignored).all()):
            return True
    chosen = target[target != call.ignored]
    is_all = torch.equal(chosen, labels[labels != call.ignored])
    is_later = torch.equal(chosen, later[later != call.ignored])
    return None if is_all == is_later else is_later
