"""Low-rank adapters (LoRA, Hu et al. 2021) on the linear layers of any model.

A layer keeps its class, its forward and the names of its parameters; beside them it gets
`lora_A` and `lora_B`, whose product is added to its output by a forward hook. Everything that is
not an adapter is frozen. Names, shapes and initial values are those of PEFT.
"""

from __future__ import annotations

import copy
import inspect
import json
import math
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from colotrain.errors import ColotrainError, ConfigError, Problem, suggest
from colotrain.models.seeding import generator_of
from colotrain.models.stored import StoredTensors
from colotrain.spec.plan import AdapterPlan

A, B = "lora_A", "lora_B"
WEIGHTS = "adapter_model.safetensors"
SETTINGS = "adapter_config.json"
PREFIX = "base_model.model."
"""Prefix of every name in PEFT's files."""
BYPASSED = ("NonDynamicallyQuantizableLinear",)
"""Linear layers whose forward is never called (inside nn.MultiheadAttention)."""


def attach_(model: nn.Module, plan: AdapterPlan) -> None:
    """Freeze `model`, and add a trainable adapter to every layer that `plan.targets` names.

    The adapter of a layer on the meta device is on the meta device, too. Raises `ConfigError` for
    a target that names no linear layer.
    """
    layers = dict(linear_layers(model))
    chosen = {name for name in layers if is_target(name, plan.targets)}
    problems = list(_unmatched(plan, layers))
    if problems:
        raise ConfigError(problems)
    model.requires_grad_(False)
    for name in layers:
        if name in chosen:
            _attach(layers[name], plan)


def linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every layer that an adapter can be put on: nn.Linear, and GPT-2's Conv1D."""
    for name, module in model.named_modules():
        if type(module).__name__ not in BYPASSED and features(module) is not None:
            yield name, module


def features(module: nn.Module) -> tuple[int, int] | None:
    """(inputs, outputs) of a linear layer; None for any other module.

    A subclass of nn.Linear with its own forward may compute anything (say, a loss): None, unless
    what it makes of a few numbers is linear.
    """
    if isinstance(module, nn.Linear) and computes_linear(module):
        return module.in_features, module.out_features
    if is_transposed(module):
        rows, columns = cast(Tensor, module.weight).shape
        return rows, columns
    return None


def computes_linear(module: nn.Linear) -> bool:
    """Whether forward of nn.Linear or a subclass is `x @ weight.T + bias` and nothing else.

    A forward of its own is tried with a small weight; one that takes more than x is something else.
    """
    own: Any = type(module).forward
    if own is nn.Linear.forward:
        return True
    if len(inspect.signature(own).parameters) != 2:
        return False
    x, weight, bias = (torch.arange(n, device="cpu").cos() for n in (8, 12, 3))
    x, weight = x.view(2, 4), weight.view(3, 4)
    likeness = copy.copy(module)
    likeness.__dict__ = dict(module.__dict__)
    likeness._parameters = {"weight": nn.Parameter(weight), "bias": None}
    if module.bias is not None:
        likeness._parameters["bias"] = nn.Parameter(bias)
    wanted = F.linear(x, weight, None if module.bias is None else bias)
    try:
        with torch.no_grad():
            found = own(likeness, x)
    except Exception:  # whatever a forward raises that needs more than a weight
        return False
    return isinstance(found, Tensor) and found.shape == wanted.shape and found.allclose(wanted)


def is_transposed(module: nn.Module) -> bool:
    """Whether the weight is [inputs, outputs], as in transformers' Conv1D."""
    known = type(module).__name__ == "Conv1D"
    return known and type(module).__module__.startswith("transformers.")


def is_target(name: str, globs: tuple[str, ...]) -> bool:
    """Whether a glob names the layer, by its whole name or by the last part of it."""
    last = name.rpartition(".")[2]
    return any(fnmatchcase(name, glob) or fnmatchcase(last, glob) for glob in globs)


def adapted(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that have an adapter, by name."""
    return {name: m for name, m in model.named_modules() if is_adapted(m)}


def is_adapted(module: nn.Module) -> bool:
    """Whether the module is a layer that has an adapter."""
    return hasattr(module, "lora_scale")


def _unmatched(plan: AdapterPlan, layers: dict[str, nn.Module]) -> Iterator[Problem]:
    lasts = {name.rpartition(".")[2] for name in layers}
    for glob in plan.targets:
        if not any(is_target(name, (glob,)) for name in layers):
            fix = suggest(glob.strip("*."), lasts) or "the model has none"
            yield Problem(
                key="adapter.targets", value=glob, expected="a glob on linear layers", fix=fix
            )


def _attach(layer: Any, plan: AdapterPlan) -> None:
    weight: Tensor = layer.weight
    inputs, outputs = features(layer) or (0, 0)
    like: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype, "bias": False}
    with torch.random.fork_rng(devices=()):  # later draws are as without adapters
        layer.lora_A = nn.Linear(inputs, plan.rank, **like)
        layer.lora_B = nn.Linear(plan.rank, outputs, **like)
    layer.lora_dropout = nn.Dropout(plan.dropout)
    layer.lora_scale = plan.alpha / plan.rank
    layer.register_forward_hook(_add_low_rank)


def _add_low_rank(layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    x = layer.lora_dropout(inputs[0])
    return output + layer.lora_B(layer.lora_A(x)) * layer.lora_scale


def fill_(
    model: nn.Module,
    plan: AdapterPlan,
    *,
    seed: int,
    write: Callable[[Tensor, Tensor], None],
) -> None:
    """Give the adapters their initial values: those in `plan.path`, or functions of seed and name.

    `write(parameter, whole)` stores this rank's shard of the whole value. B is zero in new
    adapters, so they do not change the model's output at first.
    """
    stored = StoredTensors([Path(plan.path) / WEIGHTS]) if plan.path else None
    with torch.no_grad():
        for name, layer in adapted(model).items():
            for part in (A, B):
                full = f"{name}.{part}.weight"
                parameter = cast(Any, layer).get_submodule(part).weight
                if stored is None:
                    whole = _initial(parameter, full, seed=seed) if part == A else None
                else:
                    whole = _stored(stored, full, parameter)
                write(parameter, _zeros(parameter) if whole is None else whole)


def _initial(parameter: Tensor, name: str, *, seed: int) -> Tensor:
    """Values drawn as nn.Linear draws them, but from the parameter's own generator."""
    whole = torch.empty(parameter.shape, dtype=parameter.dtype)
    generator = generator_of(name, seed=seed)
    return nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)


def _zeros(parameter: Tensor) -> Tensor:
    return torch.zeros(parameter.shape, dtype=parameter.dtype)


def _stored(stored: StoredTensors, name: str, parameter: Tensor) -> Tensor:
    key = PREFIX + name
    if key not in stored:
        raise ColotrainError(
            f"adapter.path: holds no {key}", "give an adapter that was made for this model"
        )
    if stored.shape(key) != tuple(parameter.shape):
        raise ColotrainError(
            f"adapter.path: {key} is {stored.shape(key)}, expected {tuple(parameter.shape)}",
            "give an adapter that was made for this model",
        )
    return stored.rows(key)


def peft_settings(
    model: nn.Module, plan: AdapterPlan, *, base: str | None, task: str | None = "CAUSAL_LM"
) -> dict[str, Any]:
    """The adapter_config.json of this model's adapters, as PEFT reads it."""
    layers = adapted(model)
    return {
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": base,
        "r": plan.rank,
        "lora_alpha": plan.alpha,
        "lora_dropout": plan.dropout,
        "target_modules": sorted(layers),
        "fan_in_fan_out": any(is_transposed(layer) for layer in layers.values()),
        "bias": "none",
        "init_lora_weights": True,
        "inference_mode": True,
        "use_rslora": False,
        "use_dora": False,
    }


def merged(weight: Tensor, a: Tensor, b: Tensor, *, scale: float, transposed: bool) -> Tensor:
    """The layer's weight plus the adapter's product, added in float32, in the weight's dtype.

    `weight` is [outputs, inputs], or its transpose.
    """
    product = (b.float() @ a.float()) * scale
    return (weight.float() + (product.T if transposed else product)).to(weight.dtype)


def to_json(settings: dict[str, Any]) -> str:
    return json.dumps(settings, indent=2, sort_keys=True) + "\n"
