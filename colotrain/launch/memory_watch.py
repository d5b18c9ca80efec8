"""Ending a run before the kernel does: this host's free memory is watched while workers run.

The kernel's out-of-memory killer ends a process without a word, perhaps the launcher itself. Here
the run ends with the sizes that it had and what to change; its last checkpoint stays good.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from contextlib import suppress

import psutil

from colotrain import host
from colotrain.launch.watch import Watch
from colotrain.records import to_plain
from colotrain.show.formatting import format_bytes as format_size
from colotrain.spec.plan import RunPlan

RESERVE_SHARE, LEAST_RESERVE_BYTES, MOST_RESERVE_BYTES = 0.02, 64 << 20, 512 << 20
"""Free memory at which a run ends, as a share of what there is."""
OWN_SHARE = 0.25
"""A run that holds less of the memory than this is not what fills it, and is left alone."""
FASTEST_BYTES_PER_S = 8e9
"""Memory is not filled faster than this: pages are cleared first."""
SHORTEST_S, LONGEST_S = 0.02, 1.0
"""Between two looks."""
MOST_CATEGORIES = 4


class MemoryWatch(threading.Thread):
    """Looks at the free memory, the more often the less there is, until `close`."""

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
    """Memory of a process; what it shares with others counts as its part (PSS)."""
    with suppress(psutil.Error, AttributeError):
        return int(psutil.Process(pid).memory_full_info().pss)
    return 0


def describe(plan: RunPlan, held: Iterable[int], *, free: int, whole: int) -> str:
    """Why a run was ended: what was left, what its ranks held, and what to change."""
    sizes = ", ".join(format_size(n) for n in held)
    categories = sorted(to_plain(plan.memory).items(), key=lambda item: -item[1])
    parts = ", ".join(f"{name} {format_size(n)}" for name, n in categories[:MOST_CATEGORIES] if n)
    planned = f"{format_size(plan.peak.low)} to {format_size(plan.peak.high)} each"
    return (
        f"memory ran short, so the run was ended before the kernel did it: {format_size(free)} of "
        f"{format_size(whole)} were left, and the ranks held {sizes} (planned: {planned}, of it "
        f"{parts}); {' or '.join(changes(plan))}, or end other programs"
    )


def changes(plan: RunPlan) -> list[str]:
    """Settings with which the same run needs less memory."""
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
