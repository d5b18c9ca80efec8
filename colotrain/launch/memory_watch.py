"""Watches this host's free memory and ends the run before the kernel kills a process.

The kernel's out-of-memory killer gives no reason and may end the launcher itself. Here the run ends
with a message about its sizes and what to change; its last checkpoint stays intact.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import suppress

import psutil

from colotrain import host
from colotrain.launch.watch import Watch
from colotrain.records import to_plain
from colotrain.spec.plan import RunPlan
from colotrain.spec.quantities import short_size

RESERVE_SHARE, LEAST_RESERVE_BYTES, MOST_RESERVE_BYTES = 0.02, 64 << 20, 512 << 20
"""Free bytes below which a run is ended: a share of all memory, within these two limits."""
OWN_SHARE = 0.25
"""Share of the host's memory below which a run is not the cause of the shortage and not ended."""
FASTEST_BYTES_PER_S = 8e9
"""Upper bound on how fast memory fills: the kernel clears each page first."""
SHORTEST_S, LONGEST_S = 0.02, 1.0
"""Limits of the seconds between two checks."""
MOST_CATEGORIES = 4


class MemoryWatch(threading.Thread):
    """Checks the free memory until `close`, more often when less is free."""

    def __init__(self, plan: RunPlan, watch: Watch) -> None:
        super().__init__(name="memory-watch", daemon=True)
        self.plan, self.watch = plan, watch
        self.whole = host.memory_bytes()
        share = int(RESERVE_SHARE * self.whole)
        self.reserve = min(max(share, LEAST_RESERVE_BYTES), MOST_RESERVE_BYTES)
        self.closed = threading.Event()

    def run(self) -> None:
        pause = SHORTEST_S
        while not self.closed.wait(pause):
            free = host.free_bytes() + psutil.swap_memory().free
            pause = min(max((free - self.reserve) / FASTEST_BYTES_PER_S, SHORTEST_S), LONGEST_S)
            if free >= self.reserve or self.watch.verdict is not None:
                continue
            pids = list(self.watch.pids().values())
            held = [held_bytes(pid) for pid in pids]
            if sum(held) < OWN_SHARE * self.whole:
                pause = LONGEST_S
                continue
            self.watch.end_all(describe(self.plan, held, free=free, whole=self.whole))

    def close(self) -> None:
        self.closed.set()
        self.join()


def held_bytes(pid: int) -> int:
    """Return the memory of a process; pages shared with others count in part (PSS)."""
    with suppress(psutil.Error, AttributeError):
        return int(psutil.Process(pid).memory_full_info().pss)
    return 0


def describe(plan: RunPlan, held: Iterable[int], *, free: int, whole: int) -> str:
    """Return why a run was ended: free memory, the ranks' sizes, and what to change."""
    sizes = ", ".join(short_size(n) for n in held)
    categories = sorted(to_plain(plan.memory).items(), key=lambda item: -item[1])
    parts = ", ".join(f"{name} {short_size(n)}" for name, n in categories[:MOST_CATEGORIES] if n)
    planned = f"{short_size(plan.peak.low)} to {short_size(plan.peak.high)} each"
    return (
        f"memory ran short, so the run was ended before the kernel did it: {short_size(free)} of "
        f"{short_size(whole)} were left, and the ranks held {sizes} (planned: {planned}, of it "
        f"{parts}); {' or '.join(changes(plan))}, or end other programs"
    )


def changes(plan: RunPlan) -> list[str]:
    """Return settings that reduce the memory of the same run."""
    found = []
    if plan.batch.micro_batch > 1:
        found.append("set train.micro_batch=1")
    if plan.train.activation_checkpointing != "full":
        found.append("set train.activation_checkpointing=full")
    if plan.plugin.chunk_bytes is None:
        found.append("take plugin=gemini, which can use the disk")
    elif plan.plugin.budget is None or plan.plugin.budget.disk_path is None:
        found.append("name a folder on a local disk in plugin.disk_path")
    return found or ["use a smaller model or shorter samples"]
