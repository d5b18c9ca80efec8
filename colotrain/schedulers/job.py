"""Jobs of any batch system: what one is, what its run's folder records, and its states."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from colotrain.errors import ConfigError
from colotrain.records import from_plain, to_plain
from colotrain.rundir import RunDir, write_atomically
from colotrain.spec.schedulers import DEFAULT

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
    is_array: bool = False
    max_parallel: int | None = None
    """Maximum number of array elements that run at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    """A run's job, as its folder records it."""

    job: str
    """`123`, or `123_4` for an element of an array."""
    script: str
    sweep: str | None = None
    scheduler: str = DEFAULT


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


def remember(rundir: RunDir, submitted: Submitted) -> None:
    write_atomically(rundir.job_file, json.dumps(to_plain(submitted), indent=2) + "\n")


def recall(rundir: RunDir) -> Submitted | None:
    """Return the run's job; None if it has none, or its file cannot be read."""
    try:
        return from_plain(Submitted, json.loads(rundir.job_file.read_text("utf-8")))
    except (OSError, ValueError, RecursionError, ConfigError):
        return None


def job_log(rundir: RunDir) -> Path | None:
    """Return the log of the run's job; a requeued job appends to it."""
    known = recall(rundir)
    if known is None:
        return None
    return RunDir(Path(known.script).parent).logs / f"job-{known.job}.log"
