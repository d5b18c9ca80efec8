"""Parameters of a Hugging Face model in the names and parts that its directory has them in.

Programs that read such directories may know no others: experts are one by one there, and fused in
the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from colotrain.export.stream import Entry
from colotrain.models import huggingface
from colotrain.models.huggingface_files import Converted
from colotrain.models.huggingface_match import sources_of


@dataclass(slots=True)
class _Latest:
    """The parts of the parameters that were read last; those of others are not kept."""

    names: tuple[str, ...] = ()
    parts: dict[str, Tensor] = field(default_factory=dict)

    def read(self, entries: Sequence[Entry], part: str, model: nn.Module) -> Tensor:
        names = tuple(entry.name for entry in entries)
        if names != self.names:
            self.parts = {}
            tensors = {entry.name: entry.read() for entry in entries}
            self.names, self.parts = names, huggingface.as_stored(model, tensors)
        return self.parts[part].contiguous()


def as_in_files(entries: Sequence[Entry], model: nn.Module) -> list[Entry]:
    """Entries of the model's parameters as those of its directory's tensors.

    The parts of a parameter follow one another, so that it is read once.
    """
    if not huggingface.has_other_files(model):
        return list(entries)
    latest = _Latest()
    return [part for group in _groups(entries, model) for part in _parts(group, model, latest)]


def _groups(entries: Sequence[Entry], model: nn.Module) -> Iterator[list[Entry]]:
    """Entries that are converted together: all, where the user's code made the model."""
    if not huggingface.is_from_directory(model):
        yield list(entries)
        return
    found = sources_of(model).found
    groups: dict[int, list[Entry]] = {}
    for number, entry in enumerate(entries):
        source = found.get(entry.name)
        key = id(source.conversion) if isinstance(source, Converted) else -number - 1
        groups.setdefault(key, []).append(entry)
    yield from groups.values()


def _parts(group: list[Entry], model: nn.Module, latest: _Latest) -> Iterator[Entry]:
    like = {entry.name: torch.empty(entry.shape, device="meta") for entry in group}
    dtype = group[0].dtype
    for name, tensor in huggingface.as_stored(model, like).items():
        yield Entry(
            name=name,
            shape=tuple(tensor.shape),
            dtype=dtype,
            read=_reader(group, name, model, latest),
        )


def _reader(
    group: list[Entry], name: str, model: nn.Module, latest: _Latest
) -> Callable[[], Tensor]:
    return lambda: latest.read(group, name, model)
