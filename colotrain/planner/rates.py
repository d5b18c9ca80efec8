"""Measured speed of this machine, stored in the cache folder.

A measurement holds for one host, number of cores, version of torch, number of ranks on the host
and precision. Standard library only.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from colotrain import cache_folder
from colotrain.errors import ConfigError
from colotrain.planner.hardware import Costs, Hardware, typical_cpu
from colotrain.records import from_plain, to_plain

VERSION = 11
"""Version of the cases and their evaluation; measurements of other versions are ignored."""

SHAPES: Sequence[tuple[str, dict[str, int], dict[str, int]]] = (
    ("zero1", {"d_model": 64, "num_layers": 4}, {"seq_len": 32, "micro_batch": 1}),
    ("zero3", {"d_model": 64, "num_layers": 8}, {"seq_len": 32, "micro_batch": 1}),
    ("zero1", {"d_model": 320, "num_layers": 3}, {"seq_len": 160, "micro_batch": 3}),
    ("zero1", {"d_model": 128, "num_layers": 3}, {"seq_len": 512, "micro_batch": 1}),
    ("zero1", {"d_model": 128, "num_layers": 3}, {"seq_len": 64, "micro_batch": 12}),
    ("zero3", {"d_model": 768, "num_layers": 2}, {"seq_len": 16, "micro_batch": 1}),
    ("zero1", {"d_model": 768, "num_layers": 2}, {"seq_len": 48, "micro_batch": 1}),
    ("zero3", {"d_model": 320, "num_layers": 4}, {"seq_len": 96, "micro_batch": 1}),
    ("zero1", {"d_model": 64, "num_layers": 6}, {"seq_len": 48, "micro_batch": 1}),
)
"""Models whose steps are timed: plugin, model, data. They differ in their shares of operations,
collectives, attention, elementwise work, bytes and matmuls, so that the cost of each can be fitted.
The last one checkpoints its blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Measured costs of one rank while all ranks work."""

    costs: Costs
    peak_flops: float
    """Best measured rate of a matmul, in FLOP/s."""
    errors: tuple[float, ...] = field(default=())
    """Error of the fitted costs for each timed case, as a share of its time."""


def overrides(index: int, *, ranks: int, precision: str) -> list[str]:
    """Command-line overrides for case `index`; the model's head size is 64."""
    plugin, model, data = SHAPES[index]
    width = model["d_model"]
    hidden = 64 * round(width * 8 / 3 / 64)
    words = {
        "recipe": "llm-tiny",
        "plugin": plugin,
        "model.args.vocab_size": 320,
        "model.args.d_model": width,
        "model.args.num_layers": model["num_layers"],
        "model.args.num_heads": width // 64,
        "model.args.d_hidden": hidden,
        "data.seq_len": data["seq_len"],
        "train.micro_batch": data["micro_batch"],
        "train.global_batch": "null",
        "train.precision": precision,
        "train.activation_checkpointing": "full" if index == len(SHAPES) - 1 else "none",
        "accumulate.steps": 1,
        "cluster.device": "cpu",
        "cluster.procs_per_node": ranks,
        "cluster.memory": "1TiB",
    }
    return [f"{key}={value}" for key, value in words.items()]


def hardware_of(found: Measurement) -> Hardware:
    return Hardware(
        name="this machine", costs=found.costs, peak_flops=found.peak_flops, overlaps=False
    )


def known(*, cores: int, ranks: int, precision: str) -> Measurement | None:
    """The stored measurement of this machine, or None."""
    try:
        return from_plain(Measurement, cache_folder.read("rates", _file(cores, ranks, precision)))
    except (OSError, ValueError, ConfigError):
        return None


def remember(found: Measurement, *, cores: int, ranks: int, precision: str) -> None:
    text = json.dumps(to_plain(found), indent=1)
    cache_folder.write("rates", _file(cores, ranks, precision), text)


def _file(cores: int, ranks: int, precision: str) -> str:
    about: list[Any] = [VERSION, platform.node(), cores, metadata.version("torch")]
    digest = hashlib.sha256(json.dumps([*about, ranks, precision]).encode()).hexdigest()[:16]
    return f"{digest}.json"


def guess(*, threads: int, precision: str) -> dict[str, float]:
    """Typical costs, from which the fit starts."""
    return dataclasses.asdict(typical_cpu(threads=threads, precision=precision).costs)
