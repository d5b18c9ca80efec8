"""Tensor parallelism of models that know nothing of it, by a plan: module glob → style.

The styles and their names are those of transformers' `base_model_tp_plan`. The plan of a user's
own model is `mesh.tp_plan`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
import xxhash
from torch import Tensor, nn

from colotrain import module_tree
from colotrain.errors import ConfigError, Problem, suggest
from colotrain.models import adapters
from colotrain.models.graphs import run_eagerly
from colotrain.models.quantized import layers as packed_layers
from colotrain.models.tensor_parallel import (
    ATTRIBUTE,
    DIVISIONS,
    TensorShard,
    embed,
    enter,
    gather_last,
    leave,
    own_part,
    own_tokens,
    summed,
    with_summed_gradient,
)
from colotrain.spec.divisions import VOCABULARY, Divisions
from colotrain.spec.plan import ModelPlan
from colotrain.torch_internals import has_hooks

ROWS = ("colwise", "colwise_gather_output")
COLUMNS = ("rowwise", "rowwise_split_input")
SUMMED = "replicated_with_grad_allreduce"
"""Style of modules that are whole on all ranks and work on the parts of their inputs."""
LATENT = "mla_kv_a_proj"
"""Style of the whole layer that makes latent keys and values, and with them a key for all heads.

Its module has `qk_rope_head_dim`, the size of that key, of whose gradient each rank has a part.
"""
STYLES = (*ROWS, *COLUMNS, SUMMED, LATENT)
WHOLE = (SUMMED, LATENT)


def own_divisions(model: nn.Module, plan: ModelPlan) -> Divisions | None:
    """How the matrices of `model` can be divided; None where neither it nor `plan` says so.

    Raises `ConfigError` for everything in `mesh.tp_plan` that cannot be right.
    """
    own = getattr(model, DIVISIONS, None)
    if not plan.tp_plan:
        found = own() if callable(own) else None
        return None if found is None else _with_all(found, model)
    problems = []
    if own is not None:
        expected = f"null, for {plan.value} says itself how it is divided"
        problems = [Problem(key="mesh.tp_plan", expected=expected, fix="leave it out")]
    problems += problems_of(plan.tp_plan, model)
    if problems:
        raise ConfigError(problems)
    return _with_all(divisions_by(plan.tp_plan, model), model)


def _with_all(how: Divisions, model: nn.Module) -> Divisions:
    """Return `how` with adapters and packed blocks divided as the matrices are."""
    how = packed_layers.divide(adapters.divide(how, model), model)
    for name, parameter in module_tree.named_parameters(model):
        if how.dim_of(name) is not None and has_hooks(parameter):
            return replace(how, against=f"a hook of {name} would get a part of its gradient")
    return how


def problems_of(plan: Mapping[str, str], model: nn.Module) -> Iterator[Problem]:
    """What cannot be right in a plan, as problems of `mesh.tp_plan`."""
    modules = dict(adapters.own_modules(model))
    linears = suggest("", {name for name, module in modules.items() if _is_linear(module)})
    for glob, style in plan.items():
        key = f"mesh.tp_plan.{glob}"
        if style not in STYLES:
            expected = f"one of {', '.join(STYLES)}"
            yield Problem(key=key, value=style, expected=expected, fix=suggest(style, set(STYLES)))
            continue
        matched = {name: m for name, m in modules.items() if fnmatchcase(name, glob)}
        for name in matched:
            if before := next((g for g in plan if g != glob and fnmatchcase(name, g)), None):
                expected = f"modules that no other glob matches ({before} matches {name}, too)"
                yield Problem(key=key, value=style, expected=expected, fix="name each module once")
                break
        if not matched:
            yield Problem(key=key, expected="a glob that matches a module's name", fix=linears)
        for name, module in matched.items():
            if style in WHOLE and adapters.is_adapted(module):
                expected = f"modules without an adapter ({name} has one)"
                yield Problem(key=key, value=style, expected=expected, fix="adapt another")
                break
            if style == SUMMED:
                if inner := _with_parameters_inside(name, module):
                    expected = f"modules with parameters of their own ({inner} is inside {name})"
                    yield Problem(key=key, value=style, expected=expected, fix=f"name {inner}")
                    break
                continue
            if style == LATENT:
                parent = modules[name.rpartition(".")[0]]
                if not isinstance(getattr(parent, "qk_rope_head_dim", None), int):
                    expected = f"layers of a module with qk_rope_head_dim ({name} is in none)"
                    yield Problem(key=key, value=style, expected=expected, fix="leave it whole")
                    break
            if not _is_linear(module):
                kind = type(module).__name__
                expected = f"nn.Linear modules for {style} ({name} is a {kind})"
                yield Problem(key=key, value=style, expected=expected, fix="name its linears")
                break
            if others := _also_in(model, module):
                expected = f"matrices of their own ({name} shares its weight with {others})"
                yield Problem(key=key, value=style, expected=expected, fix="leave it whole")
                break


def _with_parameters_inside(name: str, module: nn.Module) -> str:
    """Name of a module inside with parameters, whose gradients would not be summed; "" for none."""
    found = (
        key for key, child in module_tree.named_children(module) if [*module_tree.parameters(child)]
    )
    return next((f"{name}.{key}" for key in found), "")


def _is_linear(module: nn.Module) -> bool:
    if isinstance(module, packed_layers.QuantizedLinear):
        return True
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward


def _also_in(model: nn.Module, module: nn.Module) -> str:
    """Name of another module with a parameter of `module`; "" for none."""
    own = set(module._parameters.values()) - {None}
    for name, other in module_tree.named_modules(model):
        if other is not module and not own.isdisjoint(other._parameters.values()):
            return name
    return ""


def divisions_by(
    plan: Mapping[str, str], model: nn.Module, sizes: Mapping[str, int] | None = None
) -> Divisions:
    """Return how `plan`, without problems, divides `model`.

    The number of ranks must divide `sizes`, too.
    """
    dims, divided = {}, dict(sizes or {})
    for glob, style in plan.items():
        if style in WHOLE:
            continue
        dim = 0 if style in ROWS else 1
        dims[f"{glob}.weight"] = dim
        if style in ROWS:
            dims[f"{glob}.bias"] = 0
        for name, module in adapters.own_modules(model):
            if fnmatchcase(name, glob):
                key = glob.rpartition(".")[2]
                size = (module.out_features, module.in_features)[dim]
                divided[key] = math.gcd(divided.get(key, 0), size)
    return Divisions(dims=dims, sizes=divided, styles=dict(plan))


def apply_styles_(model: nn.Module, divisions: Divisions, shard: TensorShard) -> None:
    """Let modules whose parameters are parts compute with those of the other ranks."""
    draws = OwnDraws(shard.rank)
    if shard.by_tokens and divisions.styles:
        _divide_tokens_(model, divisions, shard, draws)
    elif divisions.styles:
        for name in _parts_of(model, divisions):
            draws.end_with_(model.get_submodule(name))
    for name, module in adapters.own_modules(model):
        for glob, style in divisions.styles.items():
            if not fnmatchcase(name, glob):
                continue
            if style == SUMMED:
                of_sum = functools.partial(_summed, module, module.forward, shard)
                module.forward = functools.partial(run_eagerly, of_sum)
            elif style == LATENT:
                parent: Any = model.get_submodule(name.rpartition(".")[0])
                of_key = functools.partial(_latent, module.forward, parent.qk_rope_head_dim, shard)
                module.forward = functools.partial(run_eagerly, of_key)
            elif style != VOCABULARY:
                module.forward = functools.partial(
                    run_eagerly, _FORWARDS[style], module, shard, draws
                )
                if adapters.is_adapted(module):
                    adapters.leave_to_forward_(module)
            elif isinstance(module, nn.Embedding):
                if len(module.weight) < module.num_embeddings:
                    found = functools.partial(run_eagerly, embed, module, shard, out=summed)
                    module.forward = found  # type: ignore[method-assign]
            elif len(module.weight) < module.out_features:
                setattr(module, ATTRIBUTE, shard)  # its loss finds it there


class OwnDraws:
    """Random numbers where the ranks of a group have other units or tokens: each draws its own.

    Elsewhere all ranks draw the same, as what they have is the same. The own generator begins with
    a function of the common one's state and the rank: a recomputation, for which the common state
    is restored, drops the same. The common generator goes on by one number if the own one was used.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.common: tuple[torch.Generator, Tensor, Tensor] | None = None
        """The generator, and its states before and after it became this rank's own."""
        self.enclosing: list[bool] = []
        """Whether own numbers were drawn already, for each module that is being computed."""

    def begin(self, x: Tensor) -> None:
        """Draw own numbers on the device of `x` until `end`."""
        is_real = type(x) is Tensor and x.device.type in ("cpu", "cuda")  # others are for a plan
        if self.common is not None or not is_real:
            return
        generator = torch.default_generator
        if x.device.type == "cuda":
            generator = torch.cuda.default_generators[x.get_device()]
        before = generator.get_state()
        seed = xxhash.xxh3_64_intdigest(before.numpy().tobytes(), seed=self.rank)
        generator.manual_seed(seed >> 1)
        self.common = generator, before, generator.get_state()

    def end(self) -> None:
        """Draw what all ranks draw again."""
        if self.common is None:
            return
        generator, before, own = self.common
        was_used = not torch.equal(generator.get_state(), own)
        generator.set_state(before)
        if was_used:
            torch.rand((), device=generator.device)
        self.common = None

    def end_with_(self, module: nn.Module) -> None:
        """Let own draws that begin in a forward of `module` end with it, also after an error."""
        module.register_forward_pre_hook(functools.partial(run_eagerly, self._enter))
        leave_ = functools.partial(run_eagerly, self._leave)
        module.register_forward_hook(leave_, always_call=True)

    def _enter(self, *_: Any) -> None:
        self.enclosing.append(self.common is not None)

    def _leave(self, *_: Any) -> None:
        if not self.enclosing.pop():
            self.end()


def _beginning(draws: OwnDraws, x: Tensor) -> Tensor:
    draws.begin(x)
    return x


def layers_of(model: nn.Module, divisions: Divisions) -> nn.ModuleList | None:
    """Return the list of layers with the parts that `divisions.styles` divide; None for none."""
    parts = _parts_of(model, divisions)
    for name, module in module_tree.named_modules(model):
        if isinstance(module, nn.ModuleList) and any(p.startswith(f"{name}.") for p in parts):
            return module
    return None


def _parts_of(model: nn.Module, divisions: Divisions) -> set[str]:
    """Names of the modules, such as attention, that need all tokens: they begin with `ROWS`."""
    styles = divisions.styles.items()
    return {
        name.rpartition(".")[0]
        for name, _ in adapters.own_modules(model)
        if any(style in ROWS and fnmatchcase(name, glob) for glob, style in styles)
    }


def _divide_tokens_(
    model: nn.Module, divisions: Divisions, shard: TensorShard, draws: OwnDraws
) -> None:
    """Let each rank have its own tokens from the first layer on, and all tokens inside parts."""
    layers = layers_of(model, divisions)
    assert layers is not None, "checked when the plan was made"
    _change_first_(layers[0], functools.partial(own_tokens, shard=shard))
    _change_first_(layers[0], functools.partial(_beginning, draws))
    draws.end_with_(model)
    for name in _parts_of(model, divisions):
        _change_first_(model.get_submodule(name), functools.partial(enter, shard=shard))


def _change_first_(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    hook = functools.partial(run_eagerly, _with_first, change)
    module.register_forward_pre_hook(hook, with_kwargs=True)


def _with_first(
    change: Callable[[Tensor], Tensor],
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a module's inputs with another first one, as transformers gives hidden states."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}


def partial_parameters(
    model: nn.Module, divisions: Divisions, shard: TensorShard, splits: Container[str]
) -> frozenset[str]:
    """Names of the parameters that all ranks hold, of whose gradients each has a part.

    With `by_tokens` it is that of its own tokens, but for parameters inside parts, which have the
    gradients of all tokens; a bias of a sum is added outside.
    """
    found = set(adapters.partial_parameters(model, splits))
    if not shard.by_tokens:
        return frozenset(found)
    parts = tuple(f"{name}." for name in _parts_of(model, divisions))
    sums = [glob for glob, style in divisions.styles.items() if style in COLUMNS]
    for name, _ in module_tree.named_parameters(model):
        is_of_sum = any(fnmatchcase(name.rpartition(".")[0], glob) for glob in sums)
        is_before = name in divisions.before  # the gradient of the first layer's input is whole
        if name not in splits and not is_before and (is_of_sum or not name.startswith(parts)):
            found.add(name)
    return frozenset(found)


def _summed(
    module: nn.Module, forward: Callable[..., Any], shard: TensorShard, *args: Any, **kwargs: Any
) -> Any:
    """Compute with parameters whose gradients are summed, those that `fully_shard` has gathered."""
    own = dict(module._parameters)
    entered = {n: None if p is None else with_summed_gradient(p, shard) for n, p in own.items()}
    module._parameters.update(entered)  # type: ignore[arg-type]
    try:
        return forward(*args, **kwargs)
    finally:
        module._parameters.update(own)


def _latent(
    forward: Callable[[Tensor], Tensor], size: int, shard: TensorShard, x: Tensor
) -> Tensor:
    """The layer's output, the last `size` numbers of which go into heads without another layer."""
    latent, key = (out := forward(x)).split((out.shape[-1] - size, size), dim=-1)
    return torch.cat((latent, with_summed_gradient(key, shard)), dim=-1)


def _colwise(module: nn.Linear, shard: TensorShard, draws: OwnDraws, x: Tensor) -> Tensor:
    if shard.by_tokens:  # `x` has entered the part that the module is in
        return _product(module, x, module.bias)
    draws.end()  # an adapter drops the same features of `x` on all ranks
    found = _product(module, enter(x, shard), module.bias)
    draws.begin(found)
    return found


def _product(module: nn.Linear, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """The module's output without the other ranks, and that of its adapter."""
    if isinstance(module, packed_layers.QuantizedLinear):
        found = module.product(x, bias)
    else:
        found = F.linear(x, module.weight, bias)
    if not adapters.is_adapted(module):
        return found
    return adapters.add_product(module, x, found, bias=bias)


def _colwise_gather_output(
    module: nn.Linear, shard: TensorShard, draws: OwnDraws, x: Tensor
) -> Tensor:
    whole = gather_last(_colwise(module, shard, draws, x), shard, alike=True)
    if not shard.by_tokens:
        draws.end()
    return whole


def _rowwise(module: nn.Linear, shard: TensorShard, draws: OwnDraws, x: Tensor) -> Tensor:
    if not shard.by_tokens:
        draws.end()
    whole = leave(_product(module, x), shard)
    return whole if module.bias is None else whole + module.bias


def _rowwise_split_input(
    module: nn.Linear, shard: TensorShard, draws: OwnDraws, x: Tensor
) -> Tensor:
    return _rowwise(module, shard, draws, own_part(x, shard))


_FORWARDS: dict[str, Callable[..., Any]] = {
    "colwise": _colwise,
    "colwise_gather_output": _colwise_gather_output,
    "rowwise": _rowwise,
    "rowwise_split_input": _rowwise_split_input,
}
