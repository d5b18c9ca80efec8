"""Adapter section: checks of the user's settings, and reading of adapters in PEFT's format."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from colotrain.config.schema import Adapter
from colotrain.errors import ConfigError, Problem, fix_of
from colotrain.rundir import read_json
from colotrain.spec.plan import AdapterPlan
from colotrain.spec.rules import check_rules

RANK, ALPHA = 8, 16.0
PREFIX = "base_model.model."
PART = re.compile(
    r"^(.*?)((?:\.base_layer)*)\.(lora_A\.weight|lora_B\.weight|lora_magnitude_vector)$"
)
"""A parameter of an adapter: its module, how deep it is wrapped there, and which one it is."""
A, B, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"
INITIAL_VALUES = (True, False, "gaussian", "orthogonal", "eva", None)
"""Values of `init_lora_weights` under which PEFT changes nothing but the adapter's own matrices."""
RESIDUALS = ("pissa", "olora")
"""Those under which PEFT, as it loads an adapter, takes a part of each weight out of it again."""
CONVERT = (
    "save it as a plain adapter with PEFT's path_initial_model_for_weight_conversion, where it was "
    "trained"
)
OF_OTHER_BASES = {
    "pissa_niter": "PEFT draws numbers as it loads it, and each loading gives other weights",
    "corda": "PEFT loads it on weights only that its data were preprocessed for",
    "lora_ga": "PEFT loads it on the whole weights, and it trained on others",
}
"""Begin of a value of `init_lora_weights` → why no file says the weights that it trained on."""
ACCEPTED: dict[str, tuple[Any, ...] | None] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (*INITIAL_VALUES, *RESIDUALS),
    "use_rslora": (False, True),
    "use_dora": (False, True),
    **dict.fromkeys(("r", "lora_alpha", "lora_dropout")),
    **dict.fromkeys(("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")),
    **dict.fromkeys(("task_type", "auto_mapping", "base_model_name_or_path", "revision")),
    **dict.fromkeys(("peft_version", "inference_mode", "runtime_config", "fan_in_fan_out")),
    **dict.fromkeys(("megatron_core", "qalora_group_size", "eva_config")),
    **dict.fromkeys(("corda_config", "lora_ga_config", "loftq_config")),  # of init_lora_weights
    **dict.fromkeys(("rank_pattern", "alpha_pattern", "modules_to_save", "target_parameters")),
}
"""PEFT's settings that may be set → their values that are known; None: any.

These are all that compute what `models.adapters` does, or that say nothing about it: which layers
have an adapter follows from the names of the weights. Of any other setting only an
empty value is taken.
"""


def check_adapter(adapter: Adapter) -> Iterator[Problem]:
    """Yield the problems of an adapter section that need no files to be found."""
    if adapter.name is None:
        for key, value in _written(adapter).items():
            yield _wrong(
                key, value, "nothing without adapter.name", "set adapter.name=lora, or remove it"
            )
        return
    if not (adapter.targets or adapter.parameters or adapter.path):
        fix = "for example adapter.targets=[q_proj,v_proj], or all-linear"
        yield _wrong("targets", None, "globs on the names of linear layers", fix)
    for key, glob in (
        (k, g) for k in ("targets", "exclude", "parameters") for g in getattr(adapter, k)
    ):
        if not isinstance(glob, str) or not glob:
            yield _wrong(key, glob, "globs on names", "write names as texts")
    for key, numbers in (("ranks", adapter.ranks), ("alphas", adapter.alphas)):
        for glob, number in numbers.items():
            if not (number >= 1 if key == "ranks" else 0 < number < math.inf):
                expected = "1 or more" if key == "ranks" else "a number above 0"
                yield _wrong(f"{key}.{glob}", number, expected, "correct it")
    if adapter.rank is not None and adapter.rank < 1:
        yield _wrong("rank", adapter.rank, "1 or more", f"for example adapter.rank={RANK}")
    if adapter.alpha is not None and not 0 < adapter.alpha < math.inf:
        yield _wrong("alpha", adapter.alpha, "a number above 0", f"for example {ALPHA:g}")
    if adapter.dropout is not None and not 0 <= adapter.dropout < 1:
        yield _wrong("dropout", adapter.dropout, "a number from 0 up to, but not, 1", "or 0")


def _written(adapter: Adapter) -> dict[str, Any]:
    """The settings beside the name that are not at their defaults."""
    plain = {f.name: getattr(adapter, f.name) for f in fields(Adapter) if f.name != "name"}
    return {key: value for key, value in plain.items() if value not in (None, [], {})}


def plan_adapter(adapter: Adapter, problems: list[Problem]) -> AdapterPlan | None:
    """Return the requested adapter; problems with its directory are added to `problems`."""
    if adapter.name is None or any(True for _ in check_adapter(adapter)):
        return None
    merge = tuple(_merged(folder, problems) for folder in adapter.merge)
    if adapter.path is None:
        targets = [adapter.targets] if isinstance(adapter.targets, str) else adapter.targets
        return AdapterPlan(
            name=adapter.name,
            rank=adapter.rank or RANK,
            alpha=adapter.alpha or ALPHA,
            rslora=bool(adapter.rslora),
            ranks=dict(adapter.ranks),
            alphas=dict(adapter.alphas),
            targets=tuple(targets),
            exclude=tuple(adapter.exclude),
            parameters=tuple(adapter.parameters),
            init=adapter.init,
            dropout=adapter.dropout or 0.0,
            merge=tuple(plan for plan in merge if plan is not None),
        )
    try:
        found = read_peft(Path(adapter.path).expanduser().absolute())
    except ConfigError as error:
        problems += error.problems
        return None
    problems += _against_path(adapter, found)
    found = replace(found, merge=tuple(plan for plan in merge if plan is not None))
    return found if adapter.dropout is None else replace(found, dropout=adapter.dropout)


def _merged(folder: str, problems: list[Problem]) -> AdapterPlan | None:
    """Return the plan of an adapter in `adapter.merge`; its problems are added to `problems`."""
    try:
        found = read_peft(Path(folder).expanduser().absolute())
    except ConfigError as error:
        problems += [replace(p, key="adapter.merge") for p in error.problems]
        return None
    others = {"DoRA": found.name == "dora", "experts": found.parameters, "modules": found.modules}
    for what in (name for name, has in others.items() if has):
        expected = f"LoRA on linear layers alone (it has {what})"
        fix = "merge it with PEFT (merge_and_unload), and name that directory in model.hf"
        problems.append(_wrong("merge", folder, expected, fix))
    return found


def _against_path(adapter: Adapter, found: AdapterPlan) -> Iterator[Problem]:
    """Yield the problems of settings that say otherwise than the adapter in `adapter.path`."""
    known = {name: getattr(found, name) for name in ("name", "rank", "alpha", "rslora", "init")}
    written = {"name": adapter.name, **_written(adapter)}
    for key, value in written.items():
        if key in known and value != known[key]:
            number = known[key]
            shown = f"{number:g}" if isinstance(number, float) else str(number)
            fix = f"set adapter.name={found.name}" if key == "name" else "remove it"
            fix = f"{fix}: adapter.path={adapter.path} decides"
            yield _wrong(key, value, f"{shown}, as in adapter.path", fix)
        elif key not in (*known, "path", "dropout", "merge"):
            fix = "remove it: the directory decides which layers have adapters, and of what rank"
            yield _wrong(key, value, "nothing beside adapter.path", fix)


def check_brought(values: Mapping[str, Any], found: AdapterPlan) -> Iterator[Problem]:
    """Yield what other settings exclude of what the adapter in `adapter.path` brings.

    `values`: all settings, from dotted key to value.
    """
    brought = {
        "adapter.parameters": [*found.parameters],
        "adapter.dropout": found.dropout,
        "adapter.init": found.init,
    }
    known = list(check_rules(values))
    for problem in check_rules({**values, **brought}):
        if problem.key == "adapter.parameters":
            expected = f"an adapter with {problem.key}={problem.expected}"
            fix = "take one of linear layers alone, or change the other setting"
            yield _wrong("path", found.path, expected, fix)
        elif problem not in known:
            yield problem


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
    shapes = _tensor_shapes(weights)
    modules = _whole_modules(settings.get("modules_to_save") or (), shapes)
    beside = tuple(f"{PREFIX}{name}." for name in modules)
    found = {name: PART.match(name) for name in shapes if not name.startswith(beside)}
    plan = AdapterPlan(
        name="dora" if settings.get("use_dora") else "lora",
        rank=int(settings["r"]),
        alpha=float(settings["lora_alpha"]),
        rslora=bool(settings.get("use_rslora")),
        ranks={key: int(n) for key, n in (settings.get("rank_pattern") or {}).items()},
        alphas={key: float(n) for key, n in (settings.get("alpha_pattern") or {}).items()},
        targets=tuple({m[1].removeprefix(PREFIX): None for m in found.values() if m}),
        parameters=tuple(settings.get("target_parameters") or ()),
        init=_residual(settings),
        dropout=float(settings.get("lora_dropout") or 0.0),
        path=str(folder),
        modules=modules,
    )
    if odd := _odd(plan, set(found)):
        has = "has" if odd in shapes else "lacks"
        expected = f"the matrices of its adapters in its weights, only (it {has} {odd})"
        fix = "save it with PEFT's save_embedding_layers=False, or merge it into the model"
        if ".lora_embedding_" in " ".join(found):
            layer = next(name for name in found if ".lora_embedding_" in name)
            expected = f"no adapter of an embedding that is no target_parameters (it has {layer})"
            fix = "merge it with PEFT (merge_and_unload), and name that directory in model.hf"
        raise ConfigError([_wrong("path", folder, expected, fix)])
    for name, match in found.items():
        if match and not plan.parameters and match[3] != MAGNITUDE:
            rank = plan.rank_of(match[1].removeprefix(PREFIX))
            of_rank = shapes[name][slice(0, 1) if match[3] == A else slice(1, 2)]
            if of_rank != (rank,):
                expected = f"matrices of its rank {rank} ({name} is {shapes[name]})"
                raise ConfigError([_wrong("path", folder, expected, "save it with PEFT")])
    return plan


def _odd(plan: AdapterPlan, names: set[str]) -> str:
    """A name that is no part of an adapter, or a part that lacks another; empty where all fit."""
    roles = (A, B, MAGNITUDE) if plan.name == "dora" else (A, B)
    matches = [match for name in names if (match := PART.match(name))]
    owners = {match[1] + match[2] for match in matches if plan.parameters or not match[2]}
    return min(names ^ {f"{owner}.{role}" for owner in owners for role in roles}, default="")


def _whole_modules(named: Iterable[str], names: Iterable[str]) -> tuple[str, ...]:
    """Modules that are whole in a file, from the ends of their names in `modules_to_save`."""
    found: dict[str, None] = {}
    for name in names:
        parts = name.removeprefix(PREFIX).split(".")
        above = (".".join(parts[:count]) for count in range(1, len(parts)))
        inside = (module for module in above if module.endswith(tuple(named)))
        if not PART.match(name) and (module := next(inside, None)):
            found[module] = None
    return tuple(found)


def _residual(settings: Mapping[str, Any]) -> Any:
    """What PEFT takes out of the weights as it loads an adapter; None: nothing."""
    value = settings.get("init_lora_weights")
    return value if value in RESIDUALS else None


def _is_accepted(name: str, value: Any) -> bool:
    """Whether a setting of PEFT leaves plain low-rank adapters what they are."""
    if name not in ACCEPTED:
        return value in (None, False, "") or value in ([], {})
    known = ACCEPTED[name]
    return known is None or any(value is each or value == each for each in known)


def _refused(folder: Path, name: str, value: Any) -> Problem:
    if name == "init_lora_weights":
        for begin, why in OF_OTHER_BASES.items():
            if str(value).startswith(begin):
                expected = f"weights that it can be put on (init_lora_weights is {value}: {why})"
                return _wrong("path", folder, expected, CONVERT)
    known = ACCEPTED.get(name) or ("nothing",)
    expected = (
        f"{name} to be {' or '.join(map(str, known))} in its adapter_config.json, not {value}"
    )
    fix = "merge the adapter into the model with PEFT (merge_and_unload), or train a new one"
    return _wrong("path", folder, expected, fix)


def _json(folder: Path, name: str) -> dict[str, Any]:
    try:
        found = read_json(folder / name)
        _check_types(found)
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        expected = f"a directory in PEFT's format ({name}: {error})"
        fix = fix_of(error, "correct the path")
        raise ConfigError([_wrong("path", folder, expected, fix)]) from error
    return dict(found)


def _check_types(settings: dict[str, Any]) -> None:
    """Raise KeyError, ValueError or TypeError for settings that PEFT does not write."""
    if int(settings["r"]) < 1:
        raise ValueError(f"r is {settings['r']}")
    if not 0 < float(settings["lora_alpha"]) < math.inf:
        raise ValueError(f"lora_alpha is {settings['lora_alpha']}")
    if not 0 <= float(settings.get("lora_dropout") or 0) < 1:
        raise ValueError(f"lora_dropout is {settings['lora_dropout']}")
    for key, to in (("rank_pattern", int), ("alpha_pattern", float)):
        numbers = settings.get(key) or {}
        if not isinstance(numbers, dict):
            raise ValueError(f"{key} is no object")
        for pattern, number in numbers.items():
            if not 0 < to(number) < math.inf:
                raise ValueError(f"{key} has {number}")
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{key}: {pattern}: {error}") from error
    for key in ("modules_to_save", "target_parameters"):
        names = settings.get(key) or []
        if not isinstance(names, list) or not all(isinstance(n, str) and n for n in names):
            raise ValueError(f"{key} is no list of names")


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
