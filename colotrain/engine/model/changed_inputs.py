"""Finds modules whose forward changes an input tensor in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn

from colotrain.torch_internals import tree_leaves, version_of

CHANGING: WeakSet[nn.Module] = WeakSet()
"""Modules of which it is known that their forward changes an input tensor in place."""


def when_inputs_change(module: nn.Module, act: Callable[[], None]) -> None:
    """Call `act` after each forward of `module` that changed an input tensor in place."""
    given: list[list[tuple[Tensor, int]]] = []

    def before(_: nn.Module, args: Any, kwargs: Any) -> None:
        given.append([(tensor, version_of(tensor)) for tensor in tensors_in((args, kwargs))])

    def after(*_: Any) -> None:
        if any(version_of(tensor) != version for tensor, version in given.pop()):
            act()

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after)


def tensors_in(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
