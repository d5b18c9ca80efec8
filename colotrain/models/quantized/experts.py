"""Experts in one parameter, of which packed blocks are all that is kept.

While their module computes, the stacks that the blocks stand for are in the parameters' places. No
stack is kept for backward: what autograd would save of one is unpacked again when it is used, a
single expert where only one was used. Where activations are computed again, the stacks are, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from colotrain.errors import ColotrainError
from colotrain.models.adapter_kinds.parameters import ParameterAdapter, adapters_of
from colotrain.models.quantized.schemes import Packed
from colotrain.models.quantized.weights import PackedWeight
from colotrain.torch_internals import saves_tensors_by_hooks, storage_id

STACKS = "packed_stacks"
"""Attribute of a module: its parameters that are held as blocks, by name."""


def expert_stacks(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters [experts, …, …] of a module that says how many experts it has."""
    num = getattr(module, "num_experts", None)
    for key, parameter in module._parameters.items():
        if parameter is not None and parameter.ndim == 3 and len(parameter) == num:
            yield key, parameter


def hold_blocks_(weight: PackedWeight) -> None:
    """Let a module of experts hold blocks of one of its parameters."""
    module: Any = weight.module
    weight.hold_blocks_()
    if stacks_of(module):
        stacks_of(module)[weight.key] = weight
        return
    module.__dict__[STACKS] = {weight.key: weight}
    # around the hooks of adapters on parameters, which add to what is there
    module.packed_hooks = (
        module.register_forward_pre_hook(_put_stacks, prepend=True, with_kwargs=True),
        module.register_forward_pre_hook(_keep_no_stacks),
        module.register_forward_hook(_put_blocks, always_call=True),
    )


def hold_whole_(module: Any) -> None:
    """Give a module the stacks that its blocks stand for."""
    for weight in stacks_of(module).values():
        weight.hold_whole_()
    for hook in module.packed_hooks:
        hook.remove()
    del module.__dict__[STACKS]


def stacks_of(module: nn.Module) -> dict[str, PackedWeight]:
    """Return the parameters that a module of experts holds as blocks, by name."""
    found: dict[str, PackedWeight] = module.__dict__.get(STACKS, {})
    return found


def _put_stacks(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
    inputs = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    dtype = next((x.dtype for x in inputs if x.is_floating_point()), None)
    if dtype is None:
        raise ColotrainError(
            f"model.quantize: {type(module).__name__} gets no numbers whose dtype its experts take",
            "set model.quantize=null",
        )
    module.__dict__["kept_blocks"] = {}
    for key, weight in stacks_of(module).items():
        packed = weight.packed
        with torch.no_grad():
            stack = weight.whole(dtype, packed)
        module.__dict__["kept_blocks"][key] = packed
        module._parameters[key] = stack.detach()


def _keep_no_stacks(module: Any, args: Any) -> None:
    if saves_tensors_by_hooks():  # activations are computed again, and the stacks with them
        return
    adapters, again = adapters_of(module), _UnpackedAgain()
    for key, packed in module.__dict__["kept_blocks"].items():
        stack = module._parameters[key]
        weight, adapter = stacks_of(module)[key], adapters.get(key)
        again.stacks[storage_id(stack)] = _Stack(weight, packed, stack.dtype, adapter)
    hooks = torch.autograd.graph.saved_tensors_hooks(again.pack, again.unpack)
    hooks.__enter__()
    module.__dict__["stack_hooks"] = hooks


def _put_blocks(module: Any, args: Any, output: Any) -> None:
    if (hooks := module.__dict__.pop("stack_hooks", None)) is not None:
        hooks.__exit__(None, None, None)
    for key, packed in module.__dict__.pop("kept_blocks", {}).items():
        module._parameters[key] = packed.codes


@dataclass(frozen=True, slots=True)
class _Stack:
    """What a stack in a forward is made of, to make any experts of it again."""

    weight: PackedWeight
    packed: Packed
    dtype: torch.dtype
    adapter: ParameterAdapter | None

    def view(self, size: Any, stride: Any, offset: int) -> Tensor:
        """Return a view of the stack; the experts in it alone are unpacked."""
        each = math.prod(self.weight.shape[1:])
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        start, end = offset // each, last // each + 1
        with torch.no_grad():
            found = self.weight.entries(self.packed, start, end, self.dtype)
            if self.adapter is not None:
                found = self.adapter.add_(found, start)
        return found.as_strided(size, stride, found.storage_offset() + offset - start * each)


class _UnpackedAgain:
    """Hooks for saved tensors that keep blocks in place of what was unpacked of them."""

    def __init__(self) -> None:
        self.stacks: dict[int, _Stack] = {}
        """By the storage that a stack has in this forward."""

    def pack(self, tensor: Tensor) -> Any:
        stack = self.stacks.get(storage_id(tensor))
        if stack is None or not tensor.numel():
            return tensor
        return stack, tensor.size(), tensor.stride(), tensor.storage_offset()

    def unpack(self, kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        stack, *view = kept
        found: Tensor = stack.view(*view)
        return found
