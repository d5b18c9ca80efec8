"""SkyPilot: a task's YAML, and the `sky` commands that launch, ask, show and end it.

Each run has a cluster of its own, called as its job, which SkyPilot takes down when the job ends.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from colotrain.errors import ColotrainError, ConfigError, Problem
from colotrain.schedulers import commands, elsewhere
from colotrain.schedulers.elsewhere import Elsewhere, without_empty
from colotrain.schedulers.job import Answers, Job, JobState, Submitted

LABEL = "SkyPilot"
LAUNCH_S = 1800.0
"""Seconds that `sky launch` may take to find and start the machines."""
STATES = {
    "INIT": "PENDING",
    "SETTING_UP": "PENDING",
    "SUCCEEDED": "COMPLETED",
    "FAILED_SETUP": "FAILED",
    "FAILED_DRIVER": "FAILED",
}
"""States of SkyPilot's jobs that have another name here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SkyPilot(Elsewhere):
    """The task that `colotrain submit` launches with SkyPilot. `volumes` names its volumes;
    `secrets` names variables of your own environment, whose values no file holds."""

    infra: str | None = None
    """Where to run: `aws/us-east-1`, `kubernetes`; null: where it is cheapest."""
    use_spot: bool = False
    """Run on spot machines."""
    setup: list[str] = field(default_factory=list)
    """Shell lines that prepare each node, unquoted."""
    disk_gb: int | None = None
    """Size of each node's disk, in gigabytes."""


def check(settings: SkyPilot) -> Iterator[Problem]:
    section = "cluster.skypilot"
    yield from elsewhere.check(section, settings)
    kind, number = elsewhere.rank_gpus(settings)
    if number and not kind:
        expected, fix = "TYPE:NUMBER", f"for example {section}.gpus_per_node=H100:8"
        key, value = f"{section}.gpus_per_node", settings.gpus_per_node
        yield Problem(key=key, value=value, expected=expected, fix=fix)


def render(job: Job, settings: SkyPilot) -> str:
    """Return the task. Without an image its machines need colotrain from `setup`."""
    elsewhere.check_complete("cluster.skypilot", settings, needs_image=not settings.setup)
    resources = {
        "infra": settings.infra,
        "accelerators": settings.gpus_per_node,
        "cpus": f"{settings.cpus_per_task}+" if settings.cpus_per_task else None,
        "memory": _at_least(settings.memory),
        "disk_size": settings.disk_gb,
        "use_spot": settings.use_spot or None,
        "image_id": f"docker:{settings.image}" if settings.image else None,
    }
    name = elsewhere.legal_name(job)
    task = {
        "name": name,
        "num_nodes": job.nodes,
        "resources": without_empty(resources),
        "envs": {"COLOTRAIN_JOB": name, **settings.env},
        "secrets": dict.fromkeys(settings.secrets),
        "volumes": {path: volume for volume, path in settings.volumes.items()},
        "file_mounts": elsewhere.carried_files(job),
        "setup": "\n".join(settings.setup),
        "run": _script(job),
    }
    return elsewhere.to_yaml(without_empty(task))


def _at_least(amount: str | None) -> str | None:
    """Return an amount in SkyPilot's words; a number alone would be that size exactly."""
    return f"{amount}+" if amount and amount.isdecimal() else amount


def _script(job: Job) -> str:
    """Return the shell lines that each node runs; SkyPilot numbers the nodes."""
    head, rank = f'"$head:{elsewhere.PORT}"', '"$SKYPILOT_NODE_RANK"'
    words = elsewhere.node_command(job, head=head, rank=rank, literal=shlex.quote)
    return f'head=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)\nexec {" ".join(words)}\n'


def test(script: str, settings: SkyPilot) -> str:
    """Check that there is `sky`, and a value for each secret."""
    commands.run(["sky", "--version"], label=LABEL, timeout_s=commands.SUBMIT_S)
    missing = [name for name in settings.secrets if name not in os.environ]
    if missing:
        expected = "a variable of your environment"
        raise ConfigError(
            [
                Problem(key=f"cluster.skypilot.secrets.{name}", expected=expected, fix="export it")
                for name in missing
            ]
        )
    return "SkyPilot judges a task when it is launched"


def submit(script_file: str, settings: SkyPilot) -> str:
    """Launch the task on a cluster of its own; return the cluster's name."""
    name = str(elsewhere.read_job(script_file)[0]["name"])
    secrets = [word for key in settings.secrets for word in ("--secret", key)]
    words = ["sky", "launch", "-c", name, "--detach-run", "--down", "--yes", *secrets, script_file]
    done = commands.run(words, label=LABEL, timeout_s=LAUNCH_S)
    fix = f"its task is {script_file}; `sky status` shows what was started"
    commands.checked(done, what=f"{LABEL} does not launch the task", fix=fix)
    return name


def cancel(job: Submitted) -> None:
    """Cancel the job and take its cluster down."""
    for words in (["cancel", "--all", "--yes", "--", job.job], ["down", "--yes", "--", job.job]):
        done = commands.run(["sky", *words], label=LABEL, timeout_s=LAUNCH_S)
    if done.returncode and "not found" not in done.stderr + done.stdout:
        raise ColotrainError(f"{LABEL}: {commands.said(done)}", "`sky status` shows what is left")


def ask(jobs: Sequence[Submitted]) -> Answers:
    """Return the states of jobs that SkyPilot still has a cluster for."""
    answers, names = Answers(), [job.job for job in jobs]
    try:
        done = commands.run(
            ["sky", "queue", "-o", "json", "--", *names], label=LABEL, timeout_s=60.0
        )
        queues: dict[str, Any] = json.loads(done.stdout[done.stdout.find("{") :] or "{}")
        for name in names:
            if queues.get(name):
                newest = max(queues[name], key=lambda row: row["job_id"])
                word = str(newest["status"]).rpartition(".")[2]
                answers.states[name] = JobState(state=STATES.get(word, word), asked="sky")
    except (ColotrainError, ValueError, LookupError, TypeError, AttributeError) as error:
        answers.trouble = f"{LABEL}: {error}"
    return answers


def log_command(job: Submitted, *, lines: int, follow: bool) -> list[str]:
    """Return the command that prints what the job's nodes print."""
    how = ["--follow" if follow else "--no-follow", f"--tail={lines}"]
    return ["sky", "logs", *how, "--", job.job]


asked_gpus = elsewhere.rank_gpus
