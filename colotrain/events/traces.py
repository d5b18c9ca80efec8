"""Where the time of traced steps went, from a trace in Chrome's format."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from colotrain.rundir import Opener, regular

PREFIX = "colotrain::"
"""Beginning of the names of colotrain's spans; torch's own have others."""
OF_BLOCKS = ("forward", "backward", "gather", "reduce")
"""Parts that are told by block or group, whose name follows the part's."""
NAME = re.compile(r"(steps-\d+-\d+)-rank(\d{1,9})\.json\.gz")
"""Name of a trace: its window of steps, and its rank."""
MOST_UNPACKED, MOST_VALUES = 512 << 20, 32_000_000
"""Bytes and JSON values of a trace, which take at most some 3 GiB of memory."""
INVALID = (
    *(OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, IndexError),
    *(AttributeError, OverflowError, RecursionError, MemoryError),
)
"""Errors of a file that is no trace."""
ORDER = ("data", "forward", "backward", "gather", "reduce", "wait", "update", "record")
"""Parts of a step in the order in which they are shown; others come after them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Mean seconds per traced step of one rank."""

    steps: tuple[int, ...]
    step_s: float
    parts: dict[str, float]
    """Part → its own seconds, without those of parts inside it; they sum up to `step_s`."""
    blocks: dict[str, dict[str, float]] = field(default_factory=dict)
    """Block or group → part (forward, backward, gather, reduce) → seconds."""
    device_s: float | None = None
    """Seconds in which a GPU computed or copied; None on CPUs."""


def read_trace(path: Path, opener: Opener = regular) -> dict[str, Any]:
    """Return the document in a packed file; raises one of `INVALID` where there is none."""
    with open(path, "rb", opener=opener) as packed, gzip.GzipFile(fileobj=packed) as file:
        text = file.read(MOST_UNPACKED + 1)
    if len(text) > MOST_UNPACKED:
        raise ValueError(f"it has more than {MOST_UNPACKED >> 20} MiB")
    if sum(map(text.count, (b",", b"[", b"{"))) > MOST_VALUES:
        raise ValueError(f"it has more than {MOST_VALUES:,} values")
    document: dict[str, Any] = json.loads(text)
    return document


def break_down(trace: dict[str, Any]) -> Breakdown:
    """Divide the traced steps among colotrain's spans; raises one of `INVALID` without any.

    Spans of several threads are nested by their times: while one thread runs backward, the thread
    that began it waits.
    """
    events = [e for e in trace.get("traceEvents", ()) if e.get("ph") == "X"]
    spans = [
        (float(e["ts"]), float(e["dur"]), str(e["name"]).removeprefix(PREFIX))
        for e in events
        if e.get("cat") == "user_annotation" and str(e.get("name", "")).startswith(PREFIX)
    ]
    spans.sort(key=lambda span: (span[0], -span[1]))
    steps = [int(name.split()[1]) for _, _, name in spans if name.startswith("step ")]
    if not steps:
        raise ValueError("it has no steps of colotrain's")
    own = _own_times(spans)
    parts: dict[str, float] = defaultdict(float)
    blocks: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    each = 1e-6 / len(steps)
    for name, microseconds in own.items():
        part, _, block = name.partition(" ")
        if part not in OF_BLOCKS:
            part, block = "other" if part == "step" else name, ""
        parts[part] += microseconds * each
        if block and block != "root":
            blocks[block][part] += microseconds * each
    rank = {name: index for index, name in enumerate(ORDER)}
    ordered = sorted(parts, key=lambda name: (name == "other", rank.get(name, len(rank)), name))
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    return Breakdown(
        steps=tuple(steps),
        step_s=sum(parts.values()),
        parts={name: parts[name] for name in ordered},
        blocks={name: dict(found) for name, found in blocks.items()},
        device_s=_covered(kernels) * each if kernels else None,
    )


def _own_times(spans: list[tuple[float, float, str]]) -> dict[str, float]:
    """Return name → microseconds within such spans and within no span inside them."""
    own: dict[str, float] = defaultdict(float)
    above: list[tuple[float, str]] = []
    """End and name of the spans that are open, the outermost first."""
    for start, duration, name in spans:
        while above and above[-1][0] <= start:
            above.pop()
        if not above and not name.startswith("step "):
            continue  # between two steps
        end = start + duration
        if above:
            end = min(end, above[-1][0])
            own[above[-1][1]] -= end - start
        own[name] += end - start
        above.append((end, name))
    return own


def _covered(events: list[dict[str, Any]]) -> float:
    """Return the microseconds in which at least one of the events ran."""
    total, until = 0.0, float("-inf")
    for start, end in sorted((float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in events):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
