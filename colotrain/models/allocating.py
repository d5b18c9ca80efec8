"""torch modes under which users' code initialises parameters that have no memory yet."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from colotrain.models.filling import ParameterFiller, Slot
from colotrain.torch_internals import (
    DisableTorchFunction,
    TorchDispatchMode,
    arguments_of,
    name_of,
    without_modes,
)

OVERWRITES = frozenset(
    {
        "zero_",
        "fill_",
        "copy_",
        "normal_",
        "uniform_",
        "bernoulli_",
        "exponential_",
        "cauchy_",
        "log_normal_",
        "geometric_",
        "random_",
    }
)
"""In-place operations whose result does not depend on the tensor's previous values."""
SERIAL = frozenset({"normal_", "uniform_"})
"""Draws that torch makes on one core, and that may so be made on a thread."""
LEAVES_TORCH = frozenset(
    {
        "numpy",
        "__array__",
        "__dlpack__",
        "data_ptr",
        "storage",
        "untyped_storage",
        "tolist",
        "share_memory_",
        "__reduce_ex__",
    }
)
"""Methods that give code access to a tensor's memory without torch's operations."""


class Allocates(TorchDispatchMode):
    """Allocates the parameters that an operation uses; draws come from their own generators."""

    def __init__(self, filler: ParameterFiller) -> None:
        super().__init__()
        self.filler = filler

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False, because torch would load its compiler (1 s, 90 MiB) to skip this mode."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with DisableTorchFunction():
            return self._call(func, args, kwargs)

    def _call(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        slots = self.filler.found_in((args, kwargs))
        if not slots:
            return func(*args, **kwargs)
        with self.filler.using(slots):
            overwritten = self._overwritten(func, args)
            for slot in slots:
                self.filler.allocate_(slot, value=slot is not overwritten)
            if _draws_in_place(func) and kwargs.get("generator") is None:
                for slot in self.filler.found_in(args[:1]):
                    kwargs = {**kwargs, "generator": slot.generator}
                if overwritten is not None and not overwritten.stays and name_of(func) in SERIAL:
                    return self.filler.draw_(overwritten, func, args, kwargs)
            return func(*args, **kwargs)

    def _overwritten(self, func: Any, args: tuple) -> Slot | None:
        """The parameter whose every element the operation sets without reading it."""
        name = name_of(func)
        first = self.filler.found_in(args[:1])
        if name not in OVERWRITES or not first or first[0] in self.filler.found_in(args[1:]):
            return None
        return first[0] if args[0].numel() == first[0].whole.numel() else None


class KeepsEscaped(TorchFunctionMode):
    """Keeps a parameter in memory for good once code outside torch may hold its address."""

    def __init__(self, filler: ParameterFiller) -> None:
        super().__init__()
        self.filler = filler

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        leaves = getattr(func, "__name__", "") in LEAVES_TORCH
        assigns = func == torch.Tensor.data.__set__  # type: ignore[attr-defined]
        if leaves or assigns:
            for slot in self.filler.found_in(args[:1]):
                with without_modes():
                    if assigns:
                        return self.filler.assign(slot, args[1])
                    self.filler.allocate_(slot, value=True)
                slot.stays = True
        return func(*args, **(kwargs or {}))


@functools.cache
def _draws_in_place(func: Any) -> bool:
    arguments = arguments_of(func)
    writes_first = bool(arguments and arguments[0].alias_info and arguments[0].alias_info.is_write)
    return writes_first and any(a.name == "generator" for a in arguments)
