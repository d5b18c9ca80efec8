"""Tensors that enter and leave the modules of a group.

`fully_shard` hooks a group's backward to these tensors: it begins when an output's gradient comes
and ends when the inputs' gradients are done. This module covers tensors that `fully_shard` does not
find, or that it would forbid to be changed in place.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from colotrain.engine.model.changed_inputs import CHANGING, tensors_in
from colotrain.engine.sharding.fsdp_internals import (
    end_backward_of,
    gather_before_backward_of,
    groups_of,
    state_of,
    unsharded_parameters_of,
)
from colotrain.errors import ColotrainError
from colotrain.torch_internals import base_of, pytree, storage_id, tree_leaves

MAX_DEPTH = 3
"""Levels of nested objects in which a forward's outputs are searched."""


def watch_tensors(module: nn.Module) -> None:
    """Add hooks to `module`, a `fully_shard` module, for the tensors that `fully_shard` misses."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    module.register_forward_hook(_copy_parameters, prepend=True)
    module.register_forward_hook(_hook_hidden_outputs, with_kwargs=True)
    if module in CHANGING:
        for group in groups_of(module):
            end_backward_of(group, partial(_after_gradients, group))


def _after_gradients(group: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """End the backward of `group` (an FSDPParamGroup) when the gradients of its inputs are
    complete.

    torch's own way gives the module views of its inputs, which must not be changed in place. This
    way also waits for other uses of the inputs.
    """
    tensors = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
    if tensors and torch.is_grad_enabled():
        register_multi_grad_hook(tensors, lambda _: group.post_backward())
    return args, kwargs


def _copy_parameters(module: nn.Module, args: Any, output: Any) -> Any:
    """Return the output with copies of the views of the group's parameters, which are freed now."""
    whole = {
        storage_id(whole) for group in groups_of(module) for whole in unsharded_parameters_of(group)
    }
    dense = [t for t, _ in _tensors_of(output) if t.layout == torch.strided]
    found = [t for t in dense if storage_id(t) in whole]
    if not found:
        return output
    ids = {id(tensor) for tensor in found}
    if any(is_hidden and id(t) in ids for t, is_hidden in _tensors_of(output)):
        raise ColotrainError(
            f"model: forward of {type(module).__name__} returns a view of a parameter",
            "return a copy of it (.clone())",
        )
    return pytree.tree_map(lambda leaf: leaf.clone() if id(leaf) in ids else leaf, output)


def _hook_hidden_outputs(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    """Register backward hooks on outputs that `fully_shard` does not find, or whose hooks get lost.

    It searches tuples, dicts and dataclasses. For any other object with `.loss` the group would not
    be gathered for its backward nor reduced after it. An output that is a view loses its hooks when
    other code changes it in place; the tensor it is a view of does not.
    """
    if not torch.is_grad_enabled():
        return
    given = {id(t) for given in tensors_in((args, kwargs)) for t in (given, base_of(given))}
    for tensor, is_hidden in _tensors_of(output):
        if not tensor.requires_grad:
            continue
        base = base_of(tensor)
        if base is not None and base.grad_fn is not None and id(base) not in given:
            gather_before_backward_of(state_of(module), [base])
        elif is_hidden:
            gather_before_backward_of(state_of(module), [tensor])


def _tensors_of(output: Any, depth: int = 0) -> Iterator[tuple[Tensor, bool]]:
    """Yield the tensors in `output`, and whether each is in an object that torch does not enter."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf, depth > 0
        elif depth < MAX_DEPTH and not isinstance(leaf, nn.Module):
            yield from _tensors_of(list(getattr(leaf, "__dict__", {}).values()), depth + 1)
