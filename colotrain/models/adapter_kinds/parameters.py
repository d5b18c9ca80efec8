"""Adapters on single parameters, such as those that hold all experts of a layer.

A parameter is [experts, inputs, outputs] or [experts, outputs, inputs], or a matrix of one expert.
While its module computes, the sum of the parameter and the adapter's product stands in its place.
Shapes, names in files and formulas are those of PEFT's `target_parameters`. PEFT's columns of B go
through all experts for each rank; here the columns of an expert are neighbours, as its rows of A
are, so that ranks can divide experts (`mesh.ep`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from colotrain import module_tree

PARAMETER_ADAPTER = "lora_of_"
"""Prefix of the adapter's name beside the parameter, whose own name follows."""


class ParameterAdapter(nn.Module):
    """The matrices of all experts: `rank` rows of A and columns of B, in turn, are one expert's."""

    def __init__(
        self,
        shape: tuple[int, ...],
        *,
        rank: int,
        scale: float,
        inputs_first: bool,
        like: dict[str, Any],
    ) -> None:
        super().__init__()
        num_experts = shape[0] if len(shape) == 3 else 1
        self.num_dims = len(shape)
        self.rank, self.scale, self.inputs_first = rank, scale, inputs_first
        inputs, outputs = shape[-2:] if inputs_first else shape[:-3:-1]
        self.lora_A = nn.Linear(inputs, rank * num_experts, bias=False, **like)
        self.lora_B = nn.Linear(rank * num_experts, outputs, bias=False, **like)

    def dims_beside(self, dim: int | None) -> tuple[int | None, int | None]:
        """Return the dimensions of A and B that ranks divide who divide `dim` of the parameter."""
        if dim is None:
            return None, None
        if self.num_dims == 3 and dim == 0:
            return 0, 1
        is_of_inputs = dim == self.num_dims - (2 if self.inputs_first else 1)
        return (1, None) if is_of_inputs else (None, 0)

    def added(self, parameter: Tensor) -> Tensor:
        """The sum of the parameter and the product of the adapter's matrices."""
        a, b = self.lora_A.weight, self.lora_B.weight
        return with_product(
            parameter, a, b, scale=self.scale, rank=self.rank, inputs_first=self.inputs_first
        )

    def add_(self, experts: Tensor, first: int = 0) -> Tensor:
        """Add the product to neighbouring experts, of which `first` is the first, and return them.

        They are a copy that is nobody else's: no second one is made.
        """
        left, right = factors(
            *(self.lora_A.weight, self.lora_B.weight),
            rank=self.rank,
            inputs_first=self.inputs_first,
        )
        part, dtype = slice(first, first + len(experts)), experts.dtype
        return experts.baddbmm_(left[part].to(dtype), right[part].to(dtype), alpha=self.scale)


def factors(a: Tensor, b: Tensor, *, rank: int, inputs_first: bool) -> tuple[Tensor, Tensor]:
    """The matrices of each expert whose product has the shape of the parameter.

    A has the rows of the first expert first, and B its columns.
    """
    a = a.unflatten(0, (-1, rank))  # [experts, rank, inputs]
    b = b.unflatten(1, (-1, rank)).transpose(0, 1)  # [experts, outputs, rank]
    return (a.mT, b.mT) if inputs_first else (b, a)


def columns_as_stored(b: Tensor, *, rank: int) -> Tensor:
    """Return B as PEFT's files have it: the first columns of all experts, then the second."""
    return b.unflatten(1, (-1, rank)).transpose(1, 2).flatten(1)


def columns_of_stored(stored: Tensor, *, rank: int) -> Tensor:
    """Return B of a file of PEFT's with the columns of each expert side by side."""
    return stored.unflatten(1, (rank, -1)).transpose(1, 2).flatten(1)


def with_product(
    parameter: Tensor, a: Tensor, b: Tensor, *, scale: float, rank: int, inputs_first: bool
) -> Tensor:
    """`parameter` plus the scaled product of A and B of each expert, in the parameter's dtype."""
    left, right = factors(a, b, rank=rank, inputs_first=inputs_first)
    whole = parameter if parameter.ndim == 3 else parameter.unsqueeze(0)
    found = torch.baddbmm(whole, left.to(whole.dtype), right.to(whole.dtype), alpha=scale)
    return found if parameter.ndim == 3 else found.squeeze(0)


def attach_(module: nn.Module, name: str, *, rank: int, scale: float) -> None:
    """Put an adapter on the parameter `name` of `module`."""
    parameter = module._parameters[name]
    assert parameter is not None
    inputs_first = parameter.ndim == 3 and bool(getattr(module, "is_transposed", False))
    like: dict[str, Any] = {"device": parameter.device, "dtype": parameter.dtype}
    with torch.random.fork_rng(devices=()):  # later draws are as without adapters
        adapter = ParameterAdapter(
            tuple(parameter.shape), rank=rank, scale=scale, inputs_first=inputs_first, like=like
        )
    if not adapters_of(module):
        hooks: Any = module
        hooks.lora_hooks = (
            module.register_forward_pre_hook(_put_sums),
            module.register_forward_hook(_put_parameters, always_call=True),
        )
    module.add_module(PARAMETER_ADAPTER + name, adapter)


def adapters_of(module: nn.Module) -> dict[str, ParameterAdapter]:
    """The adapters on a module's parameters by the parameters' names, in the parameters' order."""
    children = dict(module_tree.named_children(module))
    beside = {n: children.get(PARAMETER_ADAPTER + n) for n in module._parameters}
    return {n: found for n, found in beside.items() if isinstance(found, ParameterAdapter)}


def detach_(module: Any) -> None:
    """Let the module compute without its adapters."""
    for hook in module.lora_hooks:
        hook.remove()


def _put_sums(module: nn.Module, inputs: Any) -> None:
    for name, adapter in adapters_of(module).items():
        parameter = module._parameters[name]
        assert parameter is not None
        adapter.__dict__["kept"] = parameter  # no parameter of the adapter's own
        is_copy = not isinstance(parameter, nn.Parameter)  # of packed blocks, for this forward
        added = adapter.add_(parameter) if is_copy else adapter.added(parameter)
        module._parameters[name] = added  # type: ignore[assignment]


def _put_parameters(module: nn.Module, inputs: Any, output: Any) -> None:
    for name, adapter in adapters_of(module).items():
        if (kept := adapter.__dict__.pop("kept", None)) is not None:
            module._parameters[name] = kept
