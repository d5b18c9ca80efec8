"""Finds the blocks of a model that run one after the other, by a trial forward without values.

What is computed from parameters, or drawn at random, exists on one stage alone. In the trial it is
followed through every operation, also where gradients do not follow: it may reach a block as the
output of the block before, and the loss as the output of the last block, but in no other way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from colotrain import module_tree
from colotrain.engine.gradients.nonfinite import tensors_in
from colotrain.engine.model.block_calls import WITHOUT_VALUES, without_storage
from colotrain.engine.model.model_blocks import Block, find_blocks, parameter_bytes
from colotrain.errors import message_of
from colotrain.forked import in_fork
from colotrain.generators import drawn_on_host, kept
from colotrain.models.objective import forward_of
from colotrain.spec.sequence import BlockSequence
from colotrain.torch_internals import (
    TorchDispatchMode,
    is_persistent,
    is_random,
    storage_id,
    tree_leaves,
)


class NoSequence(Exception):
    """The model is no sequence of blocks; the message says why."""


def find_sequence(model: nn.Module, batch: Mapping[str, Tensor]) -> BlockSequence:
    """Return the blocks of `model` as one forward with `batch` calls them.

    Where they are no sequence, `against` says why. The model itself does not run.
    """
    blocks = largest_container(find_blocks(model))
    try:
        _refuse_kept_buffers(model, blocks)
        return _tried(model, [name for name, _ in blocks], batch)
    except NoSequence as error:
        return BlockSequence(against=str(error))


def largest_container(blocks: list[Block]) -> list[Block]:
    """Return the blocks of the list or container that holds most of the parameters."""
    containers: dict[str, list[Block]] = {}
    for name, module in blocks:
        containers.setdefault(name.rpartition(".")[0], []).append((name, module))
    sizes = {name: sum(parameter_bytes(m) for _, m in own) for name, own in containers.items()}
    return containers[max(sizes, key=lambda name: sizes[name])] if sizes else []


def _refuse_kept_buffers(model: nn.Module, blocks: list[Block]) -> None:
    if len(blocks) < 2:
        raise NoSequence("it has no list of blocks of the same type")
    for path, module in module_tree.named_modules(model):
        for key in module._buffers:
            if is_persistent(module, key):
                name = f"{path}.{key}" if path else key
                raise NoSequence(f"it has buffers that checkpoints keep ({name})")


class _OneStage(TorchDispatchMode):
    """Follows what exists on one stage alone through all operations: what is it made of?"""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.sources = {storage_id(p): name for name, p in module_tree.named_parameters(model)}
        """Storage → name of its parameter."""
        self.inside = set[int]()
        """Storages of the parameters of blocks."""
        self.made: dict[int, str] = {}
        """Storage → parameter, or `a random number`, that its values come from."""
        self.kept: list[Any] = []
        """Storages that stay, so that no other one gets their id."""
        self.is_after = False
        """Whether the last block has run: its stage has what is used from then on."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        origin = self.origin_of((args, kwargs))
        if origin is None and not self.is_after and is_random(func):
            origin = "a random number"
        if origin is not None:
            self.mark(out, origin)
        return out

    def origin_of(self, values: Any) -> str | None:
        """Return what some of `values` come from, if they exist on one stage alone."""
        for leaf in _tensors_of(values):
            storage = storage_id(leaf)
            if storage in self.made:
                return self.made[storage]
            if storage in self.sources and (not self.is_after or storage in self.inside):
                return self.sources[storage]
        return None

    def mark(self, values: Any, origin: str) -> None:
        """Note that `values`, apart from views of parameters, exist on one stage alone."""
        for leaf in _tensors_of(values):
            if (storage := storage_id(leaf)) not in self.sources:
                self.made[storage] = origin
                self.kept.append(leaf.untyped_storage())


def _tried(model: nn.Module, names: list[str], batch: Mapping[str, Tensor]) -> BlockSequence:
    reason = ""
    for mode in WITHOUT_VALUES:
        found = in_fork(partial(_ran, model, names, batch, mode))
        if isinstance(found, BlockSequence):
            return found
        reason = found
    raise NoSequence(f"its forward does not run without values ({reason})")


def _ran(
    model: nn.Module, names: list[str], batch: Mapping[str, Tensor], mode: Callable[[], Any]
) -> BlockSequence | str:
    """Return the blocks of one trial, or what it raised."""
    try:
        with kept(), mode(), torch.enable_grad():
            copied = without_storage(model)
            for parameter in module_tree.parameters(copied):
                if parameter.is_floating_point():
                    parameter.requires_grad_(True)
            return _Trial(copied, names).run(without_storage(dict(batch)))
    except NoSequence as error:
        return BlockSequence(against=str(error))
    except Exception as error:  # whatever a forward raises that reads values
        return f"{type(error).__name__}: {message_of(error).partition(chr(10))[0]}"


class _Trial(TorchFunctionMode):
    """One forward of a copy of the model, with notes on blocks and on parameters outside them."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        super().__init__()
        self.model, self.names = model, names
        self.called: list[str] = []
        self.returned: list[int] = []
        self.last: Tensor | None = None
        """What the block that ran last returned."""
        self.inside = False
        """Whether a block is running."""
        self.entered = set[str]()
        """Modules that begin to run before the first block does."""
        self.running: list[str] = []
        """Names of the modules that are running, the innermost last."""
        self.drawn = drawn_on_host()
        """State of the host's generators as the last block ended."""
        self.before: dict[str, None] = {}
        self.after: dict[str, None] = {}
        self.one_stage = _OneStage(model)
        inside = {p for name in names for p in module_tree.parameters(model.get_submodule(name))}
        self.outside = {p: n for n, p in module_tree.named_parameters(model) if p not in inside}
        self.owners: dict[nn.Parameter, set[str]] = {}
        for path, module in module_tree.named_modules(model):
            for parameter in module._parameters.values():
                if parameter is not None:
                    self.owners.setdefault(parameter, set()).add(path)
            module.register_forward_pre_hook(partial(self._enter, path), prepend=True)
            module.register_forward_hook(self._leave)
        for name in names:
            block = model.get_submodule(name)
            block.register_forward_pre_hook(partial(self._begin, name), with_kwargs=True)
            block.register_forward_hook(partial(self._end, name))

    def run(self, batch: dict[str, Tensor]) -> BlockSequence:
        inside = (
            p for name in self.names for p in module_tree.parameters(self.model.get_submodule(name))
        )
        self.one_stage.inside.update(map(storage_id, inside))
        self.drawn = drawn_on_host()
        with self.one_stage, self:
            output = forward_of(self.model, batch)  # of which the last stage makes the loss
        if len(self.called) != len(self.names):
            raise NoSequence(f"{self.names[len(self.called)]} is not called")
        origin = self.one_stage.origin_of([*tensors_in(output)])
        if origin is not None:
            raise NoSequence(f"what {origin} gives reaches the loss beside the blocks")
        self._refuse_divided_modules()
        return BlockSequence(
            blocks=tuple(self.called),
            num_returned=tuple(self.returned),
            before=tuple(self.before),
            after=tuple(self.after),
            activation_numel=self.last.numel() if self.last is not None else 0,
            activation_itemsize=self.last.itemsize if self.last is not None else 4,
        )

    def _refuse_divided_modules(self) -> None:
        """Refuse modules before the first block of which the loss uses some parameters only."""
        both = {p for p, name in self.outside.items() if name in self.before.keys() & self.after}
        for parameter in both:
            for path in self.owners[parameter] & self.entered:
                if {*module_tree.parameters(self.model.get_submodule(path))} - both:
                    name = self.outside[parameter]
                    raise NoSequence(f"{name} is used before the blocks and in the loss")

    def _enter(self, path: str, *_: Any) -> None:
        self.running.append(path)
        if not self.called:
            self.entered.add(path)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Every output of a module that has parameters is zeros on the stages that lack them."""
        self.running.pop()
        for parameter in module._parameters.values():
            if not self.called and parameter in self.outside:
                self.one_stage.mark(output, self.outside[parameter])

    def _begin(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if name in self.called:
            raise NoSequence(f"{name} is called more than once")
        if not args or not isinstance(args[0], Tensor) or not args[0].is_floating_point():
            raise NoSequence(f"{name} does not take the activations as its first argument")
        if self.last is not None and args[0] is not self.last:
            raise NoSequence(f"{name} does not take what {self.called[-1]} returned")
        origin = self.one_stage.origin_of((args[1:], kwargs)) if self.called else None
        if origin is not None:
            raise NoSequence(f"{name} takes what {origin} gives beside what the block before gives")
        if drawn_on_host() != self.drawn:
            where = f"between {self.called[-1]} and {name}" if self.called else f"before {name}"
            raise NoSequence(f"random numbers are drawn on the host {where}")
        self.called.append(name)
        self.inside = True
        return (torch.empty_like(args[0]).requires_grad_(), *args[1:]), kwargs

    def _end(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        self.inside = False
        self.drawn = drawn_on_host()
        first = output[0] if isinstance(output, tuple) and output else output
        rest = output[1:] if isinstance(output, tuple) else ()
        if not isinstance(first, Tensor) or any(other is not None for other in rest):
            raise NoSequence(f"{name} returns more than one tensor")
        if (first.shape, first.dtype) != (args[0].shape, args[0].dtype):
            raise NoSequence(f"{name} returns activations of another shape or dtype")
        self.last = first
        if len(self.called) == len(self.names):
            self.one_stage.is_after = True
            self.one_stage.made.pop(storage_id(first), None)
        self.returned.append(len(output) if isinstance(output, tuple) else 0)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, nn.Parameter) and leaf in self.outside:
                    self._note(leaf)
        return result

    def _note(self, parameter: nn.Parameter) -> None:
        name = self.outside[parameter]
        if self.inside or 0 < len(self.called) < len(self.names):
            raise NoSequence(f"{name}, which belongs to no block, is used within or between blocks")
        if self.called:
            self.after[name] = None
        elif "" in self.owners[parameter]:
            raise NoSequence(
                f"{name} belongs to no module that runs before the first block: move it into one"
            )
        elif not self.owners[parameter] & {*self.running}:
            raise NoSequence(f"{name} is used outside its module before the first block")
        else:
            self.before[name] = None


def _tensors_of(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
