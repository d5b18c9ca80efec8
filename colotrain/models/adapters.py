"""Low-rank adapters on the linear layers of any model, and on parameters that hold experts.

A layer keeps its class, its forward and the names of its parameters; beside them it gets `lora_A`
and `lora_B`, and what its kind of adapter needs, by which a forward hook changes its output.
Everything that is not an adapter is frozen. Names, shapes and initial values are those of PEFT.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from colotrain import module_tree
from colotrain.errors import ConfigError, Problem, suggest
from colotrain.generators import generator_of
from colotrain.models.adapter_kinds import parameters
from colotrain.models.adapter_kinds.bases import PREFIX, WEIGHTS, BaseChange
from colotrain.models.adapter_kinds.low_rank import DROPOUT, LORA, A, AdapterKind, B, InputDropout
from colotrain.models.adapter_kinds.magnitude import DORA, MAGNITUDE, row_norms, scaled_rows
from colotrain.models.adapter_kinds.parameters import PARAMETER_ADAPTER, ParameterAdapter
from colotrain.models.adapter_kinds.weights import is_transposed, whole_weight
from colotrain.models.facts import facts_of
from colotrain.models.filling import Shards
from colotrain.models.stored import FLOATING, StoredTensors
from colotrain.records import to_plain
from colotrain.spec.divisions import Divisions
from colotrain.spec.plan import ALL_LINEAR, AdapterPlan

KINDS: dict[str, AdapterKind] = {"lora": LORA, "dora": DORA}
"""Name of an adapter in settings → how it changes the output of a linear layer."""
SETTINGS = "adapter_config.json"
BYPASSED = ("NonDynamicallyQuantizableLinear",)
"""Linear layers whose forward is never called (inside nn.MultiheadAttention)."""
HEADS = ("score", "classifier")
"""Names of classifiers' heads, which PEFT leaves out of all linear layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterPart:
    """One parameter of an adapter."""

    name: str
    """Its name in the model."""
    stored: str
    """Its name in PEFT's files."""
    role: str
    """A, B or MAGNITUDE."""
    owner: Any
    """The layer, or the adapter of a parameter."""

    @property
    def parameter(self) -> nn.Parameter:
        return cast(nn.Parameter, self.owner.get_submodule(self.role).weight)

    def as_stored(self, values: Tensor) -> Tensor:
        """Return whole values of the parameter as PEFT's files have them."""
        if self.role != B or not isinstance(self.owner, ParameterAdapter):
            return values
        return parameters.columns_as_stored(values, rank=self.owner.rank)

    def of_stored(self, values: Tensor) -> Tensor:
        """Return values in PEFT's files as the parameter has them."""
        if self.role != B or not isinstance(self.owner, ParameterAdapter):
            return values
        return parameters.columns_of_stored(values, rank=self.owner.rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge:
    """How an adapter and what it adapts become one weight."""

    weight: str
    """Name of the parameter that is adapted."""
    parameter: nn.Parameter
    parts: tuple[str, ...]
    """Names of the adapter's parameters."""
    merged: Callable[..., Tensor]
    """The new weight of the old one and the values of the parts."""
    detach_: Callable[[], None]
    """Let the module compute without the adapter."""


def attach_(model: nn.Module, plan: AdapterPlan) -> None:
    """Freeze `model`, and add a trainable adapter to every layer that `plan.targets` names.

    The adapter of a layer on the meta device is on the meta device, too. Raises `ConfigError` for
    a target that names no linear layer, and for files of the plan that are of another model.
    """
    layers = dict(linear_layers(model))
    names = _chosen(model, plan, layers)
    chosen = {name: layer for name, layer in layers.items() if name in names}
    held = {name: found for name, found in _adaptable(model, layers) if plan.adapts(name)}
    problems = [*_unmatched(model, plan, layers), *_ambiguous(plan, [*chosen, *held])]
    problems += [*_unmerged(plan, layers), *_unchangeable(model, plan, layers, [*chosen])]
    if problems:
        raise ConfigError(problems)
    model.requires_grad_(False)
    for name, layer in chosen.items():
        _attach(layer, name, plan)
    for name, (module, key) in held.items():
        parameters.attach_(module, key, rank=plan.rank_of(name), scale=plan.scale_of(name))
    if plan.path is not None:
        if problems := [*_misshapen(model, plan), *_unlike(model, plan)]:
            raise ConfigError(problems)
        for name in plan.modules:
            model.get_submodule(name).requires_grad_(True)


def _chosen(model: nn.Module, plan: AdapterPlan, layers: dict[str, nn.Module]) -> set[str]:
    """Names of the linear layers that get an adapter."""
    named = {name for name in layers if plan.targets_layer(name)}
    if ALL_LINEAR in plan.targets:
        named |= layers.keys() - _heads(model) - _new(model)
    return {name for name in named if not plan.excludes(name)}


def _new(model: nn.Module) -> set[str]:
    """Names of layers that the model's files lack: of a new head, or left out of its task."""
    sources = facts_of(model).sources
    return set() if sources is None else {name.rpartition(".")[0] for name in sources.missing}


def _heads(model: nn.Module) -> set[str]:
    """Names of the output head and of its parts."""
    head = output_head(model)
    inside = set() if head is None else {id(m) for m in module_tree.modules(head)}
    return {name for name, module in module_tree.named_modules(model) if id(module) in inside}


def output_head(model: nn.Module) -> nn.Module | None:
    """The output head of a model of transformers, which is found as PEFT finds it."""
    outputs = getattr(model, "get_output_embeddings", None)
    if not callable(outputs):
        return None
    found: nn.Module | None = outputs()
    return found or next((getattr(model, n) for n in HEADS if hasattr(model, n)), None)


def _adaptable(
    model: nn.Module, layers: Container[str]
) -> Iterator[tuple[str, tuple[nn.Module, str]]]:
    """Name, module and key of every parameter that can have an adapter of its own."""
    for name, module in module_tree.named_modules(model):
        for key, parameter in module._parameters.items():
            fits = parameter is not None and parameter.ndim in (2, 3)
            if fits and name not in layers:
                yield f"{name}.{key}" if name else key, (module, key)


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


def adapted(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that have an adapter, by name."""
    return {name: m for name, m in module_tree.named_modules(model) if is_adapted(m)}


def is_adapted(module: nn.Module) -> bool:
    """Whether the module is a layer that has an adapter."""
    return hasattr(module, "lora_scale")


def adapted_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, ParameterAdapter]]:
    """Name, module, key and adapter of every parameter that has an adapter of its own."""
    for name, module in module_tree.named_modules(model):
        for key, adapter in parameters.adapters_of(module).items():
            yield f"{name}.{key}" if name else key, module, key, adapter


def parts(model: nn.Module) -> Iterator[AdapterPart]:
    """Every parameter of the model's adapters."""
    for name, layer in adapted(model).items():
        for role in (A, B, *((MAGNITUDE,) if hasattr(layer, MAGNITUDE) else ())):
            own = f"{name}.{role}.weight"
            stored = own.removesuffix(".weight") if role == MAGNITUDE else own
            yield AdapterPart(name=own, stored=PREFIX + stored, role=role, owner=layer)
    for name, module, key, adapter in adapted_parameters(model):
        beside = [*parameters.adapters_of(module)]
        owner = name.rpartition(".")[0]
        wrapped = "base_layer." * (len(beside) - 1 - beside.index(key))  # the first is innermost
        for role in (A, B):
            inside, outside = f"{PARAMETER_ADAPTER}{key}.{role}.weight", f"{wrapped}{role}.weight"
            names = (f"{owner}.{n}" if owner else n for n in (inside, outside))
            yield AdapterPart(
                name=next(names), stored=PREFIX + next(names), role=role, owner=adapter
            )


def own_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Every named module that the model has without its adapters."""
    layers = adapted(model)
    for name, module in module_tree.named_modules(model):
        layer, _, own = name.rpartition(".")
        if layer in layers and own in (A, B, DROPOUT, MAGNITUDE):
            continue
        if not any(part.startswith(PARAMETER_ADAPTER) for part in name.split(".")):
            yield name, module


def divide(divisions: Divisions, model: nn.Module) -> Divisions:
    """Return `divisions` of the model with its adapters divided as what they adapt.

    A layer with some of the outputs has these rows of B and all of A; one with some of the inputs
    has these columns of A and all of B. Some of the experts have their own rows of A and columns
    of B.
    """
    dims: dict[str, int | None] = {}
    for name, _, key, adapter in adapted_parameters(model):
        of_a, of_b = adapter.dims_beside(divisions.dim_of(name))
        owner = name.removesuffix(key) + PARAMETER_ADAPTER + key
        dims[f"{owner}.{A}.weight"], dims[f"{owner}.{B}.weight"] = of_a, of_b
    for name, layer in adapted(model).items():
        dim = divisions.dim_of(f"{name}.weight")
        if dim is not None and is_transposed(layer):
            dim = 1 - dim
        dims[f"{name}.{A}.weight"] = 1 if dim == 1 else None
        dims[f"{name}.{B}.weight"] = 0 if dim == 0 else None
        dims[f"{name}.{MAGNITUDE}.weight"] = 0 if dim == 0 else None
    return replace(divisions, dims={**dims, **divisions.dims})


def partial_parameters(model: nn.Module, splits: Container[str]) -> Iterator[str]:
    """Names of the parameters of adapters that all ranks hold beside a divided one.

    A rank's backward leaves that part of their gradient which goes through its part of the other.
    """
    held = [
        name.removesuffix(key) + PARAMETER_ADAPTER + key
        for name, _, key, _ in adapted_parameters(model)
    ]
    for name in [*adapted(model), *held]:
        a, b = f"{name}.{A}.weight", f"{name}.{B}.weight"
        if b in splits and a not in splits:
            yield a
        if a in splits and b not in splits:
            yield b
            if hasattr(model.get_submodule(name), MAGNITUDE):
                yield f"{name}.{MAGNITUDE}.weight"


def _unmatched(
    model: nn.Module, plan: AdapterPlan, layers: dict[str, nn.Module]
) -> Iterator[Problem]:
    """Problems of names that mean nothing in this model."""
    if plan.path is not None:
        return  # which layers have adapters follows from the files, whose names are compared
    lasts = {name.rpartition(".")[2] for name in layers}
    linears = {ALL_LINEAR} if layers else set()
    for glob in plan.targets:
        if glob not in linears and not any(plan.matches(glob, name) for name in layers):
            fix = suggest(glob.strip("*."), lasts | linears) or "the model has none"
            for name, module in module_tree.named_modules(model):
                if isinstance(module, nn.Embedding) and plan.matches(glob, name):
                    fix = f"set adapter.parameters=[{name}.weight] for an adapter of the embedding"
            yield _wrong("targets", glob, "a glob on linear layers", fix)
    for glob in plan.exclude:
        if not any(plan.matches(glob, name) for name in layers):
            fix = suggest(glob.strip("*."), lasts) or "remove it"
            yield _wrong("exclude", glob, "a glob on linear layers", fix)
    held = [name for name, _ in _adaptable(model, layers)]
    for glob in plan.parameters:
        if not any(plan.matches_parameter(glob, name) for name in held):
            linear = any(plan.matches_parameter(glob, f"{name}.weight") for name in layers)
            fix = suggest(glob.strip("*."), {name.rpartition(".")[2] for name in held})
            fix = "name linear layers in adapter.targets" if linear else fix
            expected = "a glob on matrices, or stacks of them, outside of linear layers"
            yield _wrong("parameters", glob, expected, fix or "the model has none")


def _ambiguous(plan: AdapterPlan, names: list[str]) -> Iterator[Problem]:
    """Problems of ranks and alphas: globs without an adapter, or two numbers for one."""
    if plan.path is not None:
        return
    for key, numbers in (("ranks", plan.ranks), ("alphas", plan.alphas)):
        for glob in numbers:
            if not any(plan.matches(glob, name) for name in names):
                fix = suggest(glob.strip("*."), {n.rpartition(".")[2] for n in names})
                expected = "a glob on what has an adapter"
                yield _wrong(f"{key}.{glob}", numbers[glob], expected, fix or "remove it")
        for name in names:
            found = [glob for glob in numbers if plan.matches(glob, name)]
            if len({numbers[glob] for glob in found}) > 1:
                expected = f"one number for {name}, which {' and '.join(found)} match"
                yield _wrong(key, None, expected, "let one glob match each layer")
                break


def _unmerged(plan: AdapterPlan, layers: dict[str, nn.Module]) -> Iterator[Problem]:
    """Problems of tensors in `plan.merge` that are not those of layers of this model."""
    for merged in plan.merge:
        stored = StoredTensors([Path(str(merged.path)) / WEIGHTS])
        for name in merged.targets:
            inputs, outputs = features(layers[name]) or (0, 0) if name in layers else (0, 0)
            rank = merged.rank_of(name)
            for role, shape in ((A, (rank, inputs)), (B, (outputs, rank))):
                key = f"{PREFIX}{name}.{role}.weight"
                expected = f"{key} to be {shape}, not {stored.shape(key)}"
                if name not in layers:
                    expected = f"adapters of this model ({key} has no place in it)"
                elif stored.shape(key) == shape and stored.dtype(key) in FLOATING:
                    continue
                yield _wrong("merge", merged.path, expected, "give an adapter of this model")


def _unchangeable(
    model: nn.Module, plan: AdapterPlan, layers: dict[str, nn.Module], chosen: list[str]
) -> Iterator[Problem]:
    """Problems of layers whose weight cannot be changed, or have no part taken out, alone."""
    known_as: dict[int, list[str]] = {}
    for name, parameter in module_tree.named_parameters(model, remove_duplicate=False):
        known_as.setdefault(id(parameter), []).append(name)
    merged = [("merge", m.path, m, m.targets) for m in plan.merge]
    own = ("init", plan.init) if plan.path is None else ("path", plan.path)
    for key, value, adapter, names in (*merged, (*own, plan, chosen if plan.init else ())):
        for name in (name for name in names if name in layers):
            layer: Any = layers[name]
            rank, most = adapter.rank_of(name), min(features(layer) or (0, 0))
            others = [n for n in known_as[id(layer.weight)] if n != f"{name}.weight"]
            fix = f"set adapter.exclude=[{name}]"
            if others:
                expected = f"layers with a weight of their own: that of {name} is {others[0]}, too"
            elif adapter.init and rank > most:
                expected = f"ranks up to the {most} that {name} has, not {rank}"
                fix = f"set adapter.ranks={{{name}: {most}}}"
            elif adapter.path and adapter.init == "olora" and is_transposed(layer):
                expected = f"no OLoRA on {name}, whose transpose PEFT decomposes"
            else:
                continue
            fix = "merge it with PEFT, and name that directory in model.hf" if adapter.path else fix
            yield _wrong(key, value, expected, fix)


def _misshapen(model: nn.Module, plan: AdapterPlan) -> Iterator[Problem]:
    """Problems of tensors in `plan.path` that are not those of the adapters of this model."""
    stored = StoredTensors([Path(str(plan.path)) / WEIGHTS])
    known: set[str] = set()
    for part in parts(model):
        known.add(part.stored)
        shape = tuple(part.parameter.shape)
        found = stored.shape(part.stored) if part.stored in stored else None
        if found != shape:
            yield _of_another_model(plan, f"{part.stored} to be {shape}, not {found}")
        elif stored.dtype(part.stored) not in FLOATING:
            yield _of_another_model(
                plan, f"{part.stored} in floating point, not {stored.dtype(part.stored)}"
            )
    modules = tuple(f"{PREFIX}{name}." for name in plan.modules)
    for key in sorted({*stored} - known):
        if not key.startswith(modules):
            yield _of_another_model(plan, f"adapters of this model ({key} has no place in it)")


def _of_another_model(plan: AdapterPlan, expected: str) -> Problem:
    return _wrong("path", plan.path, expected, "give an adapter of this model")


def _unlike(model: nn.Module, plan: AdapterPlan) -> Iterator[Problem]:
    """Problems of whole modules in `plan.path`, which take the place of the model's own."""
    stored = StoredTensors([Path(str(plan.path)) / WEIGHTS])
    known = {name for name, _ in own_modules(model)}
    adapters = [part.name for part in parts(model)]
    for name in plan.modules:
        if name not in known:
            yield _of_another_model(plan, f"modules of this model (it has no {name})")
        elif any(part.startswith(f"{name}.") for part in adapters):
            yield _of_another_model(plan, f"no adapters inside of {name}, which is whole in it")
    whole = dict(_states(model, plan))
    for name, own in whole.items():
        found = stored.shape(PREFIX + name) if PREFIX + name in stored else None
        if found != tuple(own.shape):
            key, shape = PREFIX + name, tuple(own.shape)
            yield _of_another_model(plan, f"{key} to be {shape}, not {found}")
        elif own.is_floating_point() and stored.dtype(PREFIX + name) not in FLOATING:
            key = PREFIX + name
            yield _of_another_model(plan, f"{key} in floating point, not {stored.dtype(key)}")
    for name, own in module_tree.named_parameters(model, remove_duplicate=False):
        for other in (n for n, p in whole.items() if p is own and n != name):
            if PREFIX + other in stored and not _are_equal(stored, PREFIX + name, PREFIX + other):
                expected = f"the same values for {other} and {name}, which are one parameter here"
                fix = "merge it into the model with PEFT, and name that directory in model.hf"
                yield _wrong("path", plan.path, expected, fix)


def _are_equal(stored: StoredTensors, one: str, other: str) -> bool:
    return one in stored and torch.equal(stored.rows(one), stored.rows(other))


def _states(model: nn.Module, plan: AdapterPlan) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers of the modules that are whole in `plan.path`."""
    known = {name for name, _ in module_tree.named_modules(model)}
    for module in plan.modules:
        if module in known:
            for own, tensor in model.get_submodule(module).state_dict(keep_vars=True).items():
                yield f"{module}.{own}", tensor


def _attach(layer: Any, name: str, plan: AdapterPlan) -> None:
    weight: Tensor = layer.weight
    inputs, outputs = features(layer) or (0, 0)
    rank, kind = plan.rank_of(name), KINDS[plan.name]
    like: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
    with torch.random.fork_rng(devices=()):  # later draws are as without adapters
        layer.lora_A = nn.Linear(inputs, rank, bias=False, **like)
        layer.lora_B = nn.Linear(rank, outputs, bias=False, **like)
    layer.lora_dropout = InputDropout(plan.dropout, inputs)
    layer.lora_scale = plan.scale_of(name)
    layer.lora_kind = kind
    kind.attach_(layer, outputs, like)
    layer.lora_hook = layer.register_forward_hook(_add_after)


def _add_after(layer: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return add_product(layer, inputs[0], output, bias=layer.bias)


def add_product(layer: Any, x: Tensor, output: Tensor, *, bias: Tensor | None) -> Tensor:
    """The layer's output with its adapter, for its input `x`; `output` includes `bias`."""
    changed: Tensor = layer.lora_kind.add(layer, x, output, bias)
    return changed


def leave_to_forward_(layer: Any) -> None:
    """Let the forward of a layer that has an adapter call `add_product`, not a hook after it."""
    layer.lora_hook.remove()


def fill_(
    model: nn.Module,
    plan: AdapterPlan,
    *,
    seed: int,
    shards: Shards,
    given: Set[str] = frozenset(),
) -> None:
    """Give the adapters their initial values: those in `plan.path`, or functions of seed and name.

    `shards` stores this rank's part of each whole value; what is in `given` gets its value later.
    New adapters do not change the model's output at first: B is zero, magnitudes are those of W, or
    what they begin with is taken out of W, which is read before.
    """
    stored = StoredTensors([Path(plan.path) / WEIGHTS]) if plan.path else None
    with torch.no_grad():
        begun = _change_bases_(model, plan, shards=shards, given=given)
        for part in parts(model):
            if part.name in given or part.name in begun:
                continue
            if stored is not None:
                whole = part.of_stored(stored.rows(part.stored))
            elif part.role == MAGNITUDE:
                whole = _norms(part, shards)
            else:
                shape = shards.shape(part.parameter)
                whole = torch.zeros(shape, dtype=part.parameter.dtype)
                if part.role == A:
                    _draw_(whole, part.name, seed=seed)
            shards.write(part.parameter, whole)
        for name, own in _states(model, plan):
            if stored is not None and name not in given:
                is_parameter = isinstance(own, nn.Parameter)
                whole = stored.rows(PREFIX + name)
                shards.write(own, whole) if is_parameter else own.copy_(whole)


def _change_bases_(
    model: nn.Module, plan: AdapterPlan, *, shards: Shards, given: Set[str]
) -> set[str]:
    """Write the weights that adapters leave of their layers' ones. All ranks must call.

    Returns the names of the parts that began with what was taken out. A weight in `given` was
    changed when that value was made.
    """
    begun: set[str] = set()
    for name, change in base_changes(model, plan):
        layer: Any = model.get_submodule(name)
        if f"{name}.weight" in given:
            continue
        held = shards.read(layer.weight)
        products = change.products(held)
        shards.write(layer.weight, change.apply(held, products))
        shards.release(layer.weight)
        if plan.path is not None or not change.has_start:
            continue
        for role, whole in ((A, products[-1].a), (B, products[-1].b)):
            part = f"{name}.{role}.weight"
            begun.add(part)
            if part not in given:
                shards.write(layer.get_submodule(role).weight, whole)
    return begun


def base_changes(model: nn.Module, plan: AdapterPlan | None) -> Iterator[tuple[str, BaseChange]]:
    """Layer → how its weight is changed before it is frozen, where it is."""
    if plan is None:
        return
    layers = adapted(model)
    merged = (name for plan in plan.merge for name in plan.targets)
    for name in dict.fromkeys([*(layers if plan.init else ()), *merged]):
        transposed = is_transposed(model.get_submodule(name))
        is_adapted = name in layers
        yield name, BaseChange(plan=plan, name=name, is_adapted=is_adapted, transposed=transposed)


def _draw_(whole: Tensor, name: str, *, seed: int) -> None:
    """Draw values as nn.Linear draws them, but from the parameter's own generator."""
    generator = generator_of(name, seed=seed)
    nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator)


def _norms(part: AdapterPart, shards: Shards) -> Tensor:
    """The norms of the rows of the weight of the part's layer. All ranks must call."""
    norms = row_norms(whole_weight(part.owner, shards.read))
    shards.release(part.owner.weight)
    if not norms.all():
        layer = part.name.partition(f".{MAGNITUDE}")[0]
        expected = f"weights without rows of zeros, whose norm divides ({layer} has one)"
        raise ConfigError([_wrong("name", "dora", expected, f"set adapter.exclude=[{layer}]")])
    return norms.to(part.parameter.dtype)


def identities(plan: AdapterPlan) -> list[str]:
    """A hash of the files of each adapter that is merged, which say what the weights became."""
    return [_hash_of(str(merged.path)) for merged in plan.merge]


def changes_beneath(plan: AdapterPlan | None) -> dict[str, Any]:
    """What decides how weights were changed before adapters trained on them, as plain data."""
    found: dict[str, Any] = {}
    if plan is not None and plan.init:
        numbers = ("init", "rank", "alpha", "rslora", "ranks", "alphas")
        found["adapter"] = {name: getattr(plan, name) for name in numbers}
    if plan is not None and plan.merge:
        found["merged"] = identities(plan)
    plain: dict[str, Any] = to_plain(found)
    return plain


@functools.cache
def _hash_of(folder: str) -> str:
    """Computed once per process, so that it is of the files with which a run started."""
    digest = hashlib.sha256()
    for name in (SETTINGS, WEIGHTS):
        with (Path(folder) / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def merges(model: nn.Module) -> Iterator[Merge]:
    """How each adapter of the model is merged with what it adapts."""
    names: dict[str, list[str]] = {}
    for part in parts(model):
        names.setdefault(part.name.rpartition(f".{part.role}.")[0], []).append(part.name)
    for name, layer in adapted(model).items():
        own: Any = layer
        yield Merge(
            weight=f"{name}.weight",
            parameter=own.weight,
            parts=tuple(names[name]),
            merged=partial(merged, scale=own.lora_scale, transposed=is_transposed(layer)),
            detach_=own.lora_hook.remove,
        )
    for name, module, key, adapter in adapted_parameters(model):
        owner = name.removesuffix(key) + PARAMETER_ADAPTER + key
        yield Merge(
            weight=name,
            parameter=cast(nn.Parameter, module._parameters[key]),
            parts=tuple(names[owner]),
            merged=partial(_merged_parameter, adapter=adapter),
            detach_=partial(parameters.detach_, module),
        )


def merged(
    weight: Tensor,
    a: Tensor,
    b: Tensor,
    magnitude: Tensor | None = None,
    *,
    scale: float,
    transposed: bool,
) -> Tensor:
    """The layer's weight with its adapter, computed in float32, in the weight's dtype.

    `weight` is [outputs, inputs], or its transpose; `magnitude` the norms of the rows of the sum.
    """
    found = (weight.T if transposed else weight).float() + (b.float() @ a.float()) * scale
    if magnitude is not None:
        found = scaled_rows(found, magnitude)
    return (found.T if transposed else found).to(weight.dtype)


def _merged_parameter(weight: Tensor, a: Tensor, b: Tensor, *, adapter: ParameterAdapter) -> Tensor:
    found = parameters.with_product(
        *(weight.float(), a.float(), b.float()),
        scale=adapter.scale,
        rank=adapter.rank,
        inputs_first=adapter.inputs_first,
    )
    return found.to(weight.dtype)


def peft_settings(
    model: nn.Module,
    plan: AdapterPlan,
    *,
    base: str | None,
    task: str | None = "CAUSAL_LM",
    left_out: Container[str] = (),
) -> dict[str, Any]:
    """The adapter_config.json of this model's adapters, as PEFT reads it.

    Where the weights below them were changed, the changes are part of them (and of their ranks), so
    that they go on the weights as they were, except for the layers in `left_out`.
    """
    layers = adapted(model)
    held = [name for name, *_ in adapted_parameters(model)]
    ranks = {name: plan.rank_of(name) for name in sorted([*layers, *held])}
    alphas = {name: plan.alpha_of(name) for name in ranks}
    rank, alpha = plan.rank, plan.alpha
    changes = {name: c for name, c in base_changes(model, plan) if name not in left_out}
    for name, change in changes.items():
        ranks[name] = ranks.get(name, 0) + change.rank
        alphas[name] = change.scale * (math.sqrt(ranks[name]) if plan.rslora else ranks[name])
    if changes:
        rank = Counter(ranks.values()).most_common(1)[0][0]
        alpha = Counter(alphas.values()).most_common(1)[0][0]
    names = sorted({*layers, *changes})
    return {
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": _patterns(ranks, rank),
        "alpha_pattern": _patterns(alphas, alpha),
        "lora_dropout": plan.dropout,
        "target_modules": names,
        "target_parameters": held or None,
        "fan_in_fan_out": any(is_transposed(model.get_submodule(name)) for name in names),
        "bias": "none",
        "init_lora_weights": True,
        "inference_mode": True,
        "use_rslora": plan.rslora,
        "use_dora": plan.name == "dora",
    }


def _patterns(numbers: Mapping[str, float], usual: float) -> dict[str, float]:
    """Regular expression on a whole name → its number, where that is not the usual one."""
    return {f"^{re.escape(name)}": n for name, n in numbers.items() if n != usual}


def to_json(settings: dict[str, Any]) -> str:
    return json.dumps(settings, indent=2, sort_keys=True) + "\n"


def _wrong(key: str, value: Any, expected: str, fix: str) -> Problem:
    return Problem(key=f"adapter.{key}", value=value, expected=expected, fix=fix)
