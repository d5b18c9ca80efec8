"""Forwards beside training, which leave modes, buffers and generators as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from colotrain import generators, module_tree
from colotrain.spec.plan import RunPlan
from colotrain.torch_internals import BatchNorms, Dropouts


@contextmanager
def unchanged(model: nn.Module, device: torch.device, *, everything: bool = True) -> Iterator[None]:
    """Run the context in evaluation mode; restores modes, buffers and generators.

    Without `everything` only dropout and batch normalization are in evaluation mode: a model may
    have no loss in it.
    """
    modes = {module: module.training for module in module_tree.modules(model)}
    states = generators.states(device)
    evaluated = [m for m in modes if isinstance(m, BatchNorms | Dropouts)]
    for module in [model] if everything else evaluated:
        module.eval()
    try:
        with kept_buffers(model):
            yield
    finally:
        generators.set_states(device, states)
        for module, mode in modes.items():
            module.training = mode


def uncompiled(plan: RunPlan, is_short: bool) -> AbstractContextManager[Any]:
    """Run a short micro-batch as it is: a second shape would make compiled blocks dynamic."""
    short = plan.train.compile and is_short
    return torch.compiler.set_stance("force_eager") if short else nullcontext()


@contextmanager
def kept_buffers(model: nn.Module) -> Iterator[None]:
    """Restore buffers that forwards in the context change, such as running means."""
    owners = [
        (m, n, b)
        for m in module_tree.modules(model)
        for n, b in m._buffers.items()
        if b is not None
    ]
    before = [buffer.clone() for *_, buffer in owners]
    try:
        yield
    finally:
        for (module, name, buffer), value in zip(owners, before, strict=True):
            buffer.copy_(value)
            module._buffers[name] = buffer  # also where forward assigned another tensor
