"""Where the files of a model directory hold each parameter, under its own name or in other parts.

Older and published checkpoints have other names than transformers' models of today, and experts one
by one where a model has them in one tensor. What transformers does about it when it loads a model
is data (its conversion mapping), which is read here; parameters are put together row by row.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from colotrain import module_tree
from colotrain.models.stored import StoredTensors

_layer_number = re.compile(r"\.\d+\.")
COMPARED_NUMEL = 1 << 24
"""Elements of two tied tensors of the files that are compared at once."""
ROW_WISE = ("Concatenate", "Transpose")
"""Operations of transformers that leave the rows of stacked experts as they are, beyond dim 0."""


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A parameter or buffer that is in the files as it is, under the name `name`."""

    name: str
    shape: tuple[int, ...]

    @property
    def names(self) -> set[str]:
        """Names of the tensors in the files that it is read from."""
        return {self.name}

    def rows(self, files: StoredTensors, start: int = 0, count: int | None = None) -> Tensor:
        """`count` rows of dimension 0 from `start` on (default: all of the tensor)."""
        return files.rows(self.name, start, count)


@dataclass(slots=True, eq=False)
class Conversion:
    """Tensors of the files that become one or more parameters by a converter of transformers."""

    converter: Any
    first: str
    """Name of the first parameter."""
    model: Any
    sources: dict[str, list[str]]
    """Pattern of the converter → names of stored tensors that it matches, in order."""

    def results(
        self, read: Callable[[str], Tensor], part: slice | None = None
    ) -> dict[str, Tensor]:
        """Parameters by name; with `part` those rows alone, of a conversion that `is_row_wise`."""
        converter = copy.deepcopy(self.converter)
        for pattern, names in self.sources.items():
            for name in names[part or slice(None)]:
                converter.add_tensor(self.first, name, pattern, read(name))
        found = converter.convert(self.first, model=self.model, config=self.model.config)
        return {n: t[0] if isinstance(t, list) else t for n, t in found.items()}

    @property
    def is_row_wise(self) -> bool:
        """Whether row n of the parameter is made of the n-th tensor of each pattern alone."""
        first, *others = self.converter.operations
        dims = [getattr(o, d) for o in others for d in ("dim", "dim0", "dim1") if hasattr(o, d)]
        known = all(type(o).__name__ in ROW_WISE for o in others) and all(d > 0 for d in dims)
        return known and type(first).__name__ == "MergeModulelist" and first.dim == 0


@dataclass(frozen=True, slots=True, eq=False)
class Converted:
    """A parameter that is made of other tensors in the files."""

    conversion: Conversion
    name: str
    shape: tuple[int, ...]

    @property
    def names(self) -> set[str]:
        return {name for names in self.conversion.sources.values() for name in names}

    def rows(self, files: StoredTensors, start: int = 0, count: int | None = None) -> Tensor:
        """`count` rows of dimension 0 from `start` on; only these are read where possible."""
        part = slice(start, None if count is None else start + count)
        if self.conversion.is_row_wise:
            return self.conversion.results(files.rows, part)[self.name]
        return self.conversion.results(files.rows)[self.name][part].clone()


@dataclass(frozen=True, slots=True, eq=False)
class Extended:
    """A parameter with rows of new tokens behind those that are in the files.

    Each new row is the mean of the others, around which transformers' `resize_token_embeddings`
    draws: nothing is drawn here, so that every rank and every resume has the same.
    """

    known: Stored | Converted
    shape: tuple[int, ...]

    @property
    def names(self) -> set[str]:
        return self.known.names

    def rows(self, files: StoredTensors, start: int = 0, count: int | None = None) -> Tensor:
        """`count` rows of dimension 0 from `start` on (default: all of the tensor)."""
        num_known, stop = self.known.shape[0], self.shape[0] if count is None else start + count
        first_new = max(start, num_known)
        known = self.known.rows(files, min(start, num_known), max(min(stop, num_known) - start, 0))
        if stop <= first_new:
            return known
        total = torch.zeros(self.shape[1:], dtype=torch.float64)
        for at in range(0, num_known, MEAN_ROWS):
            num = min(MEAN_ROWS, num_known - at)
            total += self.known.rows(files, at, num).double().sum(dim=0)
        mean = (total / num_known).to(torch.promote_types(known.dtype, torch.float32))
        return torch.cat([known, mean.expand(stop - first_new, *mean.shape)])


MEAN_ROWS = 4096
"""Rows of which the sum is computed at once."""
Source = Stored | Converted | Extended


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """The sources of a model's parameters and persistent buffers."""

    found: dict[str, Source]
    missing: tuple[str, ...]
    """Parameters that the files do not have."""
    untied: tuple[str, ...]
    """Names that config.json ties to another, under which the files have values of their own."""
    unused: set[str]
    """Other tensors in the files, by the names that they would have in the model."""
    transforms: list[Any]
    """Conversions of transformers that the files needed."""


def find_sources_(model: Any, files: StoredTensors) -> Sources:
    """Find every parameter and persistent buffer of a model of transformers in the files.

    A tied parameter is found under any of its names. Where the files have different values under
    two of its names, each becomes a parameter of its own, as transformers loads them. Directories
    of a base model (as GPT-2's) lack the prefix that names have in the model with a head.
    """
    known_as = dict(_known_as(model))
    places: dict[str, Source] = {}
    for name in (name for names in known_as.values() for name in names):
        stored = next((c for c in _candidates(model, name) if c in files), None)
        if stored is not None:
            places[name] = Stored(stored, files.shape(stored))
    renamed: dict[str, str] = {}
    transforms: list[Any] = []
    if not all(_first(places, names) for names in known_as.values()):
        transforms = _transforms(model)
        places |= dict(_convert(model, files, transforms, renamed))
        transforms = [transform for transform in transforms if transform.was_used()]
    untied = tuple(_untie_(model, places, files))
    found = {n: s for n, others in _known_as(model) if (s := _first(places, others))}
    used = {name for source in places.values() for name in source.names}
    unused = {renamed.get(name, name) for name in set(files) - used}
    missing = tuple(name for name, _ in module_tree.named_parameters(model) if name not in found)
    return Sources(
        found=found, missing=missing, untied=untied, unused=unused, transforms=transforms
    )


def _untie_(model: Any, places: dict[str, Source], files: StoredTensors) -> Iterator[str]:
    """Untie, and yield, the names under which the files have another value than the first's."""
    first: dict[str, str] = {}
    for target, source in list(model.all_tied_weights_keys.items()):
        if source in places:
            first.setdefault(source, source)
        if target not in places or first.setdefault(source, target) == target:
            continue
        parameter = model.get_parameter(target)
        if not _equal(places[target], places[first[source]], files, parameter.dtype):
            owner, _, key = target.rpartition(".")
            own = nn.Parameter(torch.empty_like(parameter), parameter.requires_grad)
            setattr(model.get_submodule(owner), key, own)
            del model.all_tied_weights_keys[target]
            yield target


def _equal(one: Source, other: Source, files: StoredTensors, dtype: torch.dtype) -> bool:
    """Whether two tensors of the files are the same in `dtype`; reads a few rows at a time."""
    if one.shape != other.shape:
        return False
    count = max(COMPARED_NUMEL // max(math.prod(one.shape[1:]), 1), 1)
    return all(
        torch.equal(*(source.rows(files, begin, count).to(dtype) for source in (one, other)))
        for begin in range(0, one.shape[0] if one.shape else 1, count)
    )


def extend_vocabulary_(model: Any, found: dict[str, Source]) -> None:
    """Give embedding and head the rows that the configuration has beyond those of the files."""
    rows = getattr(model.config.get_text_config(), "vocab_size", None)
    if rows is None:
        return
    of_tokens = {id(parameter) for parameter in _of_tokens(model)}
    for name, parameter in module_tree.named_parameters(model):
        source, shape = found.get(name), tuple(parameter.shape)
        if id(parameter) in of_tokens and isinstance(source, Stored | Converted):
            more = source.shape[:1] < shape[:1] == (rows,)
            if more and source.shape[1:] == shape[1:]:
                found[name] = Extended(source, shape)


def load(
    architecture: Any,
    config: Any,
    dtype: torch.dtype,
    folder: Path,
    values: dict[str, Tensor] | None = None,
) -> nn.Module:
    """The model with its weights as transformers loads them, and resizes its vocabulary.

    `values` take the place of the tensors in the folder's files.
    """
    from transformers.utils import logging

    logging.disable_progress_bar()
    text, stored = config.get_text_config(), type(config).from_pretrained(folder).get_text_config()
    size, known = (getattr(settings, "vocab_size", None) or 0 for settings in (text, stored))
    if size > known:
        text.vocab_size = known
    options: dict[str, Any] = {"local_files_only": True, "use_safetensors": True}
    options |= {} if values is None else {"state_dict": values}
    place = folder if values is None else None
    model: nn.Module = architecture.from_pretrained(place, config=config, dtype=dtype, **options)
    if size > known:
        _resize_vocabulary_(model, size)
        text.vocab_size = size
    return model


def _resize_vocabulary_(model: Any, size: int) -> None:
    """Let transformers resize embedding and head, and set new rows to the mean of the others."""
    old = [p.detach().clone() for p in _of_tokens(model)]
    model.resize_token_embeddings(size, mean_resizing=False)
    with torch.no_grad():
        for before, parameter in zip(old, _of_tokens(model), strict=True):
            parameter[: len(before)] = before
            parameter[len(before) :] = before.double().mean(dim=0)


def _of_tokens(model: Any) -> list[nn.Parameter]:
    """The parameters of embedding and head; none where transformers does not know the embedding."""
    try:
        layers = (model.get_input_embeddings(), model.get_output_embeddings())
    except NotImplementedError:
        return []
    return [p for layer in layers if layer is not None for p in layer.parameters(False)]


def _known_as(model: nn.Module) -> Iterator[tuple[str, list[str]]]:
    """Each parameter and persistent buffer, with all of its names."""
    aliases: dict[int, list[str]] = {}
    for name, parameter in module_tree.named_parameters(model, remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    for name, parameter in module_tree.named_parameters(model):
        yield name, aliases[id(parameter)]
    persistent = model.state_dict().keys()
    yield from (
        (name, [name]) for name, _ in module_tree.named_buffers(model) if name in persistent
    )


def _candidates(model: nn.Module, name: str) -> list[str]:
    base = _prefix(model)
    return [name, name.removeprefix(base), base + name]


def _prefix(model: nn.Module) -> str:
    """Begin of the names of the model without its head."""
    return f"{getattr(model, 'base_model_prefix', '')}."


def _first(places: dict[str, Source], names: Sequence[str]) -> Source | None:
    return next((places[name] for name in names if name in places), None)


def _transforms(model: Any) -> list[Any]:
    """What transformers does with the tensors of this architecture's files; [] before 5.0's."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
    except ImportError:
        return []
    return list(get_model_conversion_mapping(model))


def _convert(
    model: Any, files: StoredTensors, transforms: list[Any], renamed: dict[str, str]
) -> Iterator[tuple[str, Source]]:
    """(parameter, source) of all that transformers finds; sets the new name of each tensor."""
    from transformers import core_model_loading as loading

    renamings = [t for t in transforms if isinstance(t, loading.WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, loading.WeightConverter)]
    wanted = model.state_dict()
    groups: dict[str, Conversion] = {}
    for name in sorted(files, key=loading.dot_natural_key):
        rename = loading.rename_source_key
        target, pattern = rename(name, renamings, converters, model.base_model_prefix, wanted)
        renamed[name] = target
        if pattern is None:
            if target in wanted:
                yield target, Stored(name, files.shape(name))
            continue
        converter = next(c for c in converters if pattern in c.source_patterns)
        group = groups.setdefault(target, Conversion(converter, target, model, {}))
        group.sources.setdefault(pattern, []).append(name)
    for group in groups.values():
        results = group.results(lambda name: torch.empty(files.shape(name), device="meta"))
        for target, tensor in results.items():
            yield target, Converted(group, target, tuple(tensor.shape))


def damaged(missing: Sequence[str], found: Iterable[str]) -> str | None:
    """A missing parameter that other layers of the model have in the files, if any."""
    in_any_layer = {_layer_number.sub(".*.", name) for name in found}
    return next((name for name in missing if _layer_number.sub(".*.", name) in in_any_layer), None)


def more_layers(
    model: nn.Module, unused: set[str], ignored: Sequence[str]
) -> tuple[str, str, int] | None:
    """(tensor, list of layers, its length) of a tensor beyond the model's last layer, if any.

    `ignored` are regular expressions of names that may be in the files without being used.
    """
    lists = {n: len(m) for n, m in module_tree.named_modules(model) if isinstance(m, nn.ModuleList)}
    base = _prefix(model)
    lists |= {n.removeprefix(base): count for n, count in lists.items()}
    for name in sorted(unused):
        parts = name.split(".")
        for at, part in enumerate(parts):
            layers = ".".join(parts[:at])
            count = lists.get(layers) if part.isdecimal() else None
            if count is None or int(part) < count or any(re.search(g, name) for g in ignored):
                continue
            return name, layers, count
    return None
