"""The batch systems that `colotrain submit` knows: a row each.

A new one is a module with the functions of `Commands` and `render`, a row in `SCHEDULERS` here and
one in `spec.schedulers`, and a section of its settings in the schema of `cluster`. Every section
has the keys partition, gpus_per_node, cpus_per_task, container, python and snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from colotrain.config.slurm import Slurm
from colotrain.records import from_plain, to_plain
from colotrain.schedulers import slurm, slurm_queue
from colotrain.schedulers.job import Answers, Job, NodeKind, Submitted
from colotrain.spec.schedulers import DEFAULT
from colotrain.spec.schedulers import SCHEDULERS as VARIABLES


class Commands(Protocol):
    """Commands of a scheduler: the functions of a module."""

    def test(self, script: str) -> str:
        """Return what it says about a job without submitting it; `UsageError` if refused."""
        ...

    def submit(self, script_file: str) -> str:
        """Submit a script; return the job's id."""
        ...

    def cancel(self, job: str) -> None:
        """Remove a job from the queue, or end it."""
        ...

    def ask(self, jobs: Iterable[str]) -> Answers: ...

    def node_kinds(self, partition: str | None = None) -> list[NodeKind]: ...

    def asked_gpus(self, settings: Any, /) -> tuple[str, int]:
        """Return type and number per node of the GPUs that the settings request; or `("", 0)`."""
        ...

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
    """A batch system."""

    name: str
    """Name of its section of `cluster`."""
    settings: type[Any]
    """Dataclass of its section."""
    render: Callable[[Job, Any], str]
    """Returns the text of a job's script, from the job and its settings."""
    commands: Commands

    @property
    def label(self) -> str:
        """Name in messages."""
        return VARIABLES[self.name].label

    def section(self, config: dict[str, Any]) -> Any:
        """Return its settings in a configuration."""
        return from_plain(self.settings, config["cluster"][self.name])


SCHEDULERS = {
    "slurm": Scheduler(name="slurm", settings=Slurm, render=slurm.render, commands=slurm_queue),
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


def ask(jobs: Iterable[Submitted]) -> Answers:
    """Return the states of jobs, each from its own scheduler."""
    answers, known = Answers(), list(jobs)
    for name, scheduler in SCHEDULERS.items():
        ids = [submitted.job for submitted in known if submitted.scheduler == name]
        if ids:
            its = scheduler.commands.ask(ids)
            answers.states |= its.states
            answers.trouble = answers.trouble or its.trouble
    return answers


def cancel(submitted: Submitted) -> None:
    """Remove a job from the queue, or end it."""
    SCHEDULERS[submitted.scheduler].commands.cancel(submitted.job)
