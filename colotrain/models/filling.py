"""Parameters of a sharded model while its own `init_weights()` gives them values.

The user's code sees unsharded parameters on the CPU, on every rank. Their memory is allocated when
an operation first reads or writes them. Only the last used stay in memory; each rank keeps its rows
of the others. Every rank runs the same code, and so computes the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from colotrain import module_tree
from colotrain.errors import ColotrainError, UsageError
from colotrain.generators import generator_of
from colotrain.torch_internals import DisableTorchFunction, storage_id, tree_leaves

KEPT_BYTES = 16 << 20
"""Bytes of whole parameters that may stay in memory beside those the current operation uses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shards:
    """Functions that store and load this rank's rows of a parameter."""

    write: Callable[[Tensor, Tensor], None]
    """`write(parameter, whole)` stores this rank's rows."""
    read: Callable[[Tensor], Tensor]
    """The whole value of a parameter that was written; all ranks must call it if it is sharded."""
    release: Callable[[Tensor], None] = lambda tensor: None
    """Called with each parameter that is not needed for the moment."""
    shape: Callable[[Tensor], tuple[int, ...]] = lambda parameter: tuple(parameter.shape)
    """Shape of a whole parameter; ranks of a tensor-parallel group hold only parts."""
    dtype: Callable[[Tensor], torch.dtype] = lambda parameter: parameter.dtype
    """Dtype of a whole parameter; what a rank holds of it may be packed."""
    slices: Callable[[Tensor], tuple[slice, ...]] = lambda tensor: ()
    """Where this rank's numbers stand in a whole parameter or buffer; () is all of it."""
    ahead_bytes: int = 0
    """Bytes of whole parameters, the same on all ranks, that threads may draw at the same time."""


@dataclass(slots=True, eq=False)
class Slot:
    """One parameter: this rank's rows, and the whole parameter that the user's code sees."""

    name: str
    kept: nn.Parameter
    owners: list[tuple[nn.Module, str]]
    generator: torch.Generator
    shape: tuple[int, ...]
    dtype: torch.dtype
    whole: nn.Parameter = field(init=False)
    written: bool = False
    """Whether the rank's rows hold a value."""
    resident: bool = False
    """Whether `whole` has memory, which holds its value, or `mark_of` where it has none yet."""
    stays: bool = False
    """Whether code outside torch may hold the address of its memory, which must then stay."""
    begun: bool = False
    """Whether the user's code has used it."""
    drawing: Future[Any] | None = None
    """The draw of its values on a thread, until somebody has waited for it."""
    unset: bool = False
    """Whether part of it had no value when it was last written to the rank's rows."""

    def __post_init__(self) -> None:
        kept = self.kept
        data = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        data.untyped_storage().resize_(0)
        self.whole = nn.Parameter(data, kept.requires_grad)
        self.whole.__dict__.update(vars(kept))

    @property
    def num_bytes(self) -> int:
        return self.whole.numel() * self.whole.dtype.itemsize

    @property
    def storage(self) -> Any:
        return self.whole.untyped_storage()

    def wait(self) -> None:
        """Wait until its values are drawn."""
        drawing, self.drawing = self.drawing, None
        if drawing is not None:
            drawing.result()


class ParameterFiller:
    """Moves parameters between each rank's rows and whole values in memory."""

    def __init__(
        self,
        model: nn.Module,
        *,
        seed: int,
        shards: Shards,
    ) -> None:
        self.shards = shards
        slots: dict[nn.Parameter, Slot] = {}
        for prefix, module in module_tree.named_modules(model):
            for key, parameter in module._parameters.items():
                if parameter is None:
                    continue
                name = f"{prefix}.{key}" if prefix else key
                if parameter not in slots:
                    generator = generator_of(name, seed=seed)
                    shape, dtype = shards.shape(parameter), shards.dtype(parameter)
                    slots[parameter] = Slot(name, parameter, [], generator, shape, dtype)
                slots[parameter].owners.append((module, key))
        self.slots = list(slots.values())
        self.by_storage = {storage_id(slot.storage): slot for slot in self.slots}
        self.in_memory: dict[str, Slot] = {}
        """Parameters with memory by name, least recently used first."""
        self.in_use: list[Slot] = []
        """Parameters that the current operations use."""
        self.threads = ThreadPoolExecutor(torch.get_num_threads(), "draws")

    @contextmanager
    def whole_parameters(self) -> Iterator[None]:
        """Replace the model's parameters by whole ones inside the context."""
        self._register(lambda slot: slot.whole)
        try:
            with self.threads:
                yield
        finally:
            self._register(lambda slot: slot.kept)

    def _register(self, choose: Callable[[Slot], nn.Parameter]) -> None:
        for slot in self.slots:
            for module, key in slot.owners:
                if type(module).__setattr__ is nn.Module.__setattr__:
                    module._parameters[key] = choose(slot)
                else:  # recurrent layers keep a second list of them
                    setattr(module, key, choose(slot))

    def found_in(self, values: Any) -> list[Slot]:
        """The slots whose memory the tensors in `values` are views of."""
        with DisableTorchFunction():
            storages = [
                storage_id(leaf)
                for leaf in tree_leaves(values)
                if isinstance(leaf, Tensor) and _has_memory(leaf)
            ]
        found = (self.by_storage.get(storage) for storage in storages)
        return list(dict.fromkeys(slot for slot in found if slot is not None))

    @contextmanager
    def using(self, slots: Sequence[Slot]) -> Iterator[None]:
        """Keep the memory of these parameters inside the context."""
        self.in_use += slots
        try:
            yield
        finally:
            del self.in_use[len(self.in_use) - len(slots) :]

    def allocate_(self, slot: Slot, *, value: bool) -> None:
        """Allocate a parameter, and load its value if `value` (false: it gets overwritten)."""
        if not slot.resident:
            self._make_room(slot)
            slot.storage.resize_(slot.num_bytes)
            slot.resident = True
            if value and slot.written:
                _copy(slot, self.shards.read(slot.kept))
            elif value:
                slot.whole.fill_(mark_of(slot.whole.dtype))
        slot.wait()
        self.in_memory[slot.name] = self.in_memory.pop(slot.name, slot)
        slot.begun = True

    def draw_(self, slot: Slot, func: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor:
        """Set the whole parameter by `func(*args, **kwargs)` on a thread; torch draws on one core.

        The values are the same: `func` draws from the parameter's own generator alone.
        """
        target: Tensor = args[0]
        func(target.new_empty(0), *args[1:], **kwargs)  # an error has the user's line

        def draw() -> None:
            with torch.no_grad():  # each thread has a mode of its own
                func(*args, **kwargs)

        slot.drawing = self.threads.submit(draw)
        return target

    def _make_room(self, slot: Slot) -> None:
        others = [s for s in self.in_memory.values() if s not in self.in_use and not s.stays]
        excess = sum(s.num_bytes for s in others) + slot.num_bytes - KEPT_BYTES
        excess -= self.shards.ahead_bytes
        for other in others:
            if excess <= 0:
                break
            self.release_(other)
            excess -= other.num_bytes

    def release_(self, slot: Slot) -> None:
        """Store this rank's rows of a parameter and free the rest."""
        slot.wait()
        slot.unset = _is_marked(slot.whole)
        self.shards.write(slot.kept, slot.whole.detach())
        self.shards.release(slot.kept)
        if not slot.stays:  # memory that numpy shares cannot be freed
            slot.storage.resize_(0)
        slot.resident, slot.written = False, True
        self.in_memory.pop(slot.name, None)

    def finish(self, *, later: Container[str] = ()) -> None:
        """Store this rank's rows of all parameters; only those in `later` may have no value yet."""
        for slot in self.slots:
            self._adopt_replaced(slot)
            if slot.resident:
                self.release_(slot)
        unset = [s.name for s in self.slots if s.unset or not s.begun]
        if unset := [name for name in unset if name not in later]:
            raise UsageError(
                f"model.deferred_init=true: init_weights() leaves {unset[0]} unset "
                f"({len(unset)} in all)",
                "give every parameter its value there, for example by its module's "
                "reset_parameters(), or set model.deferred_init=false",
            )

    def _adopt_replaced(self, slot: Slot) -> None:
        """Take over the value of `module.weight = nn.Parameter(...)` in `init_weights()`."""
        for module, key in slot.owners:
            found = module._parameters.get(key)
            if found is slot.whole:
                continue
            other = next((s for s in self.slots if s.whole is found), None)
            if other is not None:
                raise _ties(slot, other)
            if found is None:
                raise _reshaped(slot, "nothing")
            self.assign(slot, found)

    def assign(self, slot: Slot, value: Tensor) -> None:
        """Set the whole parameter to `value`."""
        if value.shape != slot.whole.shape or value.dtype != slot.whole.dtype:
            raise _reshaped(slot, f"{value.dtype} {tuple(value.shape)}")
        for other in self.found_in([value]):
            if other is not slot:
                raise _ties(slot, other)
        self.allocate_(slot, value=False)
        _copy(slot, value)


def _has_memory(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout == torch.strided


def _copy(slot: Slot, value: Tensor) -> None:
    with torch.no_grad():
        slot.whole.copy_(value)


def _ties(slot: Slot, other: Slot) -> ColotrainError:
    return ColotrainError(
        f"model.deferred_init=true: init_weights() ties {slot.name} to {other.name}",
        "tie them when the model is made",
    )


def _reshaped(slot: Slot, found: str) -> ColotrainError:
    whole = slot.whole
    return ColotrainError(
        f"model.deferred_init=true: init_weights() replaces {slot.name} "
        f"({whole.dtype} {tuple(whole.shape)}) by {found}",
        "keep its shape and dtype",
    )


def mark_of(dtype: torch.dtype) -> float:
    """The number that fills a tensor without a value."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return 0 if dtype == torch.bool else torch.iinfo(dtype).min


def _is_marked(tensor: Tensor) -> bool:
    """Whether part of a tensor has no value yet; always False for bool and 1-byte floats."""
    dtype = tensor.dtype
    if dtype == torch.bool or (dtype.itemsize == 1 and dtype.is_floating_point):
        return False
    if dtype.is_floating_point or dtype.is_complex:
        return bool(torch.isnan(tensor).any())
    return bool((tensor == mark_of(dtype)).any())
