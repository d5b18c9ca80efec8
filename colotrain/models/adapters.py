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
from collections.abc import Container, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from colotrain import module_tree
from colotrain.errors import ConfigError, Problem, suggest
from colotrain.generators import generator_of
from colotrain.models.filling import Shards
from colotrain.models.stored import StoredTensors
from colotrain.models.tensor_parallel import TensorShard
from colotrain.spec.divisions import Divisions
from colotrain.spec.plan import AdapterPlan

A, B, DROPOUT = "lora_A", "lora_B", "lora_dropout"
WEIGHTS = "adapter_model.safetensors"
SETTINGS = "adapter_config.json"
PREFIX = "base_model.model."
"""Prefix of every name in PEFT's files."""
BYPASSED = ("NonDynamicallyQuantizableLinear",)
"""Linear layers whose forward is never called (inside nn.MultiheadAttention)."""


class InputDropout(nn.Dropout):
    """Dropout of a layer's input, of which a rank may have a part of the features.

    The ranks of a tensor-parallel group draw the same numbers, for all features as one process
    does, and use those of their own part.
    """

    tensor_shard: TensorShard | None = None

    def __init__(self, p: float, num_features: int) -> None:
        super().__init__(p)
        self.num_features = num_features

    def forward(self, x: Tensor) -> Tensor:
        shard = self.tensor_shard
        draws = self.training and self.p > 0
        if shard is None or not draws or x.shape[-1] == self.num_features:
            return super().forward(x)
        kept = super().forward(x.new_ones(*x.shape[:-1], self.num_features))
        return x * kept.chunk(shard.size, dim=-1)[shard.rank]


def attach_(model: nn.Module, plan: AdapterPlan) -> None:
    """Freeze `model`, and add a trainable adapter to every layer that `plan.targets` names.

    The adapter of a layer on the meta device is on the meta device, too. Raises `ConfigError` for
    a target that names no linear layer.
    """
    layers = dict(linear_layers(model))
    chosen = {name for name in layers if is_target(name, plan.targets)}
    problems = [*_unmatched(plan, layers), *_misshapen(plan, layers)]
    if problems:
        raise ConfigError(problems)
    model.requires_grad_(False)
    for name in layers:
        if name in chosen:
            _attach(layers[name], plan)


def linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every layer that an adapter can be put on: nn.Linear, and GPT-2's Conv1D."""
    for name, module in module_tree.named_modules(model):
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
    return {name: m for name, m in module_tree.named_modules(model) if is_adapted(m)}


def is_adapted(module: nn.Module) -> bool:
    """Whether the module is a layer that has an adapter."""
    return hasattr(module, "lora_scale")


def own_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Every named module that the model has without its adapters."""
    layers = adapted(model)
    for name, module in module_tree.named_modules(model):
        layer, _, own = name.rpartition(".")
        if layer not in layers or own not in (A, B, DROPOUT):
            yield name, module


def divide(divisions: Divisions, model: nn.Module) -> Divisions:
    """Return `divisions` of the model with its adapters divided as their layers are.

    A layer with some of the outputs has these rows of B and all of A; one with some of the inputs
    has these columns of A and all of B.
    """
    dims: dict[str, int | None] = {}
    for name, layer in adapted(model).items():
        dim = divisions.dim_of(f"{name}.weight")
        if dim is not None and is_transposed(layer):
            dim = 1 - dim
        dims[f"{name}.{A}.weight"] = 1 if dim == 1 else None
        dims[f"{name}.{B}.weight"] = 0 if dim == 0 else None
    return replace(divisions, dims={**dims, **divisions.dims})


def partial_parameters(model: nn.Module, splits: Container[str]) -> Iterator[str]:
    """Names of the matrices that all ranks hold beside a divided one.

    A rank's backward leaves that part of their gradient which goes through its part of the other.
    """
    for name in adapted(model):
        a, b = f"{name}.{A}.weight", f"{name}.{B}.weight"
        if b in splits:
            yield a
        if a in splits:
            yield b


def _unmatched(plan: AdapterPlan, layers: dict[str, nn.Module]) -> Iterator[Problem]:
    lasts = {name.rpartition(".")[2] for name in layers}
    for glob in plan.targets:
        if not any(is_target(name, (glob,)) for name in layers):
            fix = suggest(glob.strip("*."), lasts) or "the model has none"
            yield Problem(
                key="adapter.targets", value=glob, expected="a glob on linear layers", fix=fix
            )


def _misshapen(plan: AdapterPlan, layers: dict[str, nn.Module]) -> Iterator[Problem]:
    """Problems of matrices in `plan.path` that are not of the shapes of the model's layers."""
    if plan.path is None:
        return
    stored = StoredTensors([Path(plan.path) / WEIGHTS])
    for name in (name for name in plan.targets if name in layers):
        inputs, outputs = features(layers[name]) or (0, 0)
        shapes = {A: (plan.rank, inputs), B: (outputs, plan.rank)}
        for part, shape in shapes.items():
            key = f"{PREFIX}{name}.{part}.weight"
            found = stored.shape(key) if key in stored else None
            if found != shape:
                expected, fix = f"{key} to be {shape}, not {found}", "give an adapter of this model"
                yield Problem(key="adapter.path", value=plan.path, expected=expected, fix=fix)


def _attach(layer: Any, plan: AdapterPlan) -> None:
    weight: Tensor = layer.weight
    inputs, outputs = features(layer) or (0, 0)
    like: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype, "bias": False}
    with torch.random.fork_rng(devices=()):  # later draws are as without adapters
        layer.lora_A = nn.Linear(inputs, plan.rank, **like)
        layer.lora_B = nn.Linear(plan.rank, outputs, **like)
    layer.lora_dropout = InputDropout(plan.dropout, inputs)
    layer.lora_scale = plan.alpha / plan.rank
    layer.lora_hook = layer.register_forward_hook(_add_after)


def _add_after(layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return add_product(layer, inputs[0], output)


def add_product(layer: Any, x: Tensor, output: Tensor) -> Tensor:
    """Add the product of the layer's adapter and its input `x` to its output.

    The scale multiplies the few features between the matrices: the output is read and written less.
    """
    return output + layer.lora_B(layer.lora_A(layer.lora_dropout(x)) * layer.lora_scale)


def leave_to_forward_(layer: Any) -> None:
    """Let the forward of a layer that has an adapter call `add_product`, not a hook after it."""
    layer.lora_hook.remove()


def fill_(
    model: nn.Module,
    plan: AdapterPlan,
    *,
    seed: int,
    shards: Shards,
) -> None:
    """Give the adapters their initial values: those in `plan.path`, or functions of seed and name.

    `shards` stores this rank's part of each whole value. B is zero in new adapters, so they do not
    change the model's output at first.
    """
    stored = StoredTensors([Path(plan.path) / WEIGHTS]) if plan.path else None
    with torch.no_grad():
        for name, layer in adapted(model).items():
            for part in (A, B):
                full = f"{name}.{part}.weight"
                parameter = cast(Any, layer).get_submodule(part).weight
                shape = shards.shape(parameter)
                whole = torch.zeros(shape, dtype=parameter.dtype)
                if stored is not None:
                    whole = stored.rows(PREFIX + full)
                elif part == A:
                    _draw_(whole, full, seed=seed)
                shards.write(parameter, whole)


def _draw_(whole: Tensor, name: str, *, seed: int) -> None:
    """Draw values as nn.Linear draws them, but from the parameter's own generator."""
    generator = generator_of(name, seed=seed)
    nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)


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
