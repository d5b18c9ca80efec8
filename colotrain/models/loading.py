"""Building models from a plan, and giving them their initial weights.

A user's model is built as plain torch builds it: with its values, under the run's seed. Hugging
Face directories, colotrain's own models and models with `model.deferred_init` are built without
values for their parameters, and filled after sharding.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Container, Iterator, Set
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from colotrain import module_tree
from colotrain.dotted import described, import_target, shown_path
from colotrain.errors import ColotrainError, UsageError
from colotrain.forked import in_fork
from colotrain.generators import seed_all, seeded
from colotrain.models import adapters, huggingface
from colotrain.models.allocating import Allocates, KeepsEscaped
from colotrain.models.facts import facts_of
from colotrain.models.filling import ParameterFiller, Shards
from colotrain.models.huggingface_heads import train_new_layers_
from colotrain.models.llm import LLM
from colotrain.models.quantized import filling as quantized_filling
from colotrain.models.quantized.layers import quantize_
from colotrain.spec.plan import ModelPlan
from colotrain.torch_internals import storage_id, uncompiled_
from colotrain.user_modules import is_users

INIT_WEIGHTS = "init_weights"
"""Method of a model that sets its parameters."""
RESTORED = frozenset({INIT_WEIGHTS, "reset_parameters", "_reset_parameters"})
"""Methods whose values a constructor may set, as `init_weights()` sets them again."""
COMPILED = (
    "torch.compile on the model, or on modules in it, is taken off: parameters keep their names; "
    "train.compile=true compiles each block"
)


def build(plan: ModelPlan, *, seed: int) -> nn.Module:
    """Build the model: its parameters on the meta device where they get values later, else real.

    Every rank that calls this with the same seed gets the same model, adapters included.
    """
    with seeded(seed):
        model = _without_values(plan) if plan.is_deferred else _with_values(plan)
    _change_(model, plan)
    if plan.adapter is not None and not plan.is_deferred:
        adapters.fill_(model, plan.adapter, seed=seed, shards=WHOLE)
    return model


def _change_(model: nn.Module, plan: ModelPlan) -> None:
    """Add the adapters, and let the layers below them hold blocks where the plan asks for it."""
    if plan.adapter is not None:
        adapters.attach_(model, plan.adapter)
        if plan.head is not None:
            train_new_layers_(model)
    if plan.quantize is not None:
        quantize_(model, plan.quantize)


def _with_values(plan: ModelPlan) -> nn.Module:
    try:
        model = _call(import_target("model.target", plan.target), plan)
    except RuntimeError as error:  # on meta this only says that real tensors are needed
        raise _refused(plan, error) from error
    for name, tensor in [*module_tree.named_parameters(model), *module_tree.named_buffers(model)]:
        if tensor.is_meta:
            raise UsageError(
                f"model.target={plan.target}: {name} is on the meta device, without a value",
                "return a model that has its values, or set model.deferred_init=true if its "
                "init_weights() sets them",
            )
    return model


def _without_values(plan: ModelPlan) -> nn.Module:
    """The model with only its parameters on the meta device.

    Buffers, other tensors of modules, and objects that hooks refer to are as the constructor
    makes them. Raises `ColotrainError` where this would lose values.
    """
    if plan.hf is not None:
        return huggingface.build(plan)
    mode, target = _Unfilled(), import_target("model.target", plan.target)
    try:
        with huggingface.parameters_on_meta(mode.registered), mode:
            model = _call(target, plan)
    except RuntimeError as error:  # of operations that need values
        raise _refused(plan, error) from error
    if problem := _lost(model, mode):
        raise UsageError(
            f"model.deferred_init=true: {plan.target}: {problem}",
            "set every parameter in init_weights(), or set model.deferred_init=false",
        )
    facts_of(model).init_called = mode.init_called
    return model


def _lost(model: nn.Module, mode: _Unfilled) -> str:
    """What keeps `init_weights()` alone from restoring the model's values; empty: nothing."""
    if not callable(getattr(model, INIT_WEIGHTS, None)):
        return "the model has no init_weights()"
    if _is_transformers(model):
        return "it is a model of transformers: give its directory as model.hf"
    for name, parameter in module_tree.named_parameters(model):
        if not parameter.is_meta:
            return f"{name} has its value already"
        if line := mode.line_of(parameter):
            return f"{name} gets a value outside of init_weights() and reset_parameters() ({line})"
    computed = [name for name, buffer in module_tree.named_buffers(model) if buffer.is_meta]
    return f"the buffer {computed[0]} is computed from parameters" if computed else ""


def _is_transformers(model: nn.Module) -> bool:
    return any(base.__module__.startswith("transformers.") for base in type(model).__mro__)


def leaves_init_uncalled(model: nn.Module) -> bool:
    """Whether a model that `build_on_meta` made has an `init_weights()` that nobody calls."""
    has_own = callable(getattr(model, INIT_WEIGHTS, None)) and not _is_transformers(model)
    return has_own and not facts_of(model).init_called


def begin_training_(model: nn.Module) -> None:
    """Put `model` in training mode; modules that its constructor put in evaluation mode stay so.

    A model's own `train` method is called, as in a user's loop: it may keep modules in evaluation.
    """
    if not model.training or type(model).train is not nn.Module.train:
        model.train()  # transformers' from_pretrained leaves it in evaluation mode
        return
    for child in module_tree.children(model):
        if child.training:
            begin_training_(child)


def build_whole(plan: ModelPlan, *, seed: int) -> nn.Module:
    """The unsharded model, for one process, with the initial weights of the sharded one."""
    model = build(plan, seed=seed)
    if any(parameter.is_meta for parameter in module_tree.parameters(model)):
        allocate_(model, device="cpu")
        fill_(model, plan, seed=seed)
    return model


def build_on_meta(plan: ModelPlan) -> nn.Module | None:
    """The model without values, or None where its constructor needs them.

    The buffers of a model whose parameters get values later have storage.
    """
    if plan.is_deferred:
        model = _without_values(plan)
    else:
        # imported before: what the user's module makes when it is imported keeps its values
        import_target("model.target", plan.target)
        if not in_fork(partial(_can_do_without_values, plan)):
            return None
        model = _called_on_meta(plan)
    if not all(parameter.is_meta for parameter in module_tree.parameters(model)):
        return None
    _change_(model, plan)
    return model


def _can_do_without_values(plan: ModelPlan) -> bool:
    """Whether the constructor of a user's model needs no values. What it keeps has none then."""
    try:
        _called_on_meta(plan)
    except Exception:  # whatever a constructor raises that looks at values
        return False
    return True


def _called_on_meta(plan: ModelPlan) -> nn.Module:
    mode, target = _Unfilled(), import_target("model.target", plan.target)
    with torch.device("meta"), mode, warnings.catch_warnings(action="ignore"):
        model = _call(target, plan)
    facts_of(model).init_called = mode.init_called
    return model


def allocate_(
    model: nn.Module,
    *,
    device: str,
    on_host: Set[int] = frozenset(),
    elsewhere: Set[int] = frozenset(),
) -> None:
    """Allocate tensors that are on the meta device; parameters stay tied, and buffers keep values.

    A module with a parameter in `on_host` (ids) is allocated on the host, not on `device`.
    Parameters in `elsewhere` stay on the meta device.
    """
    ties = list(_ties(model))
    real = {name: b.clone() for name, b in module_tree.named_buffers(model) if not b.is_meta}
    for module in reversed(
        list(module_tree.modules(model))
    ):  # children first: an FSDP module reads theirs
        rests_on_host = any(id(p) in on_host for p in module._parameters.values())
        own = module._parameters
        left_out = {key: p for key, p in own.items() if p is not None and id(p) in elsewhere}
        own.update(dict.fromkeys(left_out))
        module.to_empty(device="cpu" if rests_on_host else device, recurse=False)
        own.update(left_out)
    for owner, name, other, other_name in ties:  # to_empty splits tied parameters
        setattr(other, other_name, getattr(owner, name))
    for name, buffer in module_tree.named_buffers(model):
        if name in real:
            buffer.copy_(real[name])


def _ties(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module, str]]:
    first: dict[nn.Parameter, tuple[nn.Module, str]] = {}
    for module in module_tree.modules(model):
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if parameter in first:
                yield (*first[parameter], module, name)
            else:
                first[parameter] = (module, name)


def fill_(
    model: nn.Module,
    plan: ModelPlan,
    *,
    seed: int,
    shards: Shards | None = None,
    given: Set[str] = frozenset(),
) -> None:
    """Give values to a model that `build` left on the meta device and `allocate_` gave storage.

    `shards` stores this rank's part (default: all). Tensors whose names are in `given` get their
    values later: reading or computing them here is left out, but a user's `init_weights()` is
    called, as it may set anything else.
    """
    shards = shards or WHOLE
    packed, packing = quantized_filling.names_in(model), quantized_filling.packing(model, shards)
    if plan.hf is not None:
        huggingface.fill_(model, plan, seed=seed, shards=shards, given=given | packed)
        quantized_filling.read_(model, plan, shards=shards, given=given)
    elif not _is_given(model, given):
        later = {part.name for part in adapters.parts(model)}
        initialise_(model, seed=seed, shards=packing, later=later | packed)
    if plan.adapter is not None:
        adapters.fill_(model, plan.adapter, seed=seed, shards=packing, given=given)


def _is_given(model: nn.Module, given: Set[str]) -> bool:
    """Whether all that `init_weights()` sets gets its value later: LLM's sets parameters alone."""
    here = {
        name for name, parameter in module_tree.named_parameters(model) if not parameter.is_meta
    }
    return getattr(type(model), "init_weights", None) is LLM.init_weights and here <= given


def _write_whole(parameter: Tensor, whole: Tensor) -> None:
    parameter.copy_(whole)


WHOLE = Shards(write=_write_whole, read=lambda parameter: parameter.detach())
"""Functions that store and load parameters in a process that keeps them unsharded."""
RANDOM = frozenset({"normal_", "uniform_", "bernoulli_", "exponential_", "cauchy_"})
METHODS = frozenset(dir(torch.Tensor))
WRITES = frozenset(
    name
    for name in METHODS
    if re.fullmatch(r"\w*[a-z0-9]_", name)
    or (name.startswith("__i") and f"__{name[3:]}" in METHODS)  # __iadd__, for there is __add__
) - {"requires_grad_", "detach_", "share_memory_"} | {"__setitem__"}
"""Methods of tensors that change values in place."""


def _is_init(func: Any) -> bool:
    return getattr(func, "__module__", "") == "torch.nn.init"


class _Unfilled(TorchFunctionMode):
    """Skips initial values on the meta device: the first would load torch's compiler, 0.5 s.

    It notes which values set meanwhile a later call of `init_weights()` would not restore.
    """

    def __init__(self) -> None:
        super().__init__()
        self.init_called = False
        """Whether the model's `init_weights()` was called."""
        self.lost: list[tuple[Tensor, str]] = []
        """Tensors with such values, and the user's lines that set them."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        target = kwargs.get("tensor", kwargs.get("out", args[0] if args else None))
        if isinstance(target, Tensor) and target.is_meta:
            draws = _is_init(func) or name in RANDOM
            assigns = func == torch.Tensor.data.__set__  # type: ignore[attr-defined]
            if draws or assigns or name in WRITES or "out" in kwargs:
                self._note(target)
            if draws:
                return target
            if assigns and not args[1].is_meta:  # torch refuses data of another kind
                return None
        return func(*args, **kwargs)

    def registered(self, parameter: nn.Parameter) -> None:
        """Note a parameter that a module gets after `init_weights()`."""
        if self.init_called:
            self._note(parameter)

    def _note(self, target: Tensor) -> None:
        """Note a value, unless it is set within a method that sets it again."""
        frame, methods, line = sys._getframe(2), set(), ""
        while frame is not None:
            methods.add(frame.f_code.co_name)
            if not line and is_users(frame.f_code.co_filename):
                line = f"{shown_path(frame.f_code.co_filename)}:{frame.f_lineno}"
            frame = frame.f_back  # type: ignore[assignment]
        self.init_called |= INIT_WEIGHTS in methods
        if not methods & RESTORED:
            self.lost.append((target, line or "in an installed package"))

    def line_of(self, parameter: nn.Parameter) -> str:
        """The line that set a value of `parameter` which would be lost; empty: none did."""
        own = storage_id(parameter.untyped_storage())
        lines = (line for t, line in self.lost if storage_id(t.untyped_storage()) == own)
        return next(lines, "")


def _call(target: Callable[..., Any], plan: ModelPlan) -> nn.Module:
    try:
        model = target(**plan.args)
    except (RuntimeError, ColotrainError):  # on meta this only says that real tensors are needed
        raise
    except Exception as error:  # whatever the user's code raises
        raise _refused(plan, error) from error
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"model.target={plan.target}: expected a callable that returns a torch.nn.Module, "
            f"got {type(model).__name__}",
            "return the module",
        )
    model, was_compiled = uncompiled_(model)
    if was_compiled:
        facts_of(model).was_compiled = True
    return model


def _refused(plan: ModelPlan, error: Exception) -> ColotrainError:
    problem = f"model.args={plan.args}: {plan.target} refused them ({described(error)})"
    fix = (
        "correct model.args (~model.args drops the recipe's, `args: null` its base's), or the code"
    )
    if plan.deferred_init:
        fix += "; if it needs the values of parameters, set model.deferred_init=false"
    return ColotrainError(problem, fix)


def initialise_(model: nn.Module, *, seed: int, shards: Shards, later: Container[str] = ()) -> None:
    """Call `model.init_weights()`, which gives every parameter its value. All ranks must call.

    Random values of a parameter come from its own generator, seeded by its name; other random
    numbers come from the global generators. A parameter that is left without a value is an error,
    except for those in `later`.
    """
    names = [name for name, _ in module_tree.named_parameters(model)]
    filler = ParameterFiller(model, seed=seed, shards=shards)
    with torch.no_grad(), filler.whole_parameters():
        seed_all(seed)
        with KeepsEscaped(filler), Allocates(filler):
            model.init_weights()  # type: ignore[operator]
        filler.finish(later=later)
    if added := [name for name, _ in module_tree.named_parameters(model) if name not in names]:
        raise UsageError(
            f"model.deferred_init=true: init_weights() adds the parameter {added[0]}",
            "make every parameter in the constructor",
        )
