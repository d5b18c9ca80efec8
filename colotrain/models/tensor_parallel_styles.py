"""Tensor parallelism of models that know nothing of it, by a plan: module glob → style.

The styles and their names are those of transformers' `base_model_tp_plan`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from colotrain.models.tensor_parallel import TensorShard, enter, gather_last, leave, own_part
from colotrain.spec.divisions import Divisions

ROWS = ("colwise", "colwise_gather_output")
COLUMNS = ("rowwise", "rowwise_split_input")
SUMMED = "replicated_with_grad_allreduce"
"""Style of modules that are whole on all ranks and work on the parts of their inputs."""
STYLES = (*ROWS, *COLUMNS, SUMMED)


def divisions_by(plan: Mapping[str, str], model: nn.Module, sizes: Mapping[str, int]) -> Divisions:
    """Return how `plan` divides `model`; `sizes` must be multiples of the number of ranks, too.

    What cannot be right is a `Divisions` with the reason.
    """
    dims, divided = {}, dict(sizes)
    modules = dict(model.named_modules())
    for glob, style in plan.items():
        if style not in STYLES:
            known = ", ".join(STYLES)
            return Divisions(against=f"{glob} has the style {style!r}, which is none of {known}")
        matched = {name: m for name, m in modules.items() if fnmatchcase(name, glob)}
        if style == SUMMED or not matched:
            continue
        for name, module in matched.items():
            if not isinstance(module, nn.Linear):
                kind = type(module).__name__
                return Divisions(against=f"{name} is a {kind}, and {style} is for nn.Linear")
        dim = 0 if style in ROWS else 1
        dims[f"{glob}.weight"] = dim
        if style in ROWS:
            dims[f"{glob}.bias"] = 0
        for module in matched.values():
            divided[glob.rpartition(".")[2]] = module.weight.shape[dim]
    return Divisions(dims=dims, sizes=divided, styles=dict(plan))


def apply_styles_(model: nn.Module, divisions: Divisions, shard: TensorShard) -> None:
    """Let modules whose parameters are parts compute with those of the other ranks."""
    for name, module in model.named_modules():
        for glob, style in divisions.styles.items():
            if not fnmatchcase(name, glob):
                continue
            if style == SUMMED:
                for parameter in module.parameters():
                    _sum_gradients(parameter, shard)
            else:
                module.forward = functools.partial(_FORWARDS[style], module, shard)


def _sum_gradients(parameter: nn.Parameter, shard: TensorShard) -> None:
    trains = parameter.requires_grad
    parameter.requires_grad_(True)  # a frozen parameter may be unfrozen later
    parameter.register_hook(shard.sum)
    parameter.requires_grad_(trains)


def _colwise(module: nn.Linear, shard: TensorShard, x: Tensor) -> Tensor:
    return F.linear(enter(x, shard), module.weight, module.bias)


def _colwise_gather_output(module: nn.Linear, shard: TensorShard, x: Tensor) -> Tensor:
    return gather_last(_colwise(module, shard, x), shard, alike=True)


def _rowwise(module: nn.Linear, shard: TensorShard, x: Tensor) -> Tensor:
    whole = leave(F.linear(x, module.weight), shard)
    return whole if module.bias is None else whole + module.bias


def _rowwise_split_input(module: nn.Linear, shard: TensorShard, x: Tensor) -> Tensor:
    return _rowwise(module, shard, own_part(x, shard))


_FORWARDS: dict[str, Callable[..., Any]] = {
    "colwise": _colwise,
    "colwise_gather_output": _colwise_gather_output,
    "rowwise": _rowwise,
    "rowwise_split_input": _rowwise_split_input,
}
