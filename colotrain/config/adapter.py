"""Adapter section: checks of the user's settings, and reading of adapters in PEFT's format."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from colotrain.config.schema import Adapter
from colotrain.errors import ConfigError, Problem
from colotrain.spec.plan import AdapterPlan

RANK, ALPHA = 8, 16.0
PREFIX, SUFFIX = "base_model.model.", ".lora_A.weight"
UNSUPPORTED: dict[str, Any] = {
    "use_dora": False,
    "bias": "none",
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "lora_bias": False,
    "trainable_token_indices": None,
    "target_parameters": None,
}
"""PEFT settings that change what an adapter computes, with the only supported value of each."""


def check_adapter(adapter: Adapter) -> Iterator[Problem]:
    """Yield the problems of an adapter section that need no files to be found."""
    written = {
        "rank": adapter.rank,
        "alpha": adapter.alpha,
        "targets": adapter.targets or None,
        "dropout": adapter.dropout or None,
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
    if not 0 <= adapter.dropout < 1:
        yield _wrong("dropout", adapter.dropout, "a number from 0 up to, but not, 1", "or 0")


def plan_adapter(adapter: Adapter, problems: list[Problem]) -> AdapterPlan | None:
    """Return the requested adapter; problems with its directory are added to `problems`."""
    if adapter.name is None or any(True for _ in check_adapter(adapter)):
        return None
    rank, alpha, targets = adapter.rank or RANK, adapter.alpha or ALPHA, tuple(adapter.targets)
    path = None
    if adapter.path is not None:
        folder = Path(adapter.path).expanduser().absolute()
        try:
            rank, alpha, targets = read_peft(folder)
        except ConfigError as error:
            problems += error.problems
            return None
        path = str(folder)
        given = {"rank": (adapter.rank, rank), "alpha": (adapter.alpha, alpha)}
        for key, (wanted, found) in given.items():
            if wanted not in (None, found):
                fix = f"remove it: adapter.path={adapter.path} decides"
                problems.append(_wrong(key, wanted, f"{found:g}, as in adapter.path", fix))
        if adapter.targets:
            fix = "remove it: the directory decides which layers have adapters"
            problems.append(_wrong("targets", adapter.targets, "nothing beside adapter.path", fix))
    return AdapterPlan(
        name=adapter.name,
        rank=rank,
        alpha=alpha,
        targets=targets,
        dropout=adapter.dropout,
        path=path,
    )


def read_peft(folder: Path) -> tuple[int, float, tuple[str, ...]]:
    """Return rank, alpha and layers of an adapter in PEFT's format; else raise `ConfigError`.

    The layers are those named in the weights, so that no pattern has to be interpreted.
    """
    settings = _json(folder, "adapter_config.json")
    weights = folder / "adapter_model.safetensors"
    if not weights.is_file():
        pickled = (folder / "adapter_model.bin").is_file()
        fix = "pickles are never read: save it as safetensors" if pickled else "correct the path"
        raise ConfigError([_wrong("path", folder, "an adapter_model.safetensors in it", fix)])
    if settings.get("peft_type") != "LORA":
        expected = f"a LoRA adapter (it is {settings.get('peft_type')})"
        raise ConfigError([_wrong("path", folder, expected, "train a new one")])
    others = {
        k: settings[k] for k, only in UNSUPPORTED.items() if settings.get(k) not in (only, None)
    }
    if others:
        expected = f"plain LoRA (it sets {', '.join(f'{k}={v}' for k, v in others.items())})"
        raise ConfigError([_wrong("path", folder, expected, "merge it into the model with PEFT")])
    rank, alpha = int(settings["r"]), float(settings["lora_alpha"])
    if settings.get("use_rslora"):  # scaled by alpha / √rank (Kalajdzievski 2023)
        alpha *= math.sqrt(rank)
    names = _tensor_names(weights)
    layers = [n.removeprefix(PREFIX).removesuffix(SUFFIX) for n in names if n.endswith(SUFFIX)]
    if 2 * len(layers) != len(names) or not all(n.startswith(PREFIX) for n in names):
        expected = "weights named base_model.model.LAYER.lora_A.weight and lora_B.weight only"
        raise ConfigError([_wrong("path", folder, expected, "save it with PEFT")])
    return rank, alpha, tuple(layers)


def _json(folder: Path, name: str) -> dict[str, Any]:
    try:
        found = json.loads((folder / name).read_text("utf-8"))
        int(found["r"]), float(found["lora_alpha"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        expected = f"a directory in PEFT's format ({name}: {error})"
        raise ConfigError([_wrong("path", folder, expected, "correct the path")]) from error
    return dict(found)


def _tensor_names(path: Path) -> list[str]:
    """Return the tensor names in a safetensors file: a length of 8 bytes, then JSON."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(size, 1 << 26)))
    except (OSError, ValueError) as error:
        expected = f"a safetensors file ({path.name}: {error})"
        raise ConfigError([_wrong("path", path.parent, expected, "copy it again")]) from error
    return [name for name in header if name != "__metadata__"]


def _wrong(key: str, value: Any, expected: str, fix: str) -> Problem:
    return Problem(key=f"adapter.{key}", value=value, expected=expected, fix=fix)
