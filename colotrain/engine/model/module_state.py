"""What a module's forward reads beside its inputs, for a forward that is computed again.

Until then a forward may have changed buffers (a BatchNorm its statistics, another its counter), the
model may have set attributes anew, and `torch.func.functional_call` has given the module its own
parameters back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from colotrain import module_tree
from colotrain.models.context_parallel import ATTRIBUTE, Samples, SequenceShard
from colotrain.torch_internals import version_of

Place = tuple[int, str, str]
"""Number of a module, `_buffers`, `_parameters` or `__dict__`, and the key there."""


class ModuleState:
    """Finds a module's buffers, attributes, and what stands in place of its parameters."""

    def __init__(self, module: nn.Module) -> None:
        self.modules = list(module_tree.modules(module))
        self.changing: set[Place] | None = None
        """Places of the buffers that a forward has changed; None: no forward has run."""

    def contexts(self, others: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
        """Contexts of one forward and of its recomputation, around those that `others` makes.

        The recomputation reads what the forward read, and what it changes is lost.
        """
        first, again = others()
        taken = Taken(self)
        return Around(taken.watch, first), Around(taken.put_back, again)

    @property
    def shard(self) -> SequenceShard | None:
        """What the module knows of its part of each sample, where ranks divide these."""
        found: SequenceShard | None = getattr(self.modules[0], ATTRIBUTE, None)
        return found

    def values(self, place: Place) -> dict[str, Any]:
        found: dict[str, Any] = getattr(self.modules[place[0]], place[1])
        return found

    def found(self) -> Iterator[tuple[Place, Any]]:
        for number, module in enumerate(self.modules):
            for key, value in module.__dict__.items():
                if not key.startswith("_"):
                    yield (number, "__dict__", key), value
            for key, buffer in module._buffers.items():
                if buffer is not None:
                    yield (number, "_buffers", key), buffer
            for key, parameter in module._parameters.items():
                if parameter is not None and not isinstance(parameter, nn.Parameter):
                    yield (number, "_parameters", key), parameter


class Taken:
    """What one forward of a module reads."""

    def __init__(self, state: ModuleState) -> None:
        self.state = state
        self.read: dict[Place, Any] = {}
        """What is in each place as the forward begins: a copy of a tensor that it changes."""
        self.samples: Samples | None = None
        """Samples of the forward, where ranks divide them."""

    def watch(self) -> Callable[[], None]:
        """Begin to watch a forward; the function returned ends it."""
        state, found, known = self.state, [], self.state.changing or set()
        self.samples = None if (shard := state.shard) is None else shard.samples
        for place, value in state.found():
            may_change = state.changing is None or place in state.changing
            copied = value.detach().clone() if may_change and isinstance(value, Tensor) else value
            found.append((place, value, _version(value), copied))

        def end() -> None:
            changed = set()
            for place, value, version, copied in found:
                is_same = state.values(place).get(place[2]) is value and _version(value) == version
                is_same = is_same and place not in known and _are_equal(value, copied)
                self.read[place] = value if is_same else copied
                changed |= set() if is_same else {place}
            state.changing = changed | (state.changing or set())

        return end

    def put_back(self) -> Callable[[], None]:
        """Let the module have what the forward read; the function returned undoes it."""
        state, now = self.state, []
        shard, samples = state.shard, None if state.shard is None else state.shard.samples
        if shard is not None and self.samples is not None:
            shard.samples = self.samples
        for place, value in self.read.items():
            values, key = state.values(place), place[2]
            if values.get(key) is not value:
                now.append((values, key, values.get(key)))
                may_change = isinstance(value, Tensor) and place in (state.changing or ())
                values[key] = value.clone() if may_change else value

        def end() -> None:
            if shard is not None and samples is not None:
                shard.samples = samples
            for values, key, value in now:
                values[key] = value

        return end


class Around:
    """A context that can be entered again: what `begin` begins, then the context within."""

    def __init__(self, begin: Callable[[], Callable[[], None]], within: Any) -> None:
        self.begin, self.within = begin, within
        self.stacks: list[ExitStack] = []

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.callback(self.begin())
            stack.enter_context(self.within)
            self.stacks.append(stack.pop_all())

    def __exit__(self, *error: Any) -> None:
        self.stacks.pop().__exit__(*error)


def _are_equal(value: Any, copied: Any) -> bool:
    """Whether a forward left the values: batch normalization changes some without a new version."""
    if value is copied or not isinstance(value, Tensor) or value.is_meta:
        return True
    return torch.equal(value, copied)


def _version(value: Any) -> int:
    return version_of(value) if isinstance(value, Tensor) else 0
