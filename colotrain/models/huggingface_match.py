"""A model of transformers and its files, which need not be what config.json says.

What differs is loaded as `from_pretrained` loads it, and said.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from colotrain import module_tree
from colotrain.errors import ConfigError, Problem
from colotrain.models.facts import facts_of
from colotrain.models.huggingface_files import (
    Sources,
    damaged,
    extend_vocabulary_,
    find_sources_,
    more_layers,
)
from colotrain.models.huggingface_internals import patterns_in_float32, patterns_to_ignore
from colotrain.models.stored import FLOATING, StoredTensors
from colotrain.rundir import read_json

MOST_PARAMETERS, MOST_LAYERS, MOST_LABELS = 250_000, 1_000, 10_000_000
"""Tensors of a model, and a number of layers in its configuration, which may make lists of it."""
COMPUTED = (r"rotary_emb\.inv_freq", r"(^|\.)position_ids$")
"""Buffers that older directories have, and models of today compute."""
SHOWN = 6
"""Tensors that a sentence names."""


def match_(model: nn.Module, files: StoredTensors, folder: Path) -> None:
    """Find the model's tensors in its files; raises `ConfigError` on a mismatch."""
    sources = find_sources_(model, files)
    extend_vocabulary_(model, sources.found)
    problems = []
    for name, tensor in {
        **dict(module_tree.named_parameters(model)),
        **dict(module_tree.named_buffers(model)),
    }.items():
        source = sources.found.get(name)
        if source is not None and source.shape != tuple(tensor.shape):
            problems.append(f"{name} is {source.shape}, not {tuple(tensor.shape)}")
        elif source is not None and tensor.is_floating_point():
            packed = {files.dtype(n) for n in source.names} - set(FLOATING)
            problems += [f"{name} is {dtype}: quantized" for dtype in packed]
    if beyond := more_layers(model, sources.unused, _patterns(model, "unexpected")):
        name, layers, count = beyond
        fix = "correct config.json, or model.args; what is left out would be lost"
        raise wrong(
            folder,
            f"{count} layers of {layers}, as its config.json says (its weights have {name})",
            fix,
        )
    facts_of(model).sources = sources
    if (lost := damaged(missing_in(model), sources.found)) is not None:
        problems.append(f"{lost} is missing, and other layers have theirs")
    elif not any(name in sources.found for name, _ in module_tree.named_parameters(model)):
        problems.append(f"none of its tensors is one of a {type(model).__name__}")
    if problems:
        more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
        fix = f"give the directory of a {type(model).__name__}, or correct model.args"
        raise wrong(folder, f"weights of its config.json ({problems[0]}{more})", fix)


def remarks_on_files(model: nn.Module, brought: Sequence[str] = ()) -> Iterator[str]:
    """What the files of a model that `build` made lack, have besides, or have untied.

    `brought`: names of modules that come from an adapter's directory.
    """
    sources, kind = sources_of(model), type(model).__name__
    of_others = tuple(f"{name}." for name in brought)
    if missing := [name for name in missing_in(model) if not name.startswith(of_others)]:
        yield (
            f"the files of model.hf lack {_listed(missing)} of {kind}, which get transformers' "
            f"initial values, drawn from train.seed"
        )
    if untrained := [name for name in missing if not model.get_parameter(name).requires_grad]:
        yield (
            f"{_listed(untrained)} keep their initial values, which no training gave them, for "
            "they are frozen: name them in freeze.except to train them"
        )
    if unused := _unless(sorted(sources.unused), _patterns(model, "unexpected")):
        yield f"the files of model.hf have {_listed(unused)}, which {kind} does not: left out"
    if sources.untied:
        yield (
            f"config.json of model.hf ties {_listed(sources.untied)}, but its files have other "
            "values there: not tied, as in transformers"
        )


def missing_in(model: nn.Module) -> list[str]:
    """Parameters that the files lack, without those that transformers expects to be missing."""
    return _unless(sources_of(model).missing, _patterns(model, "missing"))


def _patterns(model: nn.Module, which: str) -> tuple[str, ...]:
    """Regular expressions of names that transformers expects to be missing, or unexpected."""
    return (*patterns_to_ignore(model, which), *(COMPUTED if which == "unexpected" else ()))


def _unless(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    return [name for name in names if not any(re.search(p, name) for p in patterns)]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def sources_of(model: nn.Module) -> Sources:
    """The places in the files of what is in a model that `build` made."""
    sources = facts_of(model).sources
    assert sources is not None
    return sources


def keep_in_float32_(model: nn.Module, dtype: torch.dtype) -> None:
    """Give tensors that transformers reads in float32, whatever its dtype, that dtype."""
    found = sources_of(model).found
    patterns = patterns_in_float32(model, dtype)
    kept = {name for name in found if any(re.search(p, name) for p in patterns)}
    for name, tensor in (*module_tree.named_parameters(model), *module_tree.named_buffers(model)):
        if name in kept:
            tensor.data = tensor.data.float()


def wrong(folder: Path, expected: str, fix: str = "") -> ConfigError:
    return ConfigError([Problem(key="model.hf", value=folder, expected=expected, fix=fix)])


def check_layers(folder: Path, args: dict[str, Any]) -> None:
    """Refuse numbers of layers and labels of which transformers would make endless lists."""
    try:
        found = [read_json(folder / "config.json"), args]
    except (OSError, ValueError) as error:
        raise wrong(folder, f"a config.json that transformers reads ({error})") from error
    while found:
        part = found.pop()
        for key, value in part.items() if isinstance(part, dict) else ():
            counts = "layer" in str(key) and "per_layer" not in str(key)
            if isinstance(value, dict):
                found.append(value)
            most = MOST_LABELS if key == "num_labels" else MOST_LAYERS if counts else None
            if most is not None and isinstance(value, int) and value > most:
                raise wrong(folder, f"{key} of at most {most:,}, not {value}")


class ParameterCounter:
    """Counts parameters while a model is built, and ends one that would take hours."""

    def __init__(self, architecture: type) -> None:
        self._name, self._count = architecture.__name__, 0

    def add(self, _: nn.Parameter) -> None:
        self._count += 1
        if self._count > MOST_PARAMETERS:
            expected = f"a {self._name} of at most {MOST_PARAMETERS:,} parameters (tensors)"
            fix = "correct the numbers of layers and experts in config.json, or model.args"
            raise ConfigError([Problem(key="model.hf", expected=expected, fix=fix)])
