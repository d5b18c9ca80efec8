"""The plan's settings of recovery: restarts, nodes that join and leave, copies in memory."""

from __future__ import annotations

from dataclasses import dataclass, field

COPIES = 2
"""Files in a launcher's memory for the copies of each of its ranks."""
COPY_EXTRA_BYTES = 1 << 20
"""Bytes of a copy beside the model's state: generators, and the description."""
COPY_PLACES = "COLOTRAIN_COPY_PLACES"
"""Environment variable of a worker: its `CopyPlaces`, as JSON."""
ROUND_KEY = "COLOTRAIN_ROUND_KEY"
"""Environment variable of a worker: the secret of its round, another one in each attempt."""
COPY_SERVICE = "copies"
"""Name of the service that launchers are which keep copies (`connections`)."""
COPY_STALL_S = 30.0
"""Seconds without progress after which a copy is no longer sent to another node, or read there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPlaces:
    """Where a rank finds the copies of an earlier attempt, and where it sends its own.

    Addresses are HOST:PORT of a launcher's `CopyKeeper`.
    """

    launcher: int
    """Process id of the rank's launcher."""
    files: tuple[int, ...] = ()
    """Handles of the files in that process's memory which may hold copies.

    The first ones are those of its own ranks, `COPIES` of each.
    """
    own: str = ""
    """Address of that launcher; empty in a run that is on one node for good."""
    buddy: str = ""
    """Address of the launcher that keeps this node's copies, too; empty where there is none."""
    secret: str = ""

    def path(self, handle: int) -> str:
        return f"/proc/{self.launcher}/fd/{handle}"

    def own_files(self, local_rank: int) -> tuple[int, ...]:
        """Return the files in which a rank of that launcher keeps its copies."""
        first = COPIES * local_rank
        return self.files[first : first + COPIES]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCopyPlan:
    """Two copies of each rank's state in its launcher's memory, from which workers restart."""

    enabled: bool = False
    bytes: int = 0
    """Bytes for each rank of a node, whether copies are made or not: two copies, and with several
    nodes two of a rank of another one."""
    share: float = 0.0
    """Largest share of the time that copying may take; 0: every step is copied."""
    reason: str = ""
    """Why there are copies, or why there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """Recovery from failures of ranks and nodes."""

    max_restarts: int = 3
    """Restarts of the workers before the run fails; 0: none."""
    spare_nodes: int = 0
    """Nodes beside `elastic.max_nodes` that wait for the place of one that is lost or left."""
    replace_slow: bool = False
    """Whether the run leaves a node whose rank holds the others up for long, from a cause that lies
    in the machine, at most `elastic.max_restarts` times: a spare node takes its place, or the run
    goes on with fewer (`elastic.min_nodes`)."""
    replace_slow_after_s: float = 600.0
    """Seconds for which a rank must hold the others up before its node is left."""
    hang_timeout_s: float = 600.0
    """Seconds without a heartbeat from a rank after which the run is restarted; until the end of
    the first step at least 600 (1800 with `train.compile`)."""
    grace_s: float = 300.0
    """Seconds from a stop request until the run is ended, saved or not; and that its end waits for
    the store (`runs_dir`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticPlan(Recovery):
    """The section, with the numbers that it leaves open."""

    check_every: int = 0
    """Steps between checks for silent data corruption; 0: never."""
    min_nodes: int = 1
    max_nodes: int = 1
    """Most nodes; where it or `min_nodes` is not `cluster.nodes`, nodes may join and leave."""
    memory_copy: MemoryCopyPlan = field(default_factory=MemoryCopyPlan)

    @property
    def launchers(self) -> int:
        """Most nodes whose launchers may be there at once, spare ones included."""
        return self.max_nodes + self.spare_nodes
