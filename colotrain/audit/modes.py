"""Which parts of a model are in train mode, where that matters: dropout and BatchNorm."""

from __future__ import annotations

import weakref
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from typing import cast

from torch import Tensor, nn

from colotrain.audit import model
from colotrain.audit.sites import Site

BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm


@dataclass(slots=True)
class Modes:
    """Modes of the root modules in the forwards between two steps of an optimizer."""

    on: set[int] = field(default_factory=set)
    """Ids of the roots that were in train mode in a forward where gradients are computed."""
    off: dict[int, tuple[weakref.ref[nn.Module], Site]] = field(default_factory=dict)
    """Id of a root → the root and its first forward in eval mode, where gradients are computed."""
    counts: dict[int, dict[nn.Module, int]] = field(default_factory=dict)
    """Id of a root → how many batches its frozen BatchNorms in train mode had counted before."""

    def note(self, root: nn.Module, site: Site) -> None:
        if model.inner(root).training:
            self.on.add(id(root))
        else:
            self.off.setdefault(id(root), (weakref.ref(root), site))

    def switched_off(self, held: Container[int]) -> tuple[list[str], nn.Module | None, Site]:
        """Return what is in eval mode of a root that was never in train mode, and is updated."""
        for key, (ref, site) in self.off.items():
            root = ref()
            if key not in self.on and root is not None and (names := _off(root, held)):
                return names, root, site
        return [], None, Site("")

    def count(self, root: nn.Module) -> None:
        """Note before a forward how many batches the frozen BatchNorms counted."""
        known = self.counts.setdefault(id(root), {})
        for _, norm in _frozen_norms(root):  # none in evaluations, which may come first
            known.setdefault(norm, _batches(norm))

    def moving(self, roots: Iterable[nn.Module]) -> list[str]:
        """Return the frozen BatchNorms whose running statistics moved since `count`."""
        return [
            model.own_name(name, root)
            for root in roots
            for name, norm in _frozen_norms(root)
            if _batches(norm) > self.counts.get(id(root), {}).get(norm, 2**62)
        ]


def _off(root: nn.Module, held: Container[int]) -> list[str]:
    """Dropout and BatchNorms in eval mode, of parts that are updated; empty if any is on."""
    every = {}
    for name, module, part in _with_parts(root):
        own = list(module.parameters()) or part.parameters()
        if _changes_with_mode(module) and any(p.requires_grad and id(p) in held for p in own):
            every[model.own_name(name, root)] = module
    return [] if any(module.training for module in every.values()) else list(every)


def _changes_with_mode(module: nn.Module) -> bool:
    if isinstance(module, BatchNorm):
        return module.running_mean is not None
    return model.is_dropout(module) or (isinstance(module, nn.RNNBase) and module.dropout > 0)


def _frozen_norms(root: nn.Module) -> Iterator[tuple[str, BatchNorm]]:
    """Yield BatchNorms in train mode that count batches, in parts without trainable parameters."""
    for name, module, part in _with_parts(root):
        if isinstance(module, BatchNorm) and module.training and module.momentum != 0:
            counts = module.num_batches_tracked is not None
            if counts and not any(p.requires_grad for p in part.parameters()):
                yield name, module


def _batches(norm: BatchNorm) -> int:
    return int(cast(Tensor, norm.num_batches_tracked))


def _with_parts(root: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Yield the modules that modes matter for, each with the smallest part around it.

    A part is a module with parameters; a BatchNorm's own are not enough.
    """
    modules = dict(root.named_modules())
    for name, module in modules.items():
        if not (isinstance(module, BatchNorm) or _changes_with_mode(module)):
            continue
        part, place = module, name
        while place and (part is module or next(part.parameters(), None) is None):
            place = place.rpartition(".")[0]
            part = modules[place]
        yield name, module, part
