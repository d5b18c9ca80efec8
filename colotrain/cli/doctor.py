"""`colotrain doctor`: checks of this machine, or of all nodes of a run, each with its fix."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from fnmatch import fnmatchcase

from colotrain.cache_folder import cache_folder
from colotrain.doctor import exchange, machine, network, nodes, storage
from colotrain.doctor.finding import Environment, Finding, fail
from colotrain.errors import ConfigError, UsageError, suggest
from colotrain.records import read
from colotrain.rundir import RUNS
from colotrain.show.console import print_json, stdout_console
from colotrain.spec.schedulers import DEFAULT, SCHEDULERS, is_on_every_node, job_here, job_id

Check = Callable[[Environment], Iterator[Finding]]
CHECKS: dict[str, Check] = {
    "torch": machine.check_torch,
    "memory": machine.check_memory,
    "cpu": machine.check_load,
    "limits": machine.check_limits,
    "shm": machine.check_shared_memory,
    "runs": storage.check_runs,
    "cache": storage.check_cache,
    "loopback": network.check_loopback,
    "name": network.check_name,
    "head": network.check_head,
    "environment": network.check_environment,
    "interconnect": network.check_interconnect,
    "slurm": network.check_slurm,
    "all-reduce": exchange.check_exchange,
}
STYLES = {"ok": "green", "warn": "yellow", "fail": "red"}
STEP_S = 600.0


def doctor(overrides: list[str], *, as_json: bool, all_nodes: bool, only: str) -> int:
    """Print the findings; return 1 if one of them would make a run fail."""
    chosen = list(_choose(only))
    env = read_environment(overrides)
    if all_nodes and job_here() and not is_on_every_node():
        return _on_each_node(overrides, as_json=as_json, only=only)
    if all_nodes and (env.head is None or env.nodes < 2):
        raise UsageError(
            "--all-nodes: which nodes?",
            "run it inside a SLURM allocation (salloc -N2), or on each node by hand with "
            "cluster.nodes=2 cluster.node_rank=0 cluster.rdzv_endpoint=HOST:PORT",
        )
    found = [finding for name in chosen for finding in _run(name, env)]
    by_host = {env.host: found}
    if all_nodes:
        by_host = nodes.check_nodes(env, found)
    show(by_host, as_json=as_json)
    worst = any(f.status == "fail" for host in by_host.values() for f in host)
    return 1 if worst else 0


def _choose(only: str) -> Iterator[str]:
    globs = [word.strip() for word in only.split(",") if word.strip()] or ["*"]
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name in CHECKS):
            raise UsageError(f"--only {glob}: no such check", suggest(glob, CHECKS))
    yield from (name for name in CHECKS if any(fnmatchcase(name, glob) for glob in globs))


def _run(name: str, env: Environment) -> Iterable[Finding]:
    try:
        return list(CHECKS[name](env))
    except Exception as error:  # a check that breaks must not hide the others
        text = f"the check itself failed: {type(error).__name__}: {error}"
        return [fail(name, text, "report it, with this line")]


def read_environment(overrides: list[str]) -> Environment:
    """Return a description of this machine, and of the other nodes from `cluster` settings."""
    from colotrain.config.checks import check_head, split_address
    from colotrain.config.schema_cluster import Cluster
    from colotrain.runs.resolving import compose

    config, problems = compose(overrides, notices=[])
    cluster = read(Cluster, config.get("cluster", {}), key="cluster", problems=problems)
    problems += check_head(cluster.rdzv_endpoint) if cluster else []
    if problems:
        raise ConfigError(problems)
    step = os.environ if is_on_every_node() else {}
    variables = SCHEDULERS[job_here() or DEFAULT]
    given, head = cluster.node_rank, cluster.rdzv_endpoint or step.get("COLOTRAIN_HEAD")
    return Environment(
        runs=RUNS.absolute(),
        cache=cache_folder(),
        head=split_address(head) if head else None,
        rank=int(step.get(variables.node_rank, "0")) if given is None else given,
        nodes=int(step.get(variables.num_nodes, cluster.nodes)),
    )


def _on_each_node(overrides: list[str], *, as_json: bool, only: str) -> int:
    """Run one doctor per node of the job's allocation; node 0 prints."""
    from colotrain.schedulers import registry
    from colotrain.schedulers.job import PORTS

    nodes = registry.SCHEDULERS[job_here() or DEFAULT].nodes
    assert nodes is not None
    port = PORTS[0] + int(job_id()) % PORTS[1]
    words = [sys.executable, "-m", "colotrain", "doctor", "--all-nodes", *overrides]
    words += ["--json"] if as_json else []
    words += ["--only", only] if only else []
    environment = {**os.environ, "COLOTRAIN_HEAD": f"{nodes.first_address()}:{port}"}
    return subprocess.run(nodes.on_every_node(words), env=environment, timeout=STEP_S).returncode


def show(by_host: dict[str, list[Finding]], *, as_json: bool) -> None:
    if as_json and by_host:
        rows = {host: [asdict(f) for f in found] for host, found in by_host.items()}
        print_json({"hosts": rows})
        return
    console = stdout_console()
    for host, found in by_host.items():
        if len(by_host) > 1:
            console.print(host, style="bold")
        for finding in found:
            line = f"{finding.status:<5} {finding.check}: {finding.text}"
            fix = f"; {finding.fix}" if finding.fix else ""
            console.print(f"{line}{fix}", style=STYLES[finding.status], soft_wrap=True)
