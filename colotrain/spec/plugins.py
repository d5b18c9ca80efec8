"""The plugins: one engine, one row of settings each. A new plugin is a new row."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

ParametersLive = Literal["step", "use"]
Gradients = Literal["whole", "sharded"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What a sharding strategy decides; everything else is the same for all of them."""

    summary: str
    """One line for people."""
    parameters_live: ParametersLive
    """Whole parameters live through a `step`, or group by group around their `use`."""
    gradients: Gradients
    """While accumulating: `whole` (reduced once a step) or `sharded` (every micro-batch)."""
    hybrid: bool = False
    """Shard inside a node and replicate between nodes, instead of sharding over all ranks."""
    packed: bool = False
    """Pack modules into groups of `plugin.chunk_size`."""


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
"""`plugin=auto` chooses among these; where it knows no times, it takes the first that fits."""


def expand(module: str) -> list[str]:
    """`blocks.0-3` as the four names it stands for; any other glob as itself."""
    found = re.fullmatch(r"(.+\.)?(\d+)-(\d+)", module)
    if not found:
        return [module]
    return [f"{found[1] or ''}{index}" for index in range(int(found[2]), int(found[3]) + 1)]
