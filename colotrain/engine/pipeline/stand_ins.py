"""What stands for the modules that a pipeline stage does not run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from colotrain.torch_internals import pytree


class Left(Exception):
    """Ends a forward after the last block that it runs."""

    def __init__(self, activations: Tensor) -> None:
        super().__init__()
        self.activations = activations


def pass_on(num_returned: int, activations: Tensor, *_: Any, **__: Any) -> Any:
    """Return what a block is given as it returns it: a tensor, or a tuple that begins with it."""
    return (activations, *[None] * (num_returned - 1)) if num_returned else activations


def only_shape(module: nn.Module, dtype: torch.dtype | None) -> Callable[..., Any]:
    """Return a forward that gives zeros of the shapes that the module's own gives.

    That of an embedding, which may exchange with other ranks, does not run.
    """
    forward = module.forward
    if isinstance(module, nn.Embedding):
        weight, width = module.weight, module.embedding_dim

        def forward(ids: Tensor) -> Tensor:
            return torch.empty((*ids.shape, width), dtype=weight.dtype, device="meta")

    @functools.wraps(forward)
    def zeros(*args: Any, **kwargs: Any) -> Any:
        given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        shaped = pytree.tree_map_only(Tensor, lambda t: t.to("meta"), (args, kwargs))

        def real(tensor: Tensor) -> Tensor:
            floating = tensor.is_floating_point() and dtype is not None
            made = torch.zeros((), dtype=dtype if floating else tensor.dtype)
            return made.to(given[0].device).expand(tensor.shape)

        with torch.no_grad():
            return pytree.tree_map_only(Tensor, real, forward(*shaped[0], **shaped[1]))

    return zeros


def until_left(forward: Callable[..., Any], may_end: Callable[[], bool]) -> Callable[..., Any]:
    """Return a forward that gives the activations with which a block has left it.

    It gives its own output where it `may_end` without that.
    """

    @functools.wraps(forward)
    def given(*args: Any, **kwargs: Any) -> Any:
        try:
            output = forward(*args, **kwargs)
        except Left as left:
            return left.activations
        assert may_end(), "forward went on after the chunk's last block"
        return output

    return given
