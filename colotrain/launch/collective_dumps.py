"""Reads what torch's flight recorder wrote as NCCL's watchdog ended ranks: their last collectives.

The files are pickles of plain values; anything else in them is refused. Their fields are those that
`torch.distributed.flight_recorder` reads.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MOST_BYTES = 256 << 20


class _PlainValues(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise pickle.UnpicklingError(f"{module_name}.{global_name} is not a plain value")


def explain(prefix: Path, since: float) -> str:
    """Return which ranks kept the others waiting; empty if the dumps do not tell.

    Their paths are `prefix` and the rank; only those written after Unix time `since` count.
    """
    dumps = {rank: entries for rank, entries in _read(prefix, since).items() if entries}
    waiting = {rank: found for rank, entries in dumps.items() if (found := _waits_in(entries))}
    if not waiting:
        return ""
    free = sorted(dumps.keys() - waiting.keys())
    inside = _collectives(waiting)
    if free:
        return f"{_ranks(free)} had joined no further collective, {inside}"
    return inside if len({_key(entry) for entry in waiting.values()}) > 1 else ""


def _read(prefix: Path, since: float) -> dict[int, list[dict[str, Any]]]:
    """Return rank → its collectives, oldest first, of the dumps that can be read."""
    found = {}
    for path in prefix.parent.glob(f"{prefix.name}*"):
        rank = path.name.removeprefix(prefix.name)
        try:
            about = path.stat()
            if not rank.isdecimal() or about.st_mtime < since or about.st_size > MOST_BYTES:
                continue
            with path.open("rb") as file:
                entries = _PlainValues(file).load()["entries"]
            found[int(rank)] = [e for e in entries if not e.get("is_p2p")]
        except Exception:  # cut off, or of an unknown version
            continue
    return found


def _waits_in(entries: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the first collective that is not complete."""
    return next((entry for entry in entries if entry.get("state") != "completed"), None)


def _key(entry: Mapping[str, Any]) -> tuple[str, str, int]:
    group, number = str(entry["process_group"][0]), int(entry["collective_seq_id"])
    return group, _name(entry), number


def _name(entry: Mapping[str, Any]) -> str:
    return str(entry["profiling_name"]).rpartition(":")[2]


def _collectives(waiting: Mapping[int, Mapping[str, Any]]) -> str:
    """Describe who waits in what: `ranks 0, 1 waited in all_gather (number 812 of group 0)`."""
    by_key: dict[tuple[str, str, int], list[int]] = {}
    for rank in sorted(waiting):
        by_key.setdefault(_key(waiting[rank]), []).append(rank)
    return ", ".join(
        f"{_ranks(ranks)} waited in {name} (number {number} of group {group})"
        for (group, name, number), ranks in by_key.items()
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
