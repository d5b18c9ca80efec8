"""The formulas of adapters in plain torch, written out of their papers, for `verify`'s reference.

Each adapted layer computes with a whole weight: W + sBA (LoRA), or m (W + sBA) / ‖W + sBA‖ (DoRA).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from colotrain.models import adapters
from colotrain.spec.plan import AdapterPlan


def compute_plainly_(model: nn.Module, plan: AdapterPlan) -> None:
    """Let the model's adapters compute by this module's formulas, with their own parameters."""
    for merge in adapters.merges(model):
        merge.detach_()
    for name, layer in adapters.adapted(model).items():
        transposed = not isinstance(layer, nn.Linear)
        formula = {"lora": _lora, "dora": _dora}[plan.name]
        after = partial(_after, formula, plan.scale_of(name), transposed)
        layer.register_forward_hook(after)
    modules: dict[str, nn.Module] = {}
    for name, module, key, _ in adapters.adapted_parameters(model):
        modules[name.removesuffix(key)] = module
        module.register_forward_pre_hook(partial(_put_sum, key, plan.scale_of(name)))
    for module in modules.values():
        module.register_forward_hook(_put_back, always_call=True)


def _after(
    formula: Any,
    scale: float,
    transposed: bool,
    layer: Any,
    inputs: tuple[Tensor, ...],
    output: Tensor,
) -> Tensor:
    weight = layer.weight.T if transposed else layer.weight
    found: Tensor = formula(layer, weight, scale, inputs[0], output)
    return found


def _lora(layer: Any, weight: Tensor, scale: float, x: Tensor, output: Tensor) -> Tensor:
    change = scale * (layer.lora_B.weight @ layer.lora_A.weight)
    return output + F.linear(layer.lora_dropout(x), change)


def _dora(layer: Any, weight: Tensor, scale: float, x: Tensor, output: Tensor) -> Tensor:
    """What is dropped of x is dropped for the change of the weight, which begins at W."""
    whole = weight + scale * (layer.lora_B.weight @ layer.lora_A.weight)
    lengths = whole.detach().norm(dim=1, keepdim=True)
    scaled = layer.lora_magnitude_vector.weight[:, None] / lengths * whole
    return output + F.linear(layer.lora_dropout(x), scaled - weight)


def _put_sum(key: str, scale: float, module: Any, inputs: Any) -> None:
    """Put the sum in place of the parameter: expert by expert."""
    parameter: Tensor = module._parameters[key]
    adapter = getattr(module, adapters.PARAMETER_ADAPTER + key)
    a, b = adapter.lora_A.weight, adapter.lora_B.weight
    num = len(parameter) if parameter.ndim == 3 else 1
    rank = a.shape[0] // num
    changes = []
    for expert in range(num):
        own = slice(expert * rank, (expert + 1) * rank)
        change = b[:, own] @ a[own]
        changes.append(scale * (change.T if getattr(module, "is_transposed", False) else change))
    kept = module.__dict__.setdefault("plain_parameters", {})
    kept[key] = parameter
    module._parameters[key] = parameter + (
        torch.stack(changes) if parameter.ndim == 3 else changes[0]
    )


def _put_back(module: Any, inputs: Any, output: Any) -> None:
    module._parameters.update(module.__dict__.pop("plain_parameters", {}))
