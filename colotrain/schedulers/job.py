"""Jobs of any batch system: what one is, what its run's folder records, and its states."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from colotrain.records import from_plain
from colotrain.spec.schedulers import DEFAULT

T = TypeVar("T")

PORTS = (20000, 10000)
"""First port and number of ports of node 0; all are below 32768, where ephemeral ports begin."""
OVER = (
    *("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL"),
    *("PREEMPTED", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY"),
)
"""States of jobs that have ended. They are SLURM's; other schedulers' are translated to them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Content of a job: one run, or the elements of a sweep as a job array."""

    name: str
    nodes: int
    runs: tuple[str, ...]
    """Absolute run directories: one, or one per element of the array."""
    logs: str
    """Absolute folder of the job's own log, `job-ID.log`."""
    cwd: str
    """Working directory of the command, from which the plan's modules are imported."""
    python: str
    """Python interpreter on the nodes."""
    owner: str = ""
    """User and host that submit the job."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Local path → text of the plan and the configuration, for nodes that do not see the folder."""
    is_array: bool = False
    max_parallel: int | None = None
    """Maximum number of array elements that run at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """A run's job, as its folder records it."""

    job: str
    """`123`, or `123_4` for an element of an array."""
    script: str
    """Path of the job's script, in the folder of the run or of its sweep."""
    sweep: str | None = None
    scheduler: str = DEFAULT
    settings: dict[str, Any] = field(default_factory=dict)
    """The scheduler's section of the configuration with which it was submitted."""

    def section(self, kind: type[T]) -> T:
        """Return the settings as a record."""
        return from_plain(kind, self.settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """State of a job according to its scheduler."""

    state: str
    """PENDING, RUNNING, … in capitals."""
    reason: str = ""
    asked: str = ""
    """Name of the command that answered."""


@dataclass(slots=True)
class Answers:
    """States by job, and the error of a command that failed."""

    states: dict[str, JobState] = field(default_factory=dict)
    trouble: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeKind:
    """Identical nodes of a partition."""

    num_nodes: int
    num_cores: int
    """Physical cores of a node."""
    memory_bytes: int
    """Host memory of a node."""
    gpu_type: str = ""
    """The scheduler's name of the GPU type; empty if the site gives its GPUs no type."""
    num_gpus: int = 0
