"""Hooks and attributes of users' parameters, and misuse of parameters in a user's forward.

`fully_shard` replaces every parameter twice: by the shard that a rank keeps, and by the whole
parameter that a forward computes with. Hooks and attributes of the user's parameter are moved to
both; what cannot be moved is an error that names the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from colotrain import module_tree
from colotrain.engine.sharding.fsdp_internals import (
    before_backward_of,
    name_of,
    state_of,
    unsharded_of,
)
from colotrain.errors import ColotrainError
from colotrain.torch_internals import (
    DisableTorchFunctionSubclass,
    forget_hooks,
    hooks_of,
    tree_leaves,
)

Hook = Callable[[Tensor], Tensor | None]
TORCH_PREFIXES = ("_fsdp", "_is_param")
"""Prefixes of attributes that torch itself sets on parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """Hooks and attributes that the user's code attached to one parameter."""

    attributes: dict[str, Any]
    hooks: Mapping[int, Hook]
    """Hooks by the id of `register_hook`; one that is removed later disappears here, too."""
    dtype: torch.dtype
    """Dtype of the parameter, in which its hooks expect gradients."""

    def set_attributes(self, parameter: Tensor) -> None:
        parameter.__dict__.update(self.attributes)

    def register(self, parameter: Tensor, *, ranks: int) -> None:
        """Let `parameter`, which replaces the user's, call the user's hooks."""
        self.set_attributes(parameter)
        if not self.hooks:
            return
        forget_hooks(parameter)  # a parameter that is not sharded still has them
        trains = parameter.requires_grad
        parameter.requires_grad_(True)  # a frozen parameter may be unfrozen later
        parameter.register_hook(lambda grad: self._call(grad, ranks))
        parameter.requires_grad_(trains)

    def _call(self, grad: Tensor, ranks: int) -> Tensor:
        """Return the gradient after all hooks.

        Hooks see what they would see under DDP: a rank's gradient in the parameter's dtype, not yet
        divided by the number of ranks. They may change it in place.
        """
        seen = grad.to(self.dtype)
        seen = seen * ranks if ranks > 1 else seen
        for hook in list(self.hooks.values()):
            changed = hook(seen)
            seen = seen if changed is None else changed
        seen = seen / ranks if ranks > 1 else seen
        return seen.to(grad.dtype)


def attached_to(model: nn.Module) -> dict[str, Attached]:
    """Return parameter name → hooks and attributes, before `model` is sharded."""
    found = {}
    for name, parameter in module_tree.named_parameters(model):
        attributes = {
            key: value
            for key, value in vars(parameter).items()
            if not key.startswith(TORCH_PREFIXES)
        }
        hooks = hooks_of(parameter)
        if attributes or hooks:
            found[name] = Attached(attributes=attributes, hooks=hooks, dtype=parameter.dtype)
    return found


def attach_(
    model: nn.Module, fsdp_params: Iterator[Any], attached: Mapping[str, Attached], *, ranks: int
) -> None:
    """Move what `attached_to` found to the shards, and to the whole parameters once they exist.

    `fsdp_params` are the FSDPParams of the model.
    """
    names = {parameter: name for name, parameter in module_tree.named_parameters(model)}
    for param in fsdp_params:
        found = attached.get(names[param.sharded_param])
        if found is not None:
            found.set_attributes(param.sharded_param)
            when_unsharded(param, partial(found.register, ranks=ranks))


def when_unsharded(param: Any, act: Callable[[nn.Parameter], None]) -> None:
    """Call `act` once, with the whole parameter that torch makes at the first use of `param`.

    torch makes one object per parameter, whose memory is freed and allocated again.
    """
    before = param.to_unsharded

    def to_unsharded() -> None:
        param.to_unsharded = before
        whole = unsharded_of(param)
        assert whole is not None
        act(whole)
        before()

    param.to_unsharded = to_unsharded


class UnshardedParameter(nn.Parameter):
    """A whole parameter whose `.data` is recorded while a forward runs.

    A change through `.data` does not raise the version of the parameter itself.
    """

    _watch: ForwardWatch
    _name: str

    @property
    def data(self) -> Tensor:
        alias: Tensor = torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]
        if self._watch.running:
            self._watch.aliases.append((self._name, alias))
        return alias

    @data.setter
    def data(self, value: Tensor) -> None:
        if self._watch.running:
            raise changed_in_place(self._name)
        torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]


class UngatheredShard(DTensor):
    """A parameter in a forward whose group is not gathered: computing with it is an error.

    torch would compute with this rank's rows alone, silently, or fail with an error that does not
    name the parameter.
    """

    __slots__ = ()
    name_here: str | None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = next(p.name_here for p in tree_leaves((args, kwargs)) if type(p) is cls)
        with DisableTorchFunctionSubclass():
            try:
                result = func(*args, **(kwargs or {}))
            except RuntimeError as error:  # torch cannot mix whole tensors and shards
                raise used_outside(name) from error
        is_read = not any(isinstance(leaf, Tensor) for leaf in tree_leaves(result))
        if is_read or func == GRAD:  # a shape, say, can be asked for anywhere
            return result
        raise used_outside(name)


GRAD: Any = cast(Any, torch.Tensor.grad).__get__


class ReplacedParameter(nn.Parameter):
    """A parameter of the model before sharding, to which some code has kept a reference.

    Training changes only its shards: a computation with this one would use the initial values, and
    its gradient would be lost.
    """

    _name: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)) or func == GRAD:
            return result
        name = next(p._name for p in tree_leaves((args, kwargs)) if isinstance(p, cls))
        raise ColotrainError(
            f"model: computes with {name} by a reference from when it was made (in a list, a hook "
            "or a closure), which training does not change",
            "reach it through its module (self.layer.weight)",
        )


def watch_replaced(originals: Mapping[str, ref[nn.Parameter]], model: nn.Module) -> None:
    """Let parameters of `originals` that sharding has replaced refuse computations."""
    kept = set(module_tree.parameters(model))
    for name, reference in originals.items():
        parameter = reference()
        if parameter is not None and parameter not in kept and type(parameter) is nn.Parameter:
            parameter.__class__ = ReplacedParameter
            parameter._name = name  # type: ignore[attr-defined]


@dataclass(slots=True, eq=False)
class ForwardWatch:
    """Ends the run when a forward changes a sharded parameter in place, or uses one too early.

    The change would be lost where parameters are gathered, and made by every rank in the same
    memory where they are shared. torch counts in-place changes in a tensor's version.
    """

    params: list[Any]
    """torch's records of the parameters (FSDPParam)."""
    versions: dict[int, int] = field(default_factory=dict)
    """Index of the parameter → its version when the forward began."""
    owners: list[tuple[nn.Module, str, str, Any]] = field(default_factory=list)
    """Module, key and name of each parameter, and its FSDPParam (itself where not sharded)."""
    frozen: list[Any] = field(default_factory=list)
    """FSDPParams of the parameters that did not train when the forward began."""
    size: int = 0
    """Number of the modules, plus that of their entries for parameters."""
    aliases: list[tuple[str, Tensor]] = field(default_factory=list)
    running: bool = False

    def install(self, root: nn.Module, handles: Iterable[FSDPModule]) -> None:
        """Watch the forwards of `root`; `handles` are the modules of its groups."""
        for handle in handles:
            before_backward_of(state_of(handle), self._refuse_backward)
        for index, param in enumerate(self.params):
            when_unsharded(param, partial(self._watch_unsharded, index))
        root.register_forward_pre_hook(lambda *_: self._begin(), prepend=True)
        root.register_forward_hook(lambda *_: self._end(root))
        records = {param.sharded_param: param for param in self.params}
        for prefix, module in module_tree.named_modules(root):
            module.register_state_dict_pre_hook(lambda *_: self._refuse_state_dict())
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    name = f"{prefix}.{key}" if prefix else key
                    self.owners.append((module, key, name, records.get(parameter, parameter)))
        self.size = _num_entries(root)

    def _refuse_state_dict(self) -> None:
        if self.running:  # torch would leave the parameters sharded for the rest of the forward
            raise ColotrainError(
                "model: forward calls state_dict()", "use named_parameters() and named_buffers()"
            )

    def _refuse_new_parameters(self, root: nn.Module) -> None:
        """Refuse parameters that the forward created: they would never train, or be lost."""
        for module, key, name, known in self.owners:
            found = module._parameters.get(key)
            is_plain = isinstance(known, nn.Parameter)
            own = (known,) if is_plain else (known.sharded_param, unsharded_of(known))
            if found is None or not any(found is parameter for parameter in own):
                raise made_in_forward(name)
        if (size := _num_entries(root)) == self.size:
            return
        names = {name for _, _, name, _ in self.owners}
        for prefix, module in module_tree.named_modules(root):
            for key, parameter in module._parameters.items():
                name = f"{prefix}.{key}" if prefix else key
                if parameter is not None and name not in names:
                    raise made_in_forward(name)
        self.size = size  # only now: a trial may take the error for its own

    def _watch_unsharded(self, index: int, whole: nn.Parameter) -> None:
        if type(whole) is nn.Parameter:
            whole.__class__ = UnshardedParameter
            whole._watch, whole._name = self, name_of(self.params[index])  # type: ignore[attr-defined]
        self.versions[index] = whole._version

    def _refuse_backward(self) -> None:
        """Refuse a backward inside a forward: it frees parameters that the forward still needs."""
        if self.running:
            raise ColotrainError(
                "model: forward calls backward or autograd.grad through a block of the model, "
                "which no forward before the first step did",
                "compute such gradients in every forward, and multiply what they add by 0 until it "
                "is to count; terms of the loss itself are returned, for colotrain calls backward",
            )

    def _begin(self) -> None:
        for index in self.versions:
            self.versions[index] = self._version(index)
        self.aliases.clear()
        self.frozen = [p for p in self.params if not p.sharded_param.requires_grad]
        for param in self.params:
            if type(param.sharded_param) is DTensor:
                _set_class(param.sharded_param, UngatheredShard, name_of(param))
        self.running = True

    def _end(self, root: nn.Module) -> None:
        self.running = False
        self._refuse_new_parameters(root)
        for param in self.frozen:
            found = (param.sharded_param, unsharded_of(param))
            if any(p is not None and p.requires_grad for p in found):
                raise ColotrainError(
                    f"model: forward begins to train {name_of(param)}, which was frozen",
                    "let freeze.unfreeze name the step",
                )
        for param in self.params:
            if type(param.sharded_param) is UngatheredShard:
                _set_class(param.sharded_param, DTensor, None)
        aliases, self.aliases = self.aliases, []
        for name, alias in aliases:
            if alias._version:
                raise changed_in_place(name)
        for index, version in self.versions.items():
            if self._version(index) != version:
                raise changed_in_place(name_of(self.params[index]))

    def _version(self, index: int) -> int:
        whole = unsharded_of(self.params[index])
        assert whole is not None  # `_watch_unsharded` was called with it
        return whole._version


def changed_in_place(name: str) -> ColotrainError:
    return ColotrainError(
        f"model: forward changes {name} in place (as max_norm and clamps do)",
        "compute with a changed copy, or change it in train.on_gradients",
    )


def made_in_forward(name: str) -> ColotrainError:
    return ColotrainError(
        f"model: forward makes the parameter {name}, which no optimizer knows",
        "make it when the model is made, and compute with changed copies of it",
    )


def _num_entries(root: nn.Module) -> int:
    return sum(1 + len(module._parameters) for module in module_tree.modules(root))


def _set_class(shard: Any, cls: type, name: str | None) -> None:
    shard.__class__, shard.name_here = cls, name


def used_outside(name: str | None) -> ColotrainError:
    return ColotrainError(
        f"model: forward uses {name} outside the block that holds it, which the first forward "
        "did not",
        "use it in every forward: multiply what it adds by 0 until it is to count",
    )
