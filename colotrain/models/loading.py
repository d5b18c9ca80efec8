"""Building models from a plan, and giving them their initial weights.

Hugging Face directories and models that define `init_weights()` are built on the meta device and
filled after sharding; any other model is built for real, under the run's seed, and keeps its own
initial values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from colotrain.dotted import import_target
from colotrain.errors import ColotrainError
from colotrain.models import adapters, huggingface
from colotrain.models.seeding import generator_of
from colotrain.plan import ModelPlan


def build(plan: ModelPlan, *, seed: int) -> nn.Module:
    """The model: on the meta device where it can be filled later, otherwise for real.

    Every rank that calls this with one seed gets the same model, its adapters on it.
    """
    model = build_on_meta(plan)
    if model is not None and (plan.hf or fills_itself(model)):
        return model
    torch.manual_seed(seed)
    try:
        model = _call_target(plan)
    except RuntimeError as error:  # on meta this only says that real tensors are needed
        raise _refused(plan, error) from error
    if plan.adapter is not None:
        adapters.attach_(model, plan.adapter)
        adapters.fill_(model, plan.adapter, seed=seed, write=_write_whole)
    return model


def build_whole(plan: ModelPlan, *, seed: int) -> nn.Module:
    """The whole model with its initial weights, for one process: what the sharded one starts as."""
    model = build(plan, seed=seed)
    if any(parameter.is_meta for parameter in model.parameters()):
        allocate_(model, device="cpu")
        fill_(model, plan, seed=seed)
    return model


def build_on_meta(plan: ModelPlan) -> nn.Module | None:
    """The model without storage, or None where its constructor needs real tensors.

    Of a Hugging Face model only the parameters have none.
    """
    if plan.hf is not None:
        model = huggingface.build(plan)
    else:
        try:
            with torch.device("meta"), _Unfilled():
                model = _call_target(plan)
        except (NotImplementedError, RuntimeError):
            return None
    if not all(parameter.is_meta for parameter in model.parameters()):
        return None
    if plan.adapter is not None:
        adapters.attach_(model, plan.adapter)
    return model


def allocate_(model: nn.Module, *, device: str) -> None:
    """Storage for what is on the meta device; tied parameters and real buffers stay as they are."""
    ties = list(_ties(model))
    real = {name: b.clone() for name, b in model.named_buffers() if not b.is_meta}
    model.to_empty(device=device)
    for owner, name, other, other_name in ties:  # to_empty makes two of a tied parameter
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
    write: Callable[[Tensor, Tensor], None] | None = None,
    rows: Callable[[Tensor], tuple[int, int] | None] = lambda tensor: None,
    release: Callable[[Tensor], None] = lambda tensor: None,
) -> None:
    """Give a model that `build` left on the meta device, and `allocate_` storage, its values.

    `write` and `release` are as in `initialise_`; `rows(tensor)` says which rows of it this rank
    holds (first and number; None: all), so that only those are read from a model directory.
    """
    if plan.hf is not None:
        huggingface.fill_(model, plan, rows=rows, release=release)
    elif fills_itself(model):
        initialise_(model, seed=seed, write=write, release=release)
    if plan.adapter is not None:
        adapters.fill_(model, plan.adapter, seed=seed, write=write or _write_whole)


def fills_itself(model: nn.Module) -> bool:
    """Whether `model.init_weights()` may be called to fill it.

    Models of the transformers library are excluded: they have a method of that name, and
    calling it would replace weights that the user's own code has just loaded.
    """
    # whether a mask was filled cannot be seen: such a model is built for real
    markable = not any(b.dtype == torch.bool or b.is_complex() for b in model.buffers())
    foreign = any(base.__module__.startswith("transformers.") for base in type(model).__mro__)
    return callable(getattr(model, "init_weights", None)) and markable and not foreign


def initialise_(
    model: nn.Module,
    *,
    seed: int,
    write: Callable[[Tensor, Tensor], None] | None = None,
    release: Callable[[Tensor], None] = lambda tensor: None,
) -> None:
    """Give every parameter and buffer its initial value, a function of seed and name alone.

    `model.init_weights()` comes first; what it leaves unset, its module's `reset_parameters()`
    fills as torch would have done at construction. What is then still unset is an error.

    Random draws for a parameter come from a generator of its own, as a whole tensor on the CPU;
    `write(parameter, whole)` stores what this rank keeps of it (default: all of it). So the values
    are the same for every world size and plugin. `release(tensor)` is told when one is done with
    for the moment.
    """
    torch.manual_seed(seed)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for tensor in tensors.values():
            _local(tensor).fill_(_unset(tensor.dtype))
            release(tensor)
        with _SeededByName(model, seed=seed, write=write or _write_whole, release=release):
            model.init_weights()  # type: ignore[operator]
            for module in model.modules():
                _reset_unset(module)
    unset = []
    for name, tensor in tensors.items():
        unset += [name] if _is_unset(tensor) else []
        release(tensor)
    if unset:
        raise ColotrainError(
            f"model.target: init_weights() leaves {unset[0]} unset ({len(unset)} in all)",
            "it runs on empty storage: fill every parameter and buffer in it",
        )


def _reset_unset(module: nn.Module) -> None:
    """Default values for what `init_weights` did not fill; what it filled stays."""
    own = dict(module.named_parameters(recurse=False))
    unset = {name for name, parameter in own.items() if _is_unset(parameter)}
    reset = getattr(module, "reset_parameters", None)
    if not unset or not callable(reset):
        return
    filled = {n: _local(p).clone() for n, p in own.items() if n not in unset}
    reset()
    for name, value in filled.items():
        _local(own[name]).copy_(value)


def _unset(dtype: torch.dtype) -> float:
    return float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min


def _is_unset(tensor: Tensor) -> bool:
    local = _local(tensor)
    mark = torch.isnan(local) if local.dtype.is_floating_point else local == _unset(local.dtype)
    return bool(mark.any())


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, sharing its memory."""
    return getattr(tensor, "_local_tensor", tensor)


def _write_whole(parameter: Tensor, whole: Tensor) -> None:
    parameter.copy_(whole)


RANDOM = frozenset({"normal_", "uniform_", "bernoulli_", "exponential_", "cauchy_"})


def _is_init(func: Any) -> bool:
    return getattr(func, "__module__", "") == "torch.nn.init"


class _Unfilled(TorchFunctionMode):
    """Leaves out initial values on the meta device: the first loads torch's compiler, 0.5 s."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_init(func) or getattr(func, "__name__", "") in RANDOM:
            target = kwargs["tensor"] if "tensor" in kwargs else args[0]
            if isinstance(target, Tensor) and target.is_meta:
                return target
        return func(*args, **kwargs)


class _SeededByName(TorchFunctionMode):
    """Turns in-place random draws on parameters into draws seeded by the parameter's name."""

    def __init__(
        self,
        model: nn.Module,
        *,
        seed: int,
        write: Callable[[Tensor, Tensor], None],
        release: Callable[[Tensor], None],
    ) -> None:
        super().__init__()
        self.write, self.release = write, release
        self.generators: dict[int, torch.Generator] = {}
        for name, parameter in model.named_parameters():
            self.generators[_storage_key(parameter)] = generator_of(name, seed=seed)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        by_init = _is_init(func)
        if not by_init and getattr(func, "__name__", "") not in RANDOM:
            return func(*args, **kwargs)
        target = kwargs.pop("tensor", None) if by_init else args[0]
        if target is None:
            target = args[0]
        generator = self.generators.get(_storage_key(target))
        if generator is None:
            return func(target, *args[1:], **kwargs)
        if not by_init or "generator" in kwargs:
            kwargs["generator"] = generator
        whole = torch.empty(target.shape, dtype=target.dtype)
        self.write(target, func(whole, *args[1:], **kwargs))
        self.release(target)
        return target


def _storage_key(tensor: Tensor) -> int:
    local = _local(tensor)
    return local.data_ptr() if local.numel() else id(tensor)


def _call_target(plan: ModelPlan) -> nn.Module:
    target = import_target("model.target", plan.target)
    try:
        model = target(**plan.args)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise _refused(plan, error) from error
    if not isinstance(model, nn.Module):
        raise ColotrainError(
            f"model.target={plan.target}: expected a callable that returns a torch.nn.Module, "
            f"got {type(model).__name__}",
            "return the module",
        )
    return model


def _refused(plan: ModelPlan, error: Exception) -> ColotrainError:
    problem = f"model.args={plan.args}: {plan.target} refused them ({error})"
    return ColotrainError(problem, "correct model.args")
