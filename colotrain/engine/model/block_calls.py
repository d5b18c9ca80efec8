"""How forwards call a model's blocks: trials on a copy of the model, before anything trains."""

from __future__ import annotations

import copy
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from colotrain import module_tree
from colotrain.engine.model.changed_inputs import CHANGING, when_inputs_change
from colotrain.engine.model.model_blocks import Block, parameter_bytes
from colotrain.generators import drawn_on_host, seeded
from colotrain.models.objective import inputs_of
from colotrain.torch_internals import FakeTensorMode, is_called_by_backward, tree_leaves

NUM_FORWARDS = 12
"""Forwards of a model that draws random numbers, or looks at the values of its samples."""
MOST_BYTES_OF_GRADIENTS = 256 << 20
"""Bytes of parameters up to which a trial with values has a backward."""
MOST_SECONDS = 10.0
"""Seconds after which none of these begins."""
WITHOUT_VALUES: tuple[Callable[[], Any], ...] = (
    partial(torch.device, "meta"),
    partial(FakeTensorMode, allow_non_fake_inputs=True),
)
"""Modes in which a forward runs without values. Fake tensors, which load torch's compiler, are
rarely needed. Each mode needs a fork of its own: what is kept in one is of no use to the next."""


@dataclass(frozen=True, slots=True)
class Calls:
    """What a trial found of blocks that it called, by name."""

    shapes: dict[str, list[Any]]
    """Shape of the first input of each call in one forward."""
    unsteady: frozenset[str]
    """Those that other random numbers, or other samples, may call in another way."""


def calls_without_values(
    model: nn.Module, blocks: list[Block], batch: dict[str, Tensor], mode: Callable[[], Any]
) -> tuple[Calls | None, set[str]]:
    """Return what a trial finds, and the names of the blocks that change their inputs."""
    with suppress(Exception):  # a copy without storage may not be possible
        trial = Trial(without_storage, model, blocks, mode())
        calls = trial.calls([batch], has_backward=True)
        return calls, {name for name, module in blocks if module in CHANGING}
    return None, set()


def calls_with_values(
    model: nn.Module, blocks: list[Block], batch: dict[str, Tensor]
) -> Calls | None:
    """Return what a trial finds that computes, with one sample of `batch` at a time."""
    size = min((len(tensor) for tensor in batch.values() if tensor.ndim), default=1)
    samples = [
        {name: tensor[i : i + 1] if tensor.ndim else tensor for name, tensor in batch.items()}
        for i in range(size)
    ]
    is_small = parameter_bytes(model) <= MOST_BYTES_OF_GRADIENTS
    with suppress(Exception):
        trial = Trial(copy.deepcopy, model, blocks, torch.device("cpu"))
        return trial.calls(samples, has_backward=is_small)
    return None


def _unsteady(blocks: list[Block], forwards: list[list[str]]) -> frozenset[str]:
    """Return the blocks that a forward may call more or less often, or in another order.

    Where this holds for one of them, it is said of all: gradients of the others may be complete in
    another order. Where calls differ only within blocks, it is said of the parts of blocks.
    """
    names = {name for name, _ in blocks}
    whole = {name for name in names if not any(name.startswith(f"{other}.") for other in names)}
    if len({tuple(filter(whole.__contains__, called)) for called in forwards}) > 1:
        return frozenset(names)
    return frozenset(names - whole) if len(set(map(tuple, forwards))) > 1 else frozenset()


def without_storage(thing: Any) -> Any:
    """Copy a model or a batch, with empty tensors made under the active torch mode."""
    if isinstance(thing, dict):
        return {name: _empty_like(tensor) for name, tensor in thing.items()}
    memo: dict[int, Any] = {}
    for parameter in module_tree.parameters(thing):
        memo[id(parameter)] = nn.Parameter(_empty_like(parameter), parameter.requires_grad)
    for buffer in module_tree.buffers(thing):
        memo[id(buffer)] = _empty_like(buffer)
    return copy.deepcopy(thing, memo)


def without_parameters(model: nn.Module, mode: Any) -> nn.Module:
    """Copy a model with parameters that are empty under `mode`, and the values of buffers."""
    memo: dict[int, Any] = {}
    with mode, torch.device("cpu"):
        for parameter in module_tree.parameters(model):
            is_trained = parameter.is_floating_point()
            memo[id(parameter)] = nn.Parameter(_empty_like(parameter), is_trained)
        for buffer in module_tree.buffers(model):
            if buffer.is_meta:
                memo[id(buffer)] = _empty_like(buffer)
    return copy.deepcopy(model, memo)


def _empty_like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


class Trial:
    """Forwards of a copy of the model, and how they call the blocks.

    Blocks whose parameters are used outside their calls, those that a backward within forward
    reaches, in training or evaluation, and those that are called in other threads, within a
    Function of the user's or by a backward are left out.
    Blocks that change their inputs in place are put into CHANGING.
    """

    def __init__(
        self, make_copy: Callable[[Any], Any], model: nn.Module, blocks: list[Block], mode: Any
    ) -> None:
        self.make_copy, self.blocks, self.mode = make_copy, blocks, mode
        self.seen: list[tuple[str, Any]] = []
        """Blocks that the last forward called, and the shapes of their first inputs."""
        self.forwards: list[list[str]] = []
        """Names of the blocks that each forward in training called, in their order."""
        with torch.no_grad(), mode:
            self.model = make_copy(model)
        copies = [(name, self.model.get_submodule(name)) for name, _ in blocks]
        self.uses = UsesOutside(copies)
        for (name, copied), (_, module) in zip(copies, blocks, strict=True):
            copied.register_forward_pre_hook(partial(self._note, name))
            copied.register_forward_hook(partial(self.uses.note_backward, name))
            when_inputs_change(copied, partial(CHANGING.add, module))

    def _note(self, name: str, _: nn.Module, args: tuple[Any, ...]) -> None:
        if self.uses.is_unusual():
            self.uses.found.add(name)
        first = args[0] if args else None
        self.seen.append((name, tuple(first.shape) if isinstance(first, Tensor) else None))

    def forward(
        self, batch: dict[str, Tensor], number: int, *, grad: bool = False, backward: bool = False
    ) -> bool:
        """Run a forward, and with `backward` one; return whether it drew random numbers."""
        self.seen.clear()
        self.uses.begin()
        with seeded(number):
            before = drawn_on_host()
            with torch.set_grad_enabled(grad), self.mode, _extreme(number), self.uses.functions():
                with torch.no_grad():
                    inputs = self.make_copy(inputs_of(self.model, batch))
                with self.uses:
                    output = self.model(**inputs)
                if self.model.training:
                    self.forwards.append([name for name, _ in self.seen])
                if backward:
                    self.uses.is_over = True
                    _sum_of(output).backward()
            return drawn_on_host() != before

    def calls(self, batches: list[dict[str, Tensor]], *, has_backward: bool) -> Calls | None:
        """Return what forwards with these batches show; None where the first of them fails."""
        try:
            draws = self.forward(batches[0], 0, grad=True)
        except Exception:  # whatever a user's forward raises: training will raise it again
            return None
        shapes = {name: [shape for n, shape in self.seen if n == name] for name, _ in self.blocks}
        end = time.monotonic() + MOST_SECONDS
        for number in range(1, NUM_FORWARDS if draws or len(batches) > 1 else 2):
            if time.monotonic() > end:
                break
            with suppress(Exception):
                batch = batches[number % len(batches)]
                self.forward(batch, number, grad=True, backward=has_backward and number == 1)
        with suppress(Exception):  # evaluation may have other uses outside
            self.model.eval()
            self.forward(batches[0], 0)
        shapes = {name: found for name, found in shapes.items() if name not in self.uses.found}
        return Calls(shapes=shapes, unsteady=_unsteady(self.blocks, self.forwards))


def _sum_of(output: Any) -> Tensor:
    """The sum of all that an output has which a backward can begin from."""
    leaves = tree_leaves([output, vars(output) if hasattr(output, "__dict__") else None])
    trained = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    return torch.stack([leaf.sum() for leaf in trained]).sum()


def _extreme(number: int) -> AbstractContextManager[Any]:
    """Let the first two repetitions draw the least and the largest numbers from 0 to 1."""
    values = {1: 0.0, 2: 1.0 - 2.0**-20}
    return Drawing(values[number]) if number in values else nullcontext()


class Drawing(TorchFunctionMode):
    """Lets uniform numbers be `value`: a layer that any draw leaves out is left out, or runs."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def __enter__(self) -> Any:
        self.python, random.random = random.random, lambda: self.value
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        random.random = self.python
        super().__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found.fill_(self.value) if func in (torch.rand, torch.rand_like) else found


class UsesOutside(TorchFunctionMode):
    """Finds blocks whose parameters are used in a computation while the block is not running,
    blocks that a backward reaches before `is_over`, and those whose calls are unusual."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.running: Counter[str] = Counter()
        self.is_over = False
        """Whether the forward is over: then backward is the trial's own."""
        self.thread = threading.get_ident()
        self.in_functions = 0
        """Forwards of the user's own autograd Functions that are running."""
        self.blocks_of: dict[Tensor, list[str]] = {}
        for name, block in blocks:
            block.register_forward_pre_hook(partial(self._run, name, 1), prepend=True)
            block.register_forward_hook(partial(self._run, name, -1))
            for parameter in module_tree.parameters(block):
                self.blocks_of.setdefault(parameter, []).append(name)

    def begin(self) -> None:
        """Forget what was running: the forward before may have failed."""
        self.running.clear()
        self.is_over, self.in_functions = False, 0

    def _run(self, name: str, change: int, *_: Any) -> None:
        self.running[name] += change

    def note_backward(self, name: str, _: nn.Module, __: Any, output: Any) -> None:
        """Find the block if a backward comes to an output of it: the trial itself calls none."""
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(lambda _: None if self.is_over else self.found.add(name))

    def is_unusual(self) -> bool:
        """Whether a block is called now by a backward, in a Function, or in another thread.

        `fully_shard` expects none of these: the block's gradients would be lost silently.
        """
        return (
            is_called_by_backward() or self.in_functions > 0 or threading.get_ident() != self.thread
        )

    def used_outside(self, values: Any) -> list[str]:
        """Return the blocks that have parameters among `values` and are not running."""
        return [
            name
            for leaf in tree_leaves(values)
            if isinstance(leaf, nn.Parameter)
            for name in self.blocks_of.get(leaf, ())
            if not self.running[name]
        ]

    @contextmanager
    def functions(self) -> Iterator[None]:
        """Within the context, note what autograd Functions get, which torch's modes do not see."""
        function: Any = torch.autograd.Function
        plain = function.__dict__["apply"]

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            self.found.update(self.used_outside((args, kwargs)))
            is_own = not cls.__module__.startswith("torch.")
            self.in_functions += is_own
            try:
                return plain.__get__(None, cls)(*args, **kwargs)
            finally:
                self.in_functions -= is_own

        function.apply = classmethod(apply)
        try:
            yield
        finally:
            function.apply = plain

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        used = self.used_outside((args, kwargs))
        if used and any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
            self.found.update(used)  # a dtype, say, can be asked for anywhere
        return result
