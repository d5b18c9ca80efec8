"""The plan's settings of recovery: restarts, nodes that join and leave, copies in memory."""

from __future__ import annotations

from dataclasses import dataclass, field

MEMORY_FILES = "COLOTRAIN_MEMORY_FILES"
"""Environment variable of a worker: paths of its two files in its launcher's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCopyPlan:
    """Two copies of each rank's state in its launcher's memory, from which workers restart."""

    enabled: bool = False
    bytes: int = 0
    """Bytes of one rank's two copies, whether they are made or not."""
    share: float = 0.0
    """Largest share of the time that copying may take; 0: every step is copied."""
    reason: str = ""
    """Why there are copies, or why there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticPlan:
    max_restarts: int
    hang_timeout_s: float
    grace_s: float = 300.0
    check_every: int = 0
    """Steps between checks for silent data corruption; 0: never."""
    min_nodes: int = 1
    max_nodes: int = 1
    """Most nodes; where it or `min_nodes` is not `cluster.nodes`, nodes may join and leave."""
    memory_copy: MemoryCopyPlan = field(default_factory=MemoryCopyPlan)
