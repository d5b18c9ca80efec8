"""The event of a node without which a run goes on, because it held the others up."""

from __future__ import annotations

from colotrain.events.event import EventKind, event_kind


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
