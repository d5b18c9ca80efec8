"""Variables that a batch system sets in a job's processes, and that colotrain's own jobs set."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class JobVariables:
    """Environment variables that a scheduler sets in the processes of a job."""

    label: str
    """Name of the scheduler in messages."""
    job: str
    """Variable with the job's id."""
    step: str
    """Variable that is set in the processes that the scheduler starts on every node alone."""
    node_rank: str
    num_nodes: str


SCHEDULERS = {
    "slurm": JobVariables(
        label="SLURM",
        job="SLURM_JOB_ID",
        step="SLURM_STEP_ID",
        node_rank="SLURM_NODEID",
        num_nodes="SLURM_NNODES",
    ),
}
"""Value of `cluster.scheduler` → variables, of schedulers inside whose jobs commands are run."""
JOB = "COLOTRAIN_JOB"
"""Variable with the job's id, in the jobs of all other schedulers."""
DEFAULT = "slurm"
"""Scheduler of `colotrain submit` where the configuration names none."""


def job_here() -> str | None:
    """Return the scheduler of the job that this process belongs to; None outside of jobs."""
    return next((name for name, its in SCHEDULERS.items() if its.job in os.environ), None)


def job_id() -> str:
    """Return the id of the job that this process belongs to; "" outside of jobs."""
    name = job_here()
    return os.environ.get(SCHEDULERS[name].job if name else JOB, "")


def is_on_every_node() -> bool:
    """Whether the job's scheduler has started this process on every node."""
    name = job_here()
    return name is not None and SCHEDULERS[name].step in os.environ
