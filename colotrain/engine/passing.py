"""Tensors that go into a group's modules and come out of them.

`fully_shard` ties a group's backward to them: it begins when the gradient of an output comes, and
ends when those of the inputs are done. Some tensors it does not see, or would not let be changed.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from colotrain.engine.changed_inputs import CHANGES_INPUTS, tensors_in
from colotrain.engine.sharding.fsdp_internals import (
    end_backward_of,
    gather_before_backward_of,
    groups_of,
    state_of,
    wholes_of,
)
from colotrain.errors import ColotrainError
from colotrain.torch_internals import base_of, pytree, storage_id, tree_leaves

DEEPEST_OUTPUT = 3
"""Objects inside one another that a forward's outputs are looked for in."""


def watch_tensors(module: nn.Module) -> None:
    """Have `fully_shard`, which was applied to `module`, see what it misses."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    module.register_forward_hook(_copy_parameters, prepend=True)
    module.register_forward_hook(_tell_of_hidden_outputs, with_kwargs=True)
    if getattr(module, CHANGES_INPUTS, False):
        for group in groups_of(module):
            end_backward_of(group, partial(_after_gradients, group))


def _after_gradients(group: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """End the backward of `group` (torch's own record) when the inputs' gradients are whole.

    torch's own way hands the module views of its inputs, which must not be changed in place. This
    one waits for what else uses the inputs, too.
    """
    tensors = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
    if tensors and torch.is_grad_enabled():
        register_multi_grad_hook(tensors, lambda _: group.post_backward())
    return args, kwargs


def _copy_parameters(module: nn.Module, args: Any, output: Any) -> Any:
    """The output with copies of what is a view of the group's parameters, which are freed now."""
    whole = {storage_id(whole) for group in groups_of(module) for whole in wholes_of(group)}
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


def _tell_of_hidden_outputs(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    """Let `fully_shard` see the backward of outputs that it does not know, or loses.

    It looks into tuples, dicts and dataclasses. Of any other object with `.loss` the group would
    neither be gathered for its backward nor reduced after it. An output that is a view may be
    changed in place by others, and forgets its hooks then; what it is a view of does not.
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
    """Tensors, and whether they are in objects that torch does not look into."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf, depth > 0
        elif depth < DEEPEST_OUTPUT and not isinstance(leaf, nn.Module):
            yield from _tensors_of(list(getattr(leaf, "__dict__", {}).values()), depth + 1)
