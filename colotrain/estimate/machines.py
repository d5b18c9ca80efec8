"""What machines were measured to do, kept under the cache folder. Standard library only."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from colotrain.data.cache import cache_folder
from colotrain.errors import ConfigError
from colotrain.estimate.hardware import Costs, Hardware
from colotrain.records import from_plain, to_plain
from colotrain.rundir import write_atomically

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What one of `ranks` ranks does that run on a machine at once, each with `threads`."""

    ranks: int
    threads: int
    costs: Costs
    peak_flops: float
    """Of matrix products in fp32; one rank's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """All measurements of a machine."""

    schema: int = SCHEMA
    cpu: str
    measurements: tuple[Measurement, ...]


def recall(ranks: int, threads: int, precision: str) -> Hardware | None:
    """This machine's hardware for so many ranks, or None where it was not measured.

    Of other numbers of ranks than were measured, the nearest one is taken; ranks that share cores
    take turns on them.
    """
    probe = load()
    if probe is None or precision != "fp32":
        return None
    near = min(probe.measurements, key=lambda m: abs(m.ranks - ranks))
    crowd = max(1.0, ranks / near.ranks * threads / near.threads) if ranks > near.ranks else 1.0
    costs = near.costs
    if crowd > 1.0:
        values = {name: value * crowd for name, value in to_plain(costs).items()}
        costs = Costs(**values)
    return Hardware(
        name=probe.cpu,
        costs=costs,
        peak_flops=near.peak_flops / crowd,
        overlaps=False,
        measured=True,
    )


def load() -> Probe | None:
    try:
        return from_plain(Probe, json.loads(_file().read_text("utf-8")))
    except (OSError, ValueError, ConfigError):
        return None


def store(probe: Probe) -> Path:
    file = _file()
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(file, json.dumps(to_plain(probe), indent=1))
    return file


def _file() -> Path:
    """One for each kind of CPU, number of cores and torch."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    text = f"{SCHEMA} {cpu_model()} {cores} {metadata.version('torch')}"
    return cache_folder() / "machines" / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
