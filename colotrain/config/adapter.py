"""Adapter section: checks of the user's settings, and reading of adapters in PEFT's format."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from colotrain.config.schema import Adapter
from colotrain.errors import ConfigError, Problem, fix_of
from colotrain.rundir import read_json
from colotrain.spec.plan import AdapterPlan

RANK, ALPHA = 8, 16.0
PREFIX, SUFFIX = "base_model.model.", ".lora_A.weight"
INITIAL_VALUES = (True, False, "gaussian", "orthogonal", "eva", None)
"""Values of `init_lora_weights` under which PEFT changes nothing but the adapter's own matrices."""
ACCEPTED: dict[str, tuple[Any, ...] | None] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": INITIAL_VALUES,
    "use_rslora": (False, True),
    **dict.fromkeys(("r", "lora_alpha", "lora_dropout")),
    **dict.fromkeys(("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")),
    **dict.fromkeys(("task_type", "auto_mapping", "base_model_name_or_path", "revision")),
    **dict.fromkeys(("peft_version", "inference_mode", "runtime_config", "fan_in_fan_out")),
    **dict.fromkeys(("megatron_core", "qalora_group_size", "eva_config")),
}
"""PEFT's settings that may be set → their values that are known; None: any.

These are all that compute, or that say nothing about, the sum of a layer and a product of two
matrices: which layers have one follows from the names of the weights. Of any other setting only an
empty value is taken.
"""


def check_adapter(adapter: Adapter) -> Iterator[Problem]:
    """Yield the problems of an adapter section that need no files to be found."""
    written = {
        "rank": adapter.rank,
        "alpha": adapter.alpha,
        "targets": adapter.targets or None,
        "dropout": adapter.dropout,
        "path": adapter.path,
    }
    if adapter.name is None:
        for key, value in written.items():
            if value is not None:
                fix = "set adapter.name=lora, or remove it"
                yield _wrong(key, value, "nothing without adapter.name", fix)
        return
    if not adapter.targets and adapter.path is None:
        fix = "for example adapter.targets=[q_proj,v_proj]"
        yield _wrong("targets", None, "globs on the names of linear layers", fix)
    if adapter.rank is not None and adapter.rank < 1:
        yield _wrong("rank", adapter.rank, "1 or more", f"for example adapter.rank={RANK}")
    if adapter.alpha is not None and not 0 < adapter.alpha < math.inf:
        yield _wrong("alpha", adapter.alpha, "a number above 0", f"for example {ALPHA:g}")
    if adapter.dropout is not None and not 0 <= adapter.dropout < 1:
        yield _wrong("dropout", adapter.dropout, "a number from 0 up to, but not, 1", "or 0")


def plan_adapter(adapter: Adapter, problems: list[Problem]) -> AdapterPlan | None:
    """Return the requested adapter; problems with its directory are added to `problems`."""
    if adapter.name is None or any(True for _ in check_adapter(adapter)):
        return None
    if adapter.path is None:
        return AdapterPlan(
            name=adapter.name,
            rank=adapter.rank or RANK,
            alpha=adapter.alpha or ALPHA,
            targets=tuple(adapter.targets),
            dropout=adapter.dropout or 0.0,
        )
    try:
        found = read_peft(Path(adapter.path).expanduser().absolute())
    except ConfigError as error:
        problems += error.problems
        return None
    for key, wanted, known in (
        ("rank", adapter.rank, found.rank),
        ("alpha", adapter.alpha, found.alpha),
    ):
        if wanted not in (None, known):
            fix = f"remove it: adapter.path={adapter.path} decides"
            problems.append(_wrong(key, wanted, f"{known:g}, as in adapter.path", fix))
    if adapter.targets:
        fix = "remove it: the directory decides which layers have adapters"
        problems.append(_wrong("targets", adapter.targets, "nothing beside adapter.path", fix))
    return found if adapter.dropout is None else replace(found, dropout=adapter.dropout)


def read_peft(folder: Path) -> AdapterPlan:
    """Return the plan of an adapter in PEFT's format; else raise `ConfigError`.

    The layers are those named in the weights, so that no pattern has to be interpreted.
    """
    settings = _json(folder, "adapter_config.json")
    weights = folder / "adapter_model.safetensors"
    if not weights.is_file():
        pickled = (folder / "adapter_model.bin").is_file()
        fix = "pickles are never read: save it as safetensors" if pickled else "correct the path"
        raise ConfigError([_wrong("path", folder, "an adapter_model.safetensors in it", fix)])
    refused = [name for name, value in settings.items() if not _is_accepted(name, value)]
    if refused:
        raise ConfigError([_refused(folder, name, settings[name]) for name in refused])
    rank, alpha = int(settings["r"]), float(settings["lora_alpha"])
    if settings.get("use_rslora"):  # scaled by alpha / √rank (Kalajdzievski 2023)
        alpha *= math.sqrt(rank)
    shapes = _tensor_shapes(weights)
    layers = [n.removeprefix(PREFIX).removesuffix(SUFFIX) for n in shapes if n.endswith(SUFFIX)]
    pairs = {f"{PREFIX}{layer}.lora_{part}.weight" for layer in layers for part in "AB"}
    if odd := sorted(pairs ^ shapes.keys()):
        has = "has" if odd[0] in shapes else "lacks"
        expected = f"lora_A and lora_B of linear layers in its weights, only (it {has} {odd[0]})"
        fix = "save it with PEFT's save_embedding_layers=False, or merge it into the model"
        raise ConfigError([_wrong("path", folder, expected, fix)])
    for name, shape in shapes.items():
        if shape[0 if name.endswith(SUFFIX) else 1] != rank:
            expected = f"matrices of its rank {rank} ({name} is {shape})"
            raise ConfigError([_wrong("path", folder, expected, "save it with PEFT")])
    return AdapterPlan(
        rank=rank,
        alpha=alpha,
        targets=tuple(layers),
        dropout=float(settings.get("lora_dropout") or 0.0),
        path=str(folder),
    )


def _is_accepted(name: str, value: Any) -> bool:
    """Whether a setting of PEFT leaves plain low-rank adapters what they are."""
    if name not in ACCEPTED:
        return value in (None, False, "") or value in ([], {})
    known = ACCEPTED[name]
    return known is None or any(value is each or value == each for each in known)


def _refused(folder: Path, name: str, value: Any) -> Problem:
    known = ACCEPTED.get(name) or ("nothing",)
    expected = (
        f"{name} to be {' or '.join(map(str, known))} in its adapter_config.json, not {value}"
    )
    fix = "merge the adapter into the model with PEFT (merge_and_unload), or train a new one"
    return _wrong("path", folder, expected, fix)


def _json(folder: Path, name: str) -> dict[str, Any]:
    try:
        found = read_json(folder / name)
        int(found["r"]), float(found["lora_alpha"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        expected = f"a directory in PEFT's format ({name}: {error})"
        fix = fix_of(error, "correct the path")
        raise ConfigError([_wrong("path", folder, expected, fix)]) from error
    return dict(found)


def _tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor in a safetensors file: a length of 8 bytes, then JSON."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(size, 1 << 26)))
        return {n: tuple(t["shape"]) for n, t in header.items() if n != "__metadata__"}
    except (*(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError),) as error:
        expected = f"a safetensors file ({path.name}: {error})"
        fix = fix_of(error, "copy it again")
        raise ConfigError([_wrong("path", path.parent, expected, fix)]) from error


def _wrong(key: str, value: Any, expected: str, fix: str) -> Problem:
    return Problem(key=f"adapter.{key}", value=value, expected=expected, fix=fix)
