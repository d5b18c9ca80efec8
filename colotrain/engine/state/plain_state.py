"""The state of a run that is not tensors: modules' extra state, and the optimizer's.

State of users' modules and optimizers (`get_extra_state()`, a step count that is an int) consists
of numbers, texts, tensors, and tuples, lists, sets and dicts of these. A checkpoint has it as JSON
in bytes, with tensors inside. Reading never executes code.
"""

from __future__ import annotations

import base64
import io
import json
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from colotrain import module_tree
from colotrain.engine.comms.raw_bytes import bytes_of
from colotrain.engine.state.index import Index
from colotrain.engine.state.run_state import Run
from colotrain.errors import ColotrainError

PLAIN = "json."
"""Prefix of names of plain data: `json.model.NAME` beside `model.NAME`."""
EXTRA = "_extra_state"
_AS_THEY_ARE = (type(None), bool, int, float, str)
_SEQUENCES: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset"}
_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "ordered"}
_SEQUENCE_NAMES = {name: kind for kind, name in _SEQUENCES.items()}
_MAPPING_NAMES = {name: kind for kind, name in _MAPPINGS.items()}


def encoded(run: Run) -> dict[str, Tensor]:
    """Return flat name → plain data as bytes; `ColotrainError` where a value is not plain."""
    found = {}
    for name, value in _plain_values(run):
        try:
            found[PLAIN + name] = encode(value)
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


def as_stored(stored: Index) -> dict[str, Tensor]:
    """Return tensors to read plain data into; their lengths are the checkpoint's."""
    return {
        name: torch.empty(entry.shape, dtype=torch.uint8)
        for name, entry in stored.items()
        if name.startswith(PLAIN)
    }


def restore(run: Run, loaded: dict[str, Tensor], path: Path, *, same_optimizer: bool) -> None:
    """Set the plain data of a checkpoint in modules and the optimizer."""
    modules = dict(module_tree.named_modules(run.sharded.module))
    for full, data in loaded.items():
        if not full.startswith(PLAIN):
            continue
        kind, _, name = full.removeprefix(PLAIN).partition(".")
        try:
            value = decode(data)
        except ValueError as error:
            raise ColotrainError(f"{path}: {name}: {error}", "use another checkpoint") from error
        owner, _, key = name.rpartition(".")
        if kind == "model" and owner in modules:
            modules[owner].set_extra_state(value)
        elif kind == "optim":
            run.optimizer.set_plain_state(owner, key, value)
        elif kind == "groups" and same_optimizer:
            run.optimizer.set_plain_group(int(owner), key, value)


def encode(value: Any) -> Tensor:
    """Return `value` as bytes (uint8 [n]); `TypeError` names the first item that is not plain."""
    text = json.dumps(_plain(value, "it"), separators=(",", ":"))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def decode(data: Tensor) -> Any:
    """Return what was given to `encode`; `ValueError` where `data` is not from `encode`."""
    try:
        return _value(json.loads(bytes(data.tolist()).decode()))
    except (KeyError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
        raise ValueError(f"no plain data ({type(error).__name__}: {error})") from error


def _plain(value: Any, where: str) -> Any:
    kind = type(value)
    if kind in _AS_THEY_ARE:
        return value
    if kind is list:
        return [_plain(v, f"{where}[{n}]") for n, v in enumerate(value)]
    if kind in _SEQUENCES or isinstance(value, torch.Size):
        items = [_plain(v, f"{where}[{n}]") for n, v in enumerate(value)]
        return {_SEQUENCES.get(kind, "tuple"): items}
    if kind in _MAPPINGS:
        pairs = [[_plain(k, where), _plain(v, f"{where}[{k!r}]")] for k, v in value.items()]
        return {_MAPPINGS[kind]: pairs}
    if isinstance(value, Tensor) and not isinstance(value, DTensor) and not value.is_meta:
        whole = value.detach().cpu().contiguous()
        dtype = str(whole.dtype).removeprefix("torch.")
        return {"tensor": dtype, "shape": list(whole.shape), "data": _text(bytes(bytes_of(whole)))}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        kind_of = "array" if isinstance(value, np.ndarray) else "number"
        raw = np.ascontiguousarray(value).tobytes()
        return {kind_of: value.dtype.str, "shape": list(value.shape), "data": _text(raw)}
    if kind in (bytes, io.BytesIO):
        raw = value if kind is bytes else value.getvalue()
        return {"bytes" if kind is bytes else "file": _text(raw)}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    if kind is torch.dtype:
        return {"dtype": str(value).removeprefix("torch.")}
    raise TypeError(f"{where} is a {kind.__module__}.{kind.__qualname__}")


def _value(plain: Any) -> Any:
    if isinstance(plain, list):
        return [_value(item) for item in plain]
    if not isinstance(plain, dict):
        return plain
    tag, content = next(iter(plain.items()))
    if tag in _SEQUENCE_NAMES:
        return _SEQUENCE_NAMES[tag](_value(item) for item in content)
    if tag in _MAPPING_NAMES:
        return _MAPPING_NAMES[tag]((_value(k), _value(v)) for k, v in content)
    if tag == "tensor":
        raw = torch.frombuffer(bytearray(_raw(plain["data"]) or b"\0"), dtype=torch.uint8)
        raw = raw if plain["data"] else raw[:0]
        return raw.view(_dtype(content)).reshape(plain["shape"])
    if tag in ("array", "number"):
        array = np.frombuffer(_raw(plain["data"]), np.dtype(content)).reshape(plain["shape"])
        return array.copy() if tag == "array" else array[()]
    if tag in ("bytes", "file"):
        return _raw(content) if tag == "bytes" else io.BytesIO(_raw(content))
    if tag == "complex":
        return complex(*content)
    if tag == "dtype":
        return _dtype(content)
    raise ValueError(f"{tag!r} is nothing that was written")


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name} is no dtype")
    return found


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _raw(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
