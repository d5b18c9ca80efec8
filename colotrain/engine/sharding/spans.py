"""Names for the parts of a step in torch's profiler; nothing happens while no trace is taken."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from colotrain.engine.model.model_blocks import find_blocks
from colotrain.engine.sharding.sharded_model import ShardedModel
from colotrain.events.traces import PREFIX
from colotrain.spec.phases import Phase
from colotrain.torch_internals import tree_leaves

METHODS = {"unshard": "gather", "wait_for_unshard": "gather", "post_backward": "reduce"}
"""Method of torch's FSDPParamGroup → name of its span."""

_current: Spans | None = None


def enter_phase(phase: Phase) -> None:
    """Note that this rank begins `phase`, which ends the one before."""
    if _current is not None:
        _current.enter_phase(phase)


def span(name: str) -> AbstractContextManager[Any]:
    """Return a context that has a span in the trace, if one is taken."""
    return nullcontext() if _current is None else record_function(PREFIX + name)


class Spans:
    """The spans of the steps that are traced, from `install` to `remove`.

    Phases follow one another, as do the backwards of blocks within a phase; gathers, reductions and
    the forwards of blocks are nested in them.
    """

    def __init__(self) -> None:
        self._step: record_function | None = None
        self._phase: record_function | None = None
        self._block: record_function | None = None
        """The backward of a block."""
        self._name = self._block_name = ""
        self._rank_phase: Phase | None = None
        self._thread = threading.get_ident()
        self._undo: list[Callable[[], None]] = []

    def install(self, sharded: ShardedModel) -> None:
        global _current
        _current = self
        model = sharded.module
        self._undo.append(model.register_forward_hook(self._begin_backward).remove)
        for name, module in find_blocks(model):
            self._watch_block(name, module)
        for group in sharded.groups:  # what ranks share is never gathered
            gathered = group.name not in sharded.in_common
            methods = {m: w for m, w in METHODS.items() if w == "reduce" or gathered}
            for params in group.fsdp_groups:
                for method, what in methods.items():
                    self._wrap(params, method, f"{what} {group.name or 'root'}")

    def remove(self) -> None:
        """Leave the model as it was."""
        global _current
        self.end_step()
        _current = None
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    def begin_step(self, step: int) -> None:
        self.end_step()
        self._step = _entered(f"step {step}")

    def end_step(self) -> None:
        self.enter("")
        self._rank_phase = None
        _exit(self._step)
        self._step = None

    def enter_phase(self, phase: Phase) -> None:
        """Begin a phase of this rank; heartbeats repeat it, also on other threads."""
        if phase != self._rank_phase and threading.get_ident() == self._thread:
            self._rank_phase = phase
            self.enter(phase.span)

    def enter(self, name: str) -> None:
        """Begin the phase `name` of the step; empty: none."""
        self._enter_block("")
        _exit(self._phase)
        self._name = name
        self._phase = _entered(name) if name else None

    def _enter_block(self, name: str) -> None:
        _exit(self._block)
        self._block = _entered(f"backward {name}") if name else None
        self._block_name = name

    def _leave_block(self, name: str) -> None:
        """End a block's backward; the block before may have begun its own at the same tensor."""
        if self._block_name == name:
            self._enter_block("")

    def _begin_backward(self, *_: Any) -> None:
        """End the forward of a micro-batch: what follows is its loss and backward."""
        if self._name == "forward" and torch.is_grad_enabled():
            self.enter("backward")

    def _watch_block(self, name: str, module: nn.Module) -> None:
        """Show the forwards and backwards of a block, the latter by hooks on its boundary."""
        forwards: list[record_function] = []

        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            forwards.append(_entered(f"forward {name}"))
            self._on_gradient((args, kwargs), self._leave_block, name)

        def after(_: nn.Module, args: Any, output: Any) -> None:
            if forwards:
                _exit(forwards.pop())
            self._on_gradient(output, self._enter_block, name)

        self._undo.append(module.register_forward_pre_hook(before, with_kwargs=True).remove)
        self._undo.append(module.register_forward_hook(after).remove)

    def _on_gradient(self, values: Any, action: Callable[[str], None], name: str) -> None:
        """Call `action(name)` when backward comes to a tensor of `values`."""
        if self._name != "forward" or not torch.is_grad_enabled():
            return
        for value in tree_leaves(values):
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(partial(self._at_gradient, action, name))
                return

    def _at_gradient(self, action: Callable[[str], None], name: str, _: Tensor) -> None:
        if self._name == "backward" and _current is self:
            action(name)

    def _wrap(self, params: Any, method: str, name: str) -> None:
        """Put a span around a method of one object, whether the object or its class has it."""
        had, original = method in vars(params), getattr(params, method)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with record_function(PREFIX + name):
                return original(*args, **kwargs)

        setattr(params, method, wrapped)

        def restore() -> None:
            if had:
                setattr(params, method, original)
            else:
                delattr(params, method)

        self._undo.append(restore)


def _entered(name: str) -> record_function:
    made = record_function(PREFIX + name)
    made.__enter__()
    return made


def _exit(entered: record_function | None) -> None:
    if entered is not None:
        entered.__exit__(None, None, None)
