"""Linear layers of which packed blocks are all that is kept.

The weight exists while a forward or a backward of the layer computes with it, and at no other time.
"""

from __future__ import annotations

import functools
import importlib.util
from collections import Counter
from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from colotrain import module_tree
from colotrain.errors import ColotrainError, ConfigError, Problem
from colotrain.models.adapters import output_head, own_modules
from colotrain.models.facts import facts_of
from colotrain.models.quantized.schemes import SCHEMES, Packed, Scheme

SCALES = "absmax"
"""Name of the parameter with the scales, beside `weight`, which has the codes."""


class QuantizedLinear(nn.Linear):
    """A linear layer with packed blocks of a frozen weight."""

    scheme: Scheme
    absmax: nn.Parameter
    whole_dtype: torch.dtype
    """Dtype of the weight before it was packed."""

    @property
    def packed(self) -> Packed:
        return Packed(self.weight, self.absmax)

    def forward(self, x: Tensor) -> Tensor:
        if self.weight.is_floating_point():
            return super().forward(x)
        if not x.is_floating_point():
            raise ColotrainError(
                f"model.quantize={self.scheme.name}: a layer gets {x.dtype}, as of a model that "
                "casts its inputs to the dtype of the layer's weight",
                "set model.quantize=null",
            )
        found: Tensor = PackedProduct.apply(x, *self.packed, self.bias, self)
        return found

    def whole(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return the weight that the blocks stand for."""
        return unpacked(self, self.packed, dtype or self.whole_dtype)


class PackedProduct(torch.autograd.Function):
    """The product of a layer's input and weight, which backward unpacks again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, layer: Any
    ) -> Tensor:
        ctx.save_for_backward(codes, scales)
        ctx.layer, ctx.dtype = layer, x.dtype
        return F.linear(x, unpacked(layer, Packed(codes, scales), x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,), packed = grads, Packed(*ctx.saved_tensors)
        of_x = of_bias = None
        if ctx.needs_input_grad[0]:
            of_x = (grad @ unpacked(ctx.layer, packed, grad.dtype)).to(ctx.dtype)
        if ctx.needs_input_grad[3]:
            of_bias = grad.flatten(0, -2).sum(0)
        return of_x, None, None, of_bias, None


def unpacked(layer: QuantizedLinear, packed: Packed, dtype: torch.dtype) -> Tensor:
    """Return the weight of a layer, by bitsandbytes' kernel where it is installed, on CUDA."""
    kernel = kernel_of(layer.scheme.name) if packed.codes.is_cuda else None
    if kernel is not None:
        return kernel(packed, (layer.out_features, layer.in_features), dtype)
    return layer.scheme.unpacked(packed, layer.out_features, layer.in_features, dtype)


@functools.cache
def kernel_of(scheme: str) -> Any:
    """Return bitsandbytes' function that unpacks the scheme's blocks; None where there is none."""
    if scheme != "nf4" or importlib.util.find_spec("bitsandbytes") is None:
        return None
    return unpack_by_bitsandbytes


def unpack_by_bitsandbytes(packed: Packed, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Unpack nf4 blocks by bitsandbytes, which has no bytes for what fills the last block up."""
    from bitsandbytes.functional import QuantState, dequantize_4bit

    numel = shape[0] * shape[1]
    absmax = packed.scales.view(torch.float32).view(-1)
    state = QuantState(absmax, shape=torch.Size(shape), blocksize=64, quant_type="nf4", dtype=dtype)
    found: Tensor = dequantize_4bit(packed.codes.view(-1)[: -(-numel // 2)].view(-1, 1), state)
    return found


def quantize_(model: nn.Module, name: str) -> None:
    """Let the frozen linear layers of `model` hold blocks, whose values come later.

    Output head, tied layers and the last module keep their weights, as in bitsandbytes. Raises
    `ConfigError` where no layer is left.
    """
    scheme = SCHEMES[name]
    chosen = [*quantizable(model)]
    if not chosen:
        expected = "a model with linear layers beside its head, whose weights are frozen"
        raise ConfigError([Problem(key="model.quantize", value=name, expected=expected)])
    for _, layer in chosen:
        weight, made = layer.weight, cast(Any, layer)
        codes, scales = (
            nn.Parameter(torch.empty(shape, dtype=torch.uint8, device=weight.device), False)
            for shape in scheme.shapes(layer.out_features, layer.in_features)
        )
        made.__class__, made.scheme, made.whole_dtype = QuantizedLinear, scheme, weight.dtype
        made.weight, made.absmax = codes, scales


def quantizable(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the layers that `quantize_` packs, by name."""
    kept, sources = _kept_whole(model), facts_of(model).sources
    for name, module in own_modules(model):
        if type(module) is not nn.Linear or id(module.weight) in kept:
            continue
        is_stored = sources is None or f"{name}.weight" in sources.found
        if is_stored and module.weight.numel() and not module.weight.requires_grad:
            yield name, module


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


def quantized_layers(model: nn.Module) -> dict[str, QuantizedLinear]:
    """Return the layers that hold blocks, by name."""
    named = module_tree.named_modules(model)
    return {name: layer for name, layer in named if isinstance(layer, QuantizedLinear)}


def num_weights(model: nn.Module) -> dict[int, int]:
    """Return the id of each parameter of packed layers → the model's numbers that it stands for."""
    found = {}
    for layer in quantized_layers(model).values():
        found[id(layer.weight)] = layer.out_features * layer.in_features
        found[id(layer.absmax)] = 0
    return found


def dequantize_(model: nn.Module) -> None:
    """Give packed layers of a whole model the weights that their blocks stand for."""
    for layer in quantized_layers(model).values():
        plain: Any = layer
        weight = layer.whole()
        del plain.absmax
        plain.__class__, plain.weight = nn.Linear, nn.Parameter(weight, requires_grad=False)
