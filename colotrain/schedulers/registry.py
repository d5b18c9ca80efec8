"""The schedulers that `colotrain submit` knows: a row each.

A new one is a module with its settings and the functions of `Commands`, a row in `SCHEDULERS`, a
line for its section in the schema of `cluster`, a file in conf/cluster, and a section of the docs.
Every section of settings has the keys gpus_per_node, cpus_per_task and python; those of schedulers
whose nodes see the run's folder have container and snapshot, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from colotrain import signatures
from colotrain.errors import ConfigError, Problem
from colotrain.records import from_plain, to_plain
from colotrain.rundir import RunDir, read_json, run_name
from colotrain.schedulers import (
    dstack,
    elsewhere,
    hosts,
    kubernetes,
    skypilot,
    slurm,
    slurm_queue,
    slurm_settings,
)
from colotrain.schedulers.job import Answers, Job, NodeKind, Submitted
from colotrain.spec.schedulers import DEFAULT


class Commands(Protocol):
    """Commands of a scheduler: the functions of a module."""

    def test(self, script: str, settings: Any, /) -> str:
        """Return what it says about a job without submitting it; `UsageError` if refused."""
        ...

    def submit(self, script_file: str, settings: Any, /) -> str:
        """Submit a script; return the job's id."""
        ...

    def cancel(self, job: Submitted, /) -> None:
        """Remove a job from the queue, or end it."""
        ...

    def ask(self, jobs: Sequence[Submitted], /) -> Answers: ...

    def log_command(self, job: Submitted, /, *, lines: int, follow: bool) -> list[str] | None:
        """Return the command that prints the job's output; None if the run's folder has it."""
        ...

    def asked_gpus(self, settings: Any, /) -> tuple[str, int]:
        """Return type and number per node of the GPUs that the settings request; or `("", 0)`."""
        ...


class Nodes(Protocol):
    """What a scheduler can tell of its nodes, inside its jobs and before them."""

    def node_kinds(self, partition: str | None = None) -> list[NodeKind]: ...

    def gives_gpus(self, settings: Any, /) -> bool:
        """Whether other settings than those of `asked_gpus` give the job GPUs."""
        ...

    def on_every_node(self, words: list[str]) -> list[str]:
        """Return the command that runs `words` once on each node of this job."""
        ...

    def first_address(self) -> str:
        """Return an address of this job's first node."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduler:
    """A scheduler."""

    name: str
    """Name of its section of `cluster`."""
    label: str
    """Name in messages."""
    settings: type[Any]
    """Dataclass of its section."""
    check: Callable[[Any], Iterator[Problem]]
    """Yields settings that cannot be meant."""
    render: Callable[[Job, Any], str]
    """Returns the text of a job's script, from the job and its settings."""
    job_id: str
    """Pattern of the ids of its jobs."""
    ending: str
    """Ending of the script's name."""
    commands: Commands
    nodes: Nodes | None = None
    is_elsewhere: bool = False
    """Whether its nodes do not see the folder from which a run is submitted."""
    passes_environment: bool = False
    """Whether its jobs have the environment in which they are submitted."""
    has_arrays: bool = False
    """Whether a job can be an array."""

    def section(self, config: dict[str, Any]) -> Any:
        """Return its settings in a configuration."""
        return from_plain(self.settings, config["cluster"][self.name])


def _elsewhere(name: str, settings: type[Any], module: Any) -> Scheduler:
    return Scheduler(
        name=name,
        label=module.LABEL,
        settings=settings,
        check=module.check,
        render=module.render,
        job_id=elsewhere.JOB_ID,
        ending="yaml",
        commands=module,
        is_elsewhere=True,
    )


SCHEDULERS = {
    "slurm": Scheduler(
        name="slurm",
        label=slurm_queue.LABEL,
        settings=slurm_settings.Slurm,
        check=slurm_settings.check_slurm,
        render=slurm.render,
        job_id=slurm_queue.JOB_ID,
        ending="sbatch",
        commands=slurm_queue,
        nodes=slurm_queue,
        passes_environment=True,
        has_arrays=True,
    ),
    "kubernetes": _elsewhere("kubernetes", kubernetes.Kubernetes, kubernetes),
    "skypilot": _elsewhere("skypilot", skypilot.SkyPilot, skypilot),
    "dstack": _elsewhere("dstack", dstack.Dstack, dstack),
    "hosts": Scheduler(
        name="hosts",
        label=hosts.LABEL,
        settings=hosts.Hosts,
        check=hosts.check,
        render=hosts.render,
        job_id=hosts.JOB_ID,
        ending="sh",
        commands=hosts,
    ),
}


def scheduler_of(config: dict[str, Any]) -> Scheduler | None:
    """Return the scheduler that a configuration names or has settings for; None without any."""
    cluster = config.get("cluster")
    if not isinstance(cluster, dict):
        return None
    named = SCHEDULERS.get(str(cluster.get("scheduler")))
    described = (s for s in SCHEDULERS.values() if cluster.get(s.name) != to_plain(s.settings()))
    return named or next(described, None)


def scheduler_or_default(config: dict[str, Any]) -> Scheduler:
    return scheduler_of(config) or SCHEDULERS[DEFAULT]


def scheduler_of_job(job: Submitted) -> Scheduler:
    return SCHEDULERS[job.scheduler]


def remember(rundir: RunDir, submitted: Submitted) -> None:
    """Write the run's job, signed."""
    plain = to_plain(submitted)
    rundir.write(rundir.job_file, json.dumps(plain, indent=2) + "\n")
    signatures.sign(rundir, {"job": [rundir.name, plain]})


def recall(rundir: RunDir) -> Submitted | None:
    """Return the run's job; None if it has none, or none that this user submitted.

    Its id and its settings go into commands, so both are checked as well. The script is that of the
    run's own folder, or of its sweep's.
    """
    try:
        plain = read_json(rundir.job_file, rundir.open)
        if not signatures.is_signed(rundir, "job", [rundir.name, plain]):
            return None
        known = from_plain(Submitted, plain)
        scheduler = SCHEDULERS[known.scheduler]
        settings = from_plain(scheduler.settings, known.settings)
    except (OSError, ValueError, KeyError, ConfigError):
        return None
    sweep, is_job = known.sweep, re.fullmatch(scheduler.job_id, known.job, re.ASCII)
    if not is_job or any(scheduler.check(settings)) or (sweep and run_name(sweep) != sweep):
        return None
    folder = RunDir(rundir.path.with_name(sweep)) if sweep else rundir
    return replace(known, script=str(folder.job_script(scheduler.ending)))


def has_foreign_job(rundir: RunDir) -> bool:
    """Whether the folder has a job that this user did not submit: no scheduler is asked of it."""
    return rundir.job_file.exists() and recall(rundir) is None


def job_logs(rundir: RunDir) -> list[Path]:
    """Return the logs of the run's job, node 0's first; a requeued job appends to them."""
    known = recall(rundir)
    if known is None:
        return []
    folder, logs = RunDir(Path(known.script).parent), list[Path]()
    while not logs or logs[-1].exists():
        logs.append(folder.job_log(known.job, node=len(logs)))
    return logs


def ask(jobs: Iterable[Submitted]) -> Answers:
    """Return the states of jobs, each from its own scheduler."""
    answers, known = Answers(), list(jobs)
    for name, scheduler in SCHEDULERS.items():
        own = [submitted for submitted in known if submitted.scheduler == name]
        if own:
            its = scheduler.commands.ask(own)
            answers.states |= its.states
            answers.trouble = answers.trouble or its.trouble
    return answers


def cancel(submitted: Submitted) -> None:
    """Remove a job from the queue, or end it."""
    scheduler_of_job(submitted).commands.cancel(submitted)
