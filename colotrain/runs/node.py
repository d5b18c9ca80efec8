"""`colotrain node`: the command that a job starts on each node. People use `run` and `submit`."""

from __future__ import annotations

import os
import socket
import time

from colotrain.config.checks import split_address
from colotrain.errors import UsageError
from colotrain.launch.rendezvous import Node
from colotrain.launch.server.forkserver import warm_up
from colotrain.rundir import RunDir, read_json
from colotrain.runs import fetching, naming, trust
from colotrain.runs.start import train
from colotrain.show.console import tell
from colotrain.spec.exit_codes import DONE, LEFT
from colotrain.spec.schedulers import DEFAULT, SCHEDULERS, job_here

POLL_S = 1.0


def node(
    path: str,
    head: str,
    *,
    trust_code: bool = False,
    rank: str | None = None,
    carried: str | None = None,
) -> int:
    """Train this node's part of the run in `path`; the scheduler sets the node rank.

    A job's script sets `trust_code`, because the submitting user's home, which holds the signing
    key, may be missing on the nodes. `rank` is the node rank, unless a variable of the scheduler
    has it; `carried` is the folder of a plan and a configuration that the job brings along.
    """
    warm_up()
    rundir, source = RunDir(path), RunDir(carried or path)
    plan = source.plan()
    trust.check(rundir, plan, trusted=trust_code)
    variable = SCHEDULERS[job_here() or DEFAULT].node_rank
    name, number = variable, os.environ.get(variable, "0")
    if rank is not None:
        name, number = "--node-rank", rank
    where = split_address(head)
    if not number.isdecimal():
        raise UsageError(f"{name}={number}: expected a number", "see the job's script")
    if where is None:
        raise UsageError(f"--head {head}: expected HOST:PORT", "see the job's script")
    if int(number) == 0:
        fetching.fetch_to_resume(rundir, plan.runs_dir)
    if carried and naming.finished(rundir, plan):
        tell(f"{rundir.name} has finished")
        return 0
    place = Node(rank=int(number), host=where[0], port=where[1])
    if not place.is_head:
        wait_for_name(place.host, timeout_s=plan.elastic.hang_timeout_s)
    config = read_json(source.config_file, source.open) if carried else None
    exit_code = train(plan, rundir, config, node=place, as_json=False)
    # this host's part of the job is over, and has not failed
    return DONE if exit_code == LEFT else exit_code


def wait_for_name(host: str, *, timeout_s: float) -> None:
    """Wait until `host` has an address, at most `timeout_s`; a container has one once it begins."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            socket.getaddrinfo(host, None)
            return
        except socket.gaierror:
            time.sleep(POLL_S)
