"""Building models from a plan, and giving them their initial weights.

Hugging Face directories and models that define `init_weights()` are built on the meta device and
filled after sharding; any other model is built with real tensors, under the run's seed, and keeps
its own initial values.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from colotrain.dotted import described, import_target
from colotrain.errors import ColotrainError
from colotrain.models import adapters, huggingface
from colotrain.models.filling import Shards
from colotrain.models.initialising import initialise_
from colotrain.models.llm import LLM
from colotrain.models.seeding import seeded
from colotrain.spec.plan import ModelPlan

_HAS_VALUES = "_colotrain_has_values"
"""Attribute of a model whose constructor loaded its weights."""
KEEPS_VALUES = "_colotrain_keeps_values"
"""Attribute of a model whose `init_weights()` is not called: it might replace loaded weights."""
UNCALLED = (
    "the model's init_weights() is not called, for its constructor needs real tensors and may have "
    "loaded weights: call it there, or build without values"
)


def build(plan: ModelPlan, *, seed: int) -> nn.Module:
    """Build the model: its parameters on the meta device if they can be filled later, else real.

    Every rank that calls this with the same seed gets the same model, adapters included.
    """
    structure = build_on_meta(plan)
    if structure is not None and plan.hf:
        return structure
    own_init = structure is not None and fills_itself(structure)
    with seeded(seed):
        model = _without_values(plan) if own_init else None
        if model is None:
            model = _with_values(plan)
            if own_init:
                initialise_(model, seed=seed, shards=WHOLE, has_values=True)
            elif structure is None and fills_itself(model):
                model.__dict__[KEEPS_VALUES] = True
    if plan.adapter is not None:
        adapters.attach_(model, plan.adapter)
        if not any(parameter.is_meta for parameter in model.parameters()):
            adapters.fill_(model, plan.adapter, seed=seed, shards=WHOLE)
    return model


def _without_values(plan: ModelPlan) -> nn.Module | None:
    """The model with only its parameters on the meta device; None where that is impossible.

    Buffers, other tensors of modules, and objects that hooks refer to are as the constructor
    makes them.
    """
    try:
        with huggingface.parameters_on_meta(), _Unfilled():
            model = _call_target(plan)
    except Exception:  # whatever a constructor raises that looks at values
        return None
    later = all(parameter.is_meta for parameter in model.parameters())
    return model if later and not any(b.is_meta for b in model.buffers()) else None


def _with_values(plan: ModelPlan) -> nn.Module:
    try:
        return _call_target(plan)
    except RuntimeError as error:  # on meta this only says that real tensors are needed
        raise _refused(plan, error) from error


def begin_training_(model: nn.Module) -> None:
    """Put `model` in training mode; modules that its constructor put in evaluation mode stay so.

    A model's own `train` method is called, as in a user's loop: it may keep modules in evaluation.
    """
    if not model.training or type(model).train is not nn.Module.train:
        model.train()  # transformers' from_pretrained leaves it in evaluation mode
        return
    for child in model.children():
        if child.training:
            begin_training_(child)


def build_whole(plan: ModelPlan, *, seed: int) -> nn.Module:
    """The unsharded model, for one process, with the initial weights of the sharded one."""
    model = build(plan, seed=seed)
    if any(parameter.is_meta for parameter in model.parameters()):
        allocate_(model, device="cpu")
        fill_(model, plan, seed=seed)
    return model


def build_on_meta(plan: ModelPlan) -> nn.Module | None:
    """The model without storage, or None where its constructor needs real tensors.

    The buffers of a Hugging Face model have storage.
    """
    if plan.hf is not None:
        model = huggingface.build(plan)
    else:
        mode = _Unfilled()
        try:
            with torch.device("meta"), mode, _watch_loading(mode):
                model = _call_target(plan)
        except Exception:  # whatever a constructor raises that looks at values
            return None
        model.__dict__[_HAS_VALUES] = mode.has_values
    if not all(parameter.is_meta for parameter in model.parameters()):
        return None
    if plan.adapter is not None:
        adapters.attach_(model, plan.adapter)
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
    real = {name: b.clone() for name, b in model.named_buffers() if not b.is_meta}
    for module in reversed(list(model.modules())):  # children first: an FSDP module reads theirs
        rests_on_host = any(id(p) in on_host for p in module.parameters(recurse=False))
        own = module._parameters
        left_out = {key: p for key, p in own.items() if p is not None and id(p) in elsewhere}
        own.update(dict.fromkeys(left_out))
        module.to_empty(device="cpu" if rests_on_host else device, recurse=False)
        own.update(left_out)
    for owner, name, other, other_name in ties:  # to_empty splits tied parameters
        setattr(other, other_name, getattr(owner, name))
    for name, buffer in model.named_buffers():
        if name in real:
            buffer.copy_(real[name])


def _ties(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module, str]]:
    first: dict[nn.Parameter, tuple[nn.Module, str]] = {}
    for module in model.modules():
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
    part: Callable[[Tensor], tuple[slice, ...]] = lambda tensor: (),
    given: Set[str] = frozenset(),
) -> None:
    """Give values to a model that `build` left on the meta device and `allocate_` gave storage.

    `shards` stores this rank's rows (default: all). `part(tensor)` are its slices of the
    whole tensor (() is all), so that only these are read from a model directory. Tensors whose
    names are in `given` get their values later: reading or computing them here is left out, but
    a user's `init_weights()` is called, as it may set anything else.
    """
    shards = shards or WHOLE
    if plan.hf is not None:
        huggingface.fill_(model, plan, seed=seed, shards=shards, part=part, given=given)
    elif fills_itself(model) and not _is_given(model, given):
        initialise_(model, seed=seed, shards=shards)
    if plan.adapter is not None:
        adapters.fill_(model, plan.adapter, seed=seed, shards=shards)


def _is_given(model: nn.Module, given: Set[str]) -> bool:
    """Whether all that `init_weights()` sets gets its value later: LLM's sets parameters alone."""
    here = {name for name, parameter in model.named_parameters() if not parameter.is_meta}
    return getattr(type(model), "init_weights", None) is LLM.init_weights and here <= given


def fills_itself(model: nn.Module) -> bool:
    """Whether `model.init_weights()` is called to fill it.

    It is not called where it would replace weights that the user's code has loaded: loading is
    noticed in the constructor, and transformers' models, which all have this method, are excluded.
    """
    foreign = any(base.__module__.startswith("transformers.") for base in type(model).__mro__)
    loaded = model.__dict__.get(_HAS_VALUES, False)
    return callable(getattr(model, "init_weights", None)) and not foreign and not loaded


def _write_whole(parameter: Tensor, whole: Tensor) -> None:
    parameter.copy_(whole)


WHOLE = Shards(write=_write_whole, read=lambda parameter: parameter.detach())
"""Functions that store and load parameters in a process that keeps them unsharded."""
RANDOM = frozenset({"normal_", "uniform_", "bernoulli_", "exponential_", "cauchy_"})


def _is_init(func: Any) -> bool:
    return getattr(func, "__module__", "") == "torch.nn.init"


class _Unfilled(TorchFunctionMode):
    """Skips initial values on the meta device: the first would load torch's compiler, 0.5 s."""

    has_values = False
    """Whether the constructor copied real values into a parameter without storage."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if _is_init(func) or name in RANDOM:
            target = kwargs["tensor"] if "tensor" in kwargs else args[0]
            if isinstance(target, Tensor) and target.is_meta:
                return target
        if name == "copy_" and len(args) > 1 and args[0].is_meta and not args[1].is_meta:
            self.has_values = True
        return func(*args, **kwargs)


@contextmanager
def _watch_loading(mode: _Unfilled) -> Iterator[None]:
    """Set `mode.has_values` when a state dict is loaded into a model."""
    load = nn.Module.load_state_dict

    def load_state_dict(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        mode.has_values = True
        with warnings.catch_warnings(action="ignore"):  # warns that meta tensors get no values
            return load(module, *args, **kwargs)

    nn.Module.load_state_dict = load_state_dict  # type: ignore
    try:
        yield
    finally:
        nn.Module.load_state_dict = load  # type: ignore[method-assign]


def _call_target(plan: ModelPlan) -> nn.Module:
    target = import_target("model.target", plan.target)
    try:
        model = target(**plan.args)
    except (RuntimeError, ColotrainError):  # on meta this only says that real tensors are needed
        raise
    except Exception as error:  # whatever the user's code raises
        raise _refused(plan, error) from error
    if not isinstance(model, nn.Module):
        raise ColotrainError(
            f"model.target={plan.target}: expected a callable that returns a torch.nn.Module, "
            f"got {type(model).__name__}",
            "return the module",
        )
    return model


def _refused(plan: ModelPlan, error: Exception) -> ColotrainError:
    problem = f"model.args={plan.args}: {plan.target} refused them ({described(error)})"
    fix = (
        "correct model.args (~model.args drops the recipe's, `args: null` its base's), or the code"
    )
    return ColotrainError(problem, fix)
