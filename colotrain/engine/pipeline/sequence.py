"""Finds the blocks of a model that run one after the other, by a trial forward without values.

Every trainable tensor that reaches a block beside the output of the block before, or the loss
beside that of the last block, would be missing on another stage. So in the trial each block gets a
tensor that is detached from what came before, and nothing else may lead to a parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from colotrain.engine.model_blocks import Block, find_blocks, parameter_bytes
from colotrain.engine.sharding.grouping import without_storage
from colotrain.models.objective import output_of
from colotrain.spec.sequence import BlockSequence
from colotrain.torch_internals import FakeTensorMode, is_persistent, tree_leaves


class NoSequence(Exception):
    """The model is no sequence of blocks; the message says why."""


def find_sequence(model: nn.Module, batch: Mapping[str, Tensor]) -> BlockSequence:
    """Return the blocks of `model` as one forward with `batch` calls them.

    Where they are no sequence, `against` says why. The model itself does not run.
    """
    blocks = largest_container(find_blocks(model))
    try:
        _refuse_kept_buffers(blocks)
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


def _refuse_kept_buffers(blocks: list[Block]) -> None:
    if len(blocks) < 2:
        raise NoSequence("it has no list of blocks of the same type")
    for name, block in blocks:
        for path, module in block.named_modules(prefix=name):
            for key in module._buffers:
                if is_persistent(module, key):
                    raise NoSequence(
                        f"its blocks have buffers that checkpoints keep ({path}.{key})"
                    )


def _tried(model: nn.Module, names: list[str], batch: Mapping[str, Tensor]) -> BlockSequence:
    state, reason = torch.get_rng_state(), ""
    for mode in (torch.device("meta"), FakeTensorMode(allow_non_fake_inputs=True)):
        try:
            with mode, torch.enable_grad():
                copied = without_storage(model)
                for parameter in copied.parameters():
                    if parameter.is_floating_point():
                        parameter.requires_grad_(True)
                trial = _Trial(copied, names)
                return trial.run(without_storage(dict(batch)))
        except NoSequence:
            raise
        except Exception as error:  # whatever a forward raises that reads values
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        finally:
            torch.set_rng_state(state)
    raise NoSequence(f"its forward does not run without values ({reason})")


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
        self.running: list[str] = []
        """Names of the modules that are running, the innermost last."""
        self.before: dict[str, None] = {}
        self.after: dict[str, None] = {}
        self.path_of = {m: path for path, m in model.named_modules()}
        inside = {p for name in names for p in model.get_submodule(name).parameters()}
        self.outside = {p: n for n, p in model.named_parameters() if p not in inside}
        self.owners: dict[nn.Parameter, set[str]] = {}
        for path, module in model.named_modules():
            for parameter in module._parameters.values():
                if parameter is not None:
                    self.owners.setdefault(parameter, set()).add(path)
            module.register_forward_pre_hook(partial(self._enter, path), prepend=True)
            module.register_forward_hook(lambda *_: self._leave())
        for name in names:
            block = model.get_submodule(name)
            block.register_forward_pre_hook(partial(self._begin, name), with_kwargs=True)
            block.register_forward_hook(partial(self._end, name))

    def run(self, batch: dict[str, Tensor]) -> BlockSequence:
        with self:
            output = output_of(self.model, batch)
        if len(self.called) != len(self.names):
            raise NoSequence(f"{self.names[len(self.called)]} is not called")
        block = self.model.get_submodule(self.called[-1])
        allowed = {*block.parameters()} | {p for p, n in self.outside.items() if n in self.after}
        used = _parameters_behind(_tensors_of(output)) - allowed
        if used:
            named = {p: name for name, p in self.model.named_parameters()}
            reached = sorted(named[parameter] for parameter in used)[0]
            raise NoSequence(f"what {reached} gives reaches the loss beside the blocks")
        return BlockSequence(
            blocks=tuple(self.called),
            num_returned=tuple(self.returned),
            before=tuple(self.before),
            after=tuple(self.after),
        )

    def _enter(self, path: str, *_: Any) -> None:
        self.running.append(path)

    def _leave(self) -> None:
        self.running.pop()

    def _begin(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if name in self.called:
            raise NoSequence(f"{name} is called more than once")
        if not args or not isinstance(args[0], Tensor) or not args[0].is_floating_point():
            raise NoSequence(f"{name} does not take the activations as its first argument")
        if self.last is not None and args[0] is not self.last:
            raise NoSequence(f"{name} does not take what {self.called[-1]} returned")
        if self.last is not None and _parameters_behind(tree_leaves((args[1:], kwargs))):
            raise NoSequence(f"{name} takes more that trains than what the block before returned")
        self.called.append(name)
        self.inside = True
        return (args[0].detach().requires_grad_(), *args[1:]), kwargs

    def _end(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        self.inside = False
        first = output[0] if isinstance(output, tuple) and output else output
        rest = output[1:] if isinstance(output, tuple) else ()
        if not isinstance(first, Tensor) or any(other is not None for other in rest):
            raise NoSequence(f"{name} returns more than one tensor")
        if (first.shape, first.dtype) != (args[0].shape, args[0].dtype):
            raise NoSequence(f"{name} returns activations of another shape or dtype")
        self.last = first
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
        elif "" in self.owners[parameter] or not self.owners[parameter] & {*self.running}:
            raise NoSequence(f"{name} is used outside its module before the first block")
        else:
            self.before[name] = None


def _tensors_of(output: Any) -> list[Any]:
    return tree_leaves(dict(output) if isinstance(output, Mapping) else output)


def _parameters_behind(values: Iterable[Any]) -> set[nn.Parameter]:
    """Return the parameters that autograd would reach from the tensors among `values`."""
    tensors = [value for value in values if isinstance(value, Tensor) and value.requires_grad]
    found = {tensor for tensor in tensors if isinstance(tensor, nn.Parameter)}
    return found | {p for tensor in tensors if tensor.grad_fn for p in _leaves(tensor.grad_fn)}


def _leaves(first: Any) -> Iterator[nn.Parameter]:
    seen, waiting = {first}, [first]
    while waiting:
        node = waiting.pop()
        if isinstance(leaf := getattr(node, "variable", None), nn.Parameter):
            yield leaf
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
