"""`colotrain node`: the command that a job starts on each node. People use `run` and `submit`."""

from __future__ import annotations

import os

from colotrain.config.checks import split_address
from colotrain.errors import UsageError
from colotrain.launch.forkserver import warm_up
from colotrain.launch.rendezvous import Node
from colotrain.rundir import RunDir
from colotrain.runs import trust
from colotrain.runs.start import train
from colotrain.spec.schedulers import DEFAULT, SCHEDULERS, job_here


def node(path: str, head: str, *, trust_code: bool = False) -> int:
    """Train this node's part of the run in `path`; the scheduler sets the node rank.

    A job's script sets `trust_code`, because the submitting user's home, which holds the signing
    key, may be missing on the nodes.
    """
    warm_up()
    rundir = RunDir(path)
    plan = rundir.plan()
    trust.check(rundir, plan, trusted=trust_code)
    variable = SCHEDULERS[job_here() or DEFAULT].node_rank
    number, where = os.environ.get(variable, "0"), split_address(head)
    if not number.isdigit():
        raise UsageError(f"{variable}={number}: expected a number", "start it with srun")
    if where is None:
        raise UsageError(f"--head {head}: expected HOST:PORT", "see job.sbatch")
    place = Node(rank=int(number), host=where[0], port=where[1])
    return train(plan, rundir, None, node=place, as_json=False)
