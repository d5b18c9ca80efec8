"""Linear layers of which packed blocks are all that is kept, and which parts of a model are packed.

The weight exists while a forward or a backward of the layer computes with it, and at no other time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from colotrain import module_tree
from colotrain.errors import ColotrainError, ConfigError, Problem
from colotrain.models.adapter_kinds.weights import PackedLayer
from colotrain.models.adapters import output_head, own_modules
from colotrain.models.facts import facts_of
from colotrain.models.quantized import experts
from colotrain.models.quantized.experts import expert_stacks, stacks_of
from colotrain.models.quantized.schemes import SCHEMES, Packed, Scheme
from colotrain.models.quantized.weights import PackedWeight, scales_key
from colotrain.spec.divisions import Divisions

BY_DIM = ("rows", "inputs")
"""Dimension of a packed matrix → what messages call it."""


class QuantizedLinear(PackedLayer, nn.Linear):
    """A linear layer with packed blocks of a frozen weight."""

    scheme: Scheme
    absmax: nn.Parameter
    whole_dtype: torch.dtype
    """Dtype of the weight before it was packed."""

    @property
    def packed_weight(self) -> PackedWeight:
        return PackedWeight(
            module=self,
            key="weight",
            scheme=self.scheme,
            shape=(self.out_features, self.in_features),
            dtype=self.whole_dtype,
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.is_floating_point():
            return super().forward(x)
        if not x.is_floating_point():
            raise ColotrainError(
                f"model.quantize={self.scheme.name}: a layer gets {x.dtype}, as of a model that "
                "casts its inputs to the dtype of the layer's weight",
                "set model.quantize=null",
            )
        return self.product(x, self.bias)

    def whole(self, dtype: torch.dtype) -> Tensor:
        return self.packed_weight.whole(dtype)

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the product of `x` and the weight, of which nothing is kept for backward."""
        weight = self.packed_weight
        found: Tensor = PackedProduct.apply(x, *weight.packed, bias, weight)
        return found


class PackedProduct(torch.autograd.Function):
    """The product of a layer's input and weight, which backward unpacks again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, weight: Any
    ) -> Tensor:
        ctx.save_for_backward(codes, scales)
        ctx.weight, ctx.dtype = weight, x.dtype
        return F.linear(x, weight.whole(x.dtype, Packed(codes, scales)), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), packed = grads, Packed(*ctx.saved_tensors)
        of_x = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = (grad @ ctx.weight.whole(grad.dtype, packed)).to(ctx.dtype)
        if ctx.needs_input_grad[3]:
            of_bias = grad.flatten(0, -2).sum(0)
        return of_x, None, None, of_bias, None


def quantize_(model: nn.Module, name: str) -> None:
    """Let the frozen linear layers and experts of `model` hold blocks, whose values come later.

    Output head, tied layers and the last module keep their weights, as in bitsandbytes. Raises
    `ConfigError` where nothing is left.
    """
    scheme = SCHEMES[name]
    chosen = [*quantizable(model)]
    if not chosen:
        expected = "a model with linear layers beside its head, whose weights are frozen"
        raise ConfigError([Problem(key="model.quantize", value=name, expected=expected)])
    for module, key in chosen:
        parameter = module._parameters[key]
        weight = PackedWeight(
            module=module,
            key=key,
            scheme=scheme,
            shape=tuple(parameter.shape),
            is_transposed=parameter.ndim == 3 and bool(getattr(module, "is_transposed", False)),
            dtype=parameter.dtype,
        )
        if parameter.ndim == 3:
            experts.hold_blocks_(weight)
        else:
            weight.hold_blocks_()
            module.__class__, module.scheme = QuantizedLinear, scheme
            module.whole_dtype = weight.dtype


def quantizable(model: nn.Module) -> Iterator[tuple[Any, str]]:
    """Yield module and name of each parameter that `quantize_` packs."""
    kept, sources = _kept_whole(model), facts_of(model).sources
    for name, module in own_modules(model):
        is_linear = type(module) is nn.Linear
        own = [("weight", module.weight)] if is_linear else [*expert_stacks(module)]
        for key, parameter in own:
            is_stored = sources is None or f"{name}.{key}" in sources.found
            is_frozen = parameter.numel() > 0 and not parameter.requires_grad
            if is_stored and is_frozen and id(parameter) not in kept:
                yield module, key


def _kept_whole(model: Any) -> set[int]:
    """Return the ids of parameters that stay: of the head and the last module, and tied ones."""
    modules = [module for _, module in own_modules(model)]
    owned = [[id(p) for p in m._parameters.values() if p is not None] for m in modules]
    times = Counter(number for each in owned for number in each)
    tied = {number for number, count in times.items() if count > 1}
    last = next((each for each in reversed(owned) if each), [])
    return tied | {*last} | {id(p) for p in _head(model)}


def _head(model: Any) -> Iterator[nn.Parameter]:
    head = output_head(model) or getattr(model, "head", None)
    if isinstance(head, nn.Module):
        yield from module_tree.parameters(head)


def packed_weights(model: nn.Module) -> dict[str, PackedWeight]:
    """Return what is held as blocks, by the names of the parameters."""
    found = {}
    for name, module in module_tree.named_modules(model):
        if isinstance(module, QuantizedLinear):
            found[f"{name}.weight"] = module.packed_weight
        for key, weight in stacks_of(module).items():
            found[f"{name}.{key}"] = weight
    return found


def scales_of(name: str) -> str:
    """Return the name of the scales of a parameter that is held as blocks."""
    module, _, key = name.rpartition(".")
    return f"{module}.{scales_key(key)}"


def divide(divisions: Divisions, model: nn.Module) -> Divisions:
    """Return `divisions` with the scales divided as their codes are, in whole blocks."""
    dims, sizes, against = dict[str, int | None](), dict(divisions.sizes), divisions.against
    for name, weight in packed_weights(model).items():
        dim, block = divisions.dim_of(name), weight.scheme.block
        if dim is None:
            continue
        size, num = weight.shape[dim], weight.num_in_blocks
        if dim and len(weight.shape) == 3:
            against = against or f"{name} is packed by rows of each expert"
        elif dim == 1:
            num = block or 1
            dims[scales_of(name)] = None if block is None else 1  # int8 has a scale for a row
        else:
            dims[scales_of(name)] = 0
        if size % num:
            against = against or f"{name} has {size} {BY_DIM[dim]}, no whole blocks of {block}"
        elif num > 1:
            key = f"blocks of {num} {BY_DIM[dim]} of {name.split('.')[-2]}"
            sizes[key] = math.gcd(sizes.get(key, 0), size // num)
    return replace(divisions, dims={**dims, **divisions.dims}, sizes=sizes, against=against)


def num_weights(model: nn.Module) -> dict[int, int]:
    """Return the id of each parameter of blocks → the model's numbers that it stands for."""
    found = {}
    for weight in packed_weights(model).values():
        codes, scales = weight.packed
        found[id(codes)], found[id(scales)] = math.prod(weight.shape), 0
    return found


def dequantize_(model: nn.Module) -> None:
    """Give a whole model the weights that its blocks stand for."""
    for module in [*module_tree.modules(model)]:
        if stacks_of(module):
            experts.hold_whole_(module)
        if isinstance(module, QuantizedLinear):
            plain: Any = module
            module.packed_weight.hold_whole_()
            plain.__class__ = nn.Linear
