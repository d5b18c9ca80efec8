"""The plugins: one row of settings each for the same engine. A new plugin is a new row."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, Protocol

ParametersLive = Literal["step", "use"]
Gradients = Literal["whole", "sharded"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Settings of a sharding strategy; everything else is the same for all of them."""

    summary: str
    """One line that describes the plugin to users."""
    parameters_live: ParametersLive
    """Unsharded parameters live through a `step`, or group by group around their `use`."""
    gradients: Gradients
    """Gradients kept while accumulating: `whole` (reduced once a step) or `sharded`."""
    hybrid: bool = False
    """Whether to shard inside a node and replicate between nodes, not shard over all ranks."""
    packed: bool = False
    """Whether modules are packed into groups of `plugin.chunk_size`."""


ROWS: dict[str, Row] = {
    "zero1": Row(
        summary="shards optimizer state; gradients are reduced once a step",
        parameters_live="step",
        gradients="whole",
    ),
    "zero2": Row(
        summary="shards optimizer state and gradients",
        parameters_live="step",
        gradients="sharded",
    ),
    "zero3": Row(
        summary="shards parameters too; each group is gathered around its use",
        parameters_live="use",
        gradients="sharded",
    ),
    "fsdp-hybrid": Row(
        summary="zero3 inside a node, replicated between nodes",
        parameters_live="use",
        gradients="sharded",
        hybrid=True,
    ),
    "gemini": Row(
        summary="zero3 over packed groups, placed by memory budget",
        parameters_live="use",
        gradients="sharded",
        packed=True,
    ),
}

AUTO_ORDER = ("zero1", "zero2", "fsdp-hybrid", "zero3", "gemini")
"""Candidates of `plugin=auto`; without predicted times it takes the first that fits."""


class Lifetimes(Protocol):
    """How long unsharded parameters live: in a plan, or in the planner's layout."""

    @property
    def parameters_live(self) -> ParametersLive: ...
    @property
    def reshard_overrides(self) -> Mapping[str, bool]: ...


def stays_gathered(group: str, plugin: Lifetimes) -> bool:
    """Whether a group's parameters stay whole from a step's first forward to its last backward.

    `group` is its first module's name; the root group (empty name) has no overrides.
    """
    for pattern, reshard in plugin.reshard_overrides.items():
        if overrides(pattern, group):
            return not reshard
    return plugin.parameters_live == "step"


def overrides(pattern: str, group: str) -> bool:
    """Whether a key of `plugin.overrides` names the group's module or a module around it."""
    parts = group.split(".") if group else []
    around = [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
    return any(fnmatchcase(name, glob) for name in around for glob in _expand(pattern))


def _expand(pattern: str) -> Iterator[str]:
    """Yield the four names that `blocks.0-3` stands for; any other glob as it is."""
    found = re.fullmatch(r"(.+\.)?(\d+)-(\d+)", pattern)
    if not found:
        yield pattern
        return
    yield from (f"{found[1] or ''}{index}" for index in range(int(found[2]), int(found[3]) + 1))
