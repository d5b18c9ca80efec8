"""The state of a run that is not tensors: modules' extra state, and the optimizer's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from colotrain import module_tree
from colotrain.engine.state import plain_data
from colotrain.engine.state.run_state import Run
from colotrain.errors import ColotrainError

PLAIN = "json."
"""Prefix of names of plain data: `json.model.NAME` beside `model.NAME`."""
EXTRA = "_extra_state"


def encoded(run: Run) -> dict[str, Tensor]:
    """Return flat name → plain data as bytes; `ColotrainError` where a value is not plain."""
    found = {}
    for name, value in _plain_values(run):
        try:
            found[PLAIN + name] = plain_data.encode(value)
        except TypeError as error:
            raise _cannot_be_saved(run, name, error) from error
    return found


def _plain_values(run: Run) -> Iterator[tuple[str, Any]]:
    """Yield flat name and plain data: modules' extra state, and the optimizer's."""
    for path, module in _with_extra_state(run.sharded.module):
        yield f"model.{path}.{EXTRA}" if path else f"model.{EXTRA}", module.get_extra_state()
    for name, values in run.optimizer.plain_state().items():
        yield from ((f"optim.{name}.{key}", value) for key, value in values.items())
    for number, values in run.optimizer.plain_groups().items():
        yield from ((f"groups.{number}.{key}", value) for key, value in values.items())


def _with_extra_state(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, module in module_tree.named_modules(model):
        if type(module).get_extra_state is nn.Module.get_extra_state:
            continue
        if type(module).set_extra_state is nn.Module.set_extra_state:
            raise ColotrainError(
                f"model: {path or 'it'} has get_extra_state() and no set_extra_state(), so that "
                "no checkpoint of it could be resumed",
                "define both or neither, or set checkpoint.every=0",
            )
        yield path, module


def _cannot_be_saved(run: Run, name: str, error: TypeError) -> ColotrainError:
    what = f"optim.name={run.plan.optim.name}: its state {name}"
    if name.startswith("model."):
        what = (
            f"model: what {name.removeprefix('model.').replace(EXTRA, 'get_extra_state()')} gives"
        )
    return ColotrainError(
        f"{what} cannot be saved ({error})",
        "keep numbers, texts, tensors, and tuples, lists, sets or dicts of these, or set "
        "checkpoint.every=0",
    )


def as_stored(stored: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return tensors to read plain data into; their lengths are the checkpoint's."""
    return {name: bytes_of(entry) for name, entry in stored.items() if name.startswith(PLAIN)}


def bytes_of(entry: Any) -> Tensor:
    return torch.empty(getattr(entry, "shape", entry), dtype=torch.uint8)


def restore(run: Run, loaded: dict[str, Tensor], path: Path, *, same_optimizer: bool) -> None:
    """Set the plain data of a checkpoint in modules and the optimizer."""
    modules = dict(module_tree.named_modules(run.sharded.module))
    for full, data in loaded.items():
        if not full.startswith(PLAIN):
            continue
        kind, _, name = full.removeprefix(PLAIN).partition(".")
        try:
            value = plain_data.decode(data)
        except ValueError as error:
            raise ColotrainError(f"{path}: {name}: {error}", "use another checkpoint") from error
        owner, _, key = name.rpartition(".")
        if kind == "model" and owner in modules:
            modules[owner].set_extra_state(value)
        elif kind == "optim":
            run.optimizer.set_plain_state(owner, key, value)
        elif kind == "groups" and same_optimizer:
            run.optimizer.set_plain_group(int(owner), key, value)
