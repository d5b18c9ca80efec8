"""Events about the machines of a run: what a rank lacks there, and nodes that were left."""

from __future__ import annotations

from colotrain.events.event import EventKind, event_kind


@event_kind("pressure")
class Pressure(EventKind):
    """What a rank lacked since its last event of this kind, by the kernel's counts."""

    step: int
    waiting_threads: float | None
    """Mean number of the rank's threads that were ready to run and had no core."""
    major_faults_per_s: float
    """Page faults per second for which the kernel read from a disk or from swap."""
    nice: int
    """The scheduler's priority of the process: above 0, others go first."""
    held_back: float | None = None
    """Mean number of CPUs that the quota of the process's control group held back; None where there
    is no quota."""
    clock_mhz: float | None = None
    """Clock of the CPU on which the rank ran last; None where the kernel does not tell."""


@event_kind("node_left")
class NodeLeft(EventKind):
    """The run goes on without a node whose rank held the others up."""

    node: int
    host: str
    rank: int
    """Rank that held the others up."""
    cause: str
    """How slow the rank was, and why as far as that is known."""
    seconds: float
    """Seconds for which it had held them up."""
    step: int
    """Steps that the rank had done."""
    successor: int | None = None
    """Spare node that takes the place; None where the run goes on with fewer."""
    nodes: int
    """Nodes with which the run goes on."""

    def __str__(self) -> str:
        """Return text like `node 1 (host-b) was left after step 40: rank 2 …`."""
        what = f"node {self.node} ({self.host}) was left after step {self.step}"
        return f"{what}: rank {self.rank} held the others up, {self.cause}"
