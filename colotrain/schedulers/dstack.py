"""dstack: a task's YAML, and the `dstack` commands that apply, ask, show and end it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from colotrain.errors import ColotrainError, ConfigError, Problem
from colotrain.schedulers import commands, elsewhere
from colotrain.schedulers.elsewhere import Elsewhere, without_empty
from colotrain.schedulers.job import Answers, Job, JobState, Submitted

LABEL = "dstack"
STATES = {
    "pending": "PENDING",
    "submitted": "PENDING",
    "provisioning": "PENDING",
    "running": "RUNNING",
    "terminating": "COMPLETING",
    "terminated": "CANCELLED",
    "failed": "FAILED",
    "done": "COMPLETED",
}
"""Statuses of dstack's runs → states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dstack(Elsewhere):
    """The task that `colotrain submit` hands to dstack. `volumes` names its network volumes,
    `secrets` its secrets: `{HF_TOKEN: hf_token}`."""

    project: str | None = None
    """Project; null: the default one."""
    fleets: list[str] = field(default_factory=list)
    """Fleets that may run it; empty: any."""
    backends: list[str] = field(default_factory=list)
    """Backends that may run it: `[aws, kubernetes]`; empty: any."""
    spot_policy: Literal["spot", "on-demand", "auto"] | None = None
    """Whether to use spot machines; null: dstack's default."""
    shared_memory: str = "8GB"
    """Size of /dev/shm."""
    max_duration: str | None = None
    """Time limit: `12h`, `2d`."""


def check(settings: Dstack) -> Iterator[Problem]:
    section = "cluster.dstack"
    yield from elsewhere.check(section, settings)
    for name, kept in settings.secrets.items():
        expected = "the name of a secret of dstack"
        yield from elsewhere.check_match(f"{section}.secrets.{name}", kept, r"[\w-]+", expected)


def render(job: Job, settings: Dstack) -> str:
    """Return the task."""
    elsewhere.check_complete("cluster.dstack", settings)
    name = elsewhere.legal_name(job)
    env = {"COLOTRAIN_JOB": name, **{key: _literal(v) for key, v in settings.env.items()}}
    env |= {key: f"${{{{ secrets.{kept} }}}}" for key, kept in settings.secrets.items()}
    resources = {
        "gpu": settings.gpus_per_node,
        "cpu": f"{settings.cpus_per_task}.." if settings.cpus_per_task else None,
        "memory": _at_least(settings.memory),
        "shm_size": settings.shared_memory,
    }
    files = elsewhere.carried_files(job)
    task = {
        "type": "task",
        "name": name,
        "nodes": job.nodes,
        "image": settings.image,
        "env": env,
        "commands": [_script(job)],
        "files": [{"local_path": local, "path": path} for path, local in files.items()],
        "volumes": [{"name": key, "path": path} for key, path in settings.volumes.items()],
        "resources": without_empty(resources),
        "fleets": settings.fleets,
        "backends": settings.backends,
        "spot_policy": settings.spot_policy,
        "max_duration": settings.max_duration,
    }
    return elsewhere.to_yaml(without_empty(task))


def _at_least(amount: str | None) -> str | None:
    """Return an amount in dstack's words; one without `..` would be that size exactly."""
    return f"{amount}.." if amount and ".." not in amount else amount


def _script(job: Job) -> str:
    """Return the shell line that each node runs; dstack numbers the nodes."""
    head, rank = f'"$DSTACK_MASTER_NODE_IP:{elsewhere.PORT}"', '"$DSTACK_NODE_RANK"'

    def literal(word: str) -> str:
        return _literal(shlex.quote(word))

    return " ".join(elsewhere.node_command(job, head=head, rank=rank, literal=literal))


def _literal(text: str) -> str:
    """Return text in which dstack expands nothing: its expressions begin with `${{`."""
    if "${{" in text:
        raise ConfigError([Problem(key="cluster.dstack", value=text, expected="no `${{`")])
    return text


# -- commands


def _dstack(settings: Dstack, verb: str, *words: str) -> list[str]:
    project = ["--project", settings.project] if settings.project else []
    return ["dstack", verb, *project, *words]


def test(script: str, settings: Dstack) -> str:
    """Check that there is `dstack`."""
    commands.run(["dstack", "--version"], label=LABEL, timeout_s=commands.SUBMIT_S)
    return "dstack judges a task when it is applied"


def submit(script_file: str, settings: Dstack) -> str:
    """Apply the task; return the run's name."""
    name = str(elsewhere.read_job(script_file)[0]["name"])
    words = _dstack(settings, "apply", "-f", script_file, "-y", "-d")
    done = commands.run(words, label=LABEL, timeout_s=commands.SUBMIT_S)
    fix = f"its task is {script_file}"
    commands.checked(done, what=f"{LABEL} refuses the task", fix=fix)
    return name


def cancel(job: Submitted) -> None:
    """Ask dstack to stop the run."""
    words = _dstack(job.section(Dstack), "stop", "-y", "--", job.job)
    done = commands.run(words, label=LABEL, timeout_s=commands.SUBMIT_S)
    if done.returncode:
        raise ColotrainError(f"{LABEL}: {commands.said(done)}", "`dstack ps` shows what is left")


def ask(jobs: Sequence[Submitted]) -> Answers:
    """Return the states of jobs, with one question to each project."""
    answers = Answers()
    for project in dict.fromkeys(job.section(Dstack).project for job in jobs):
        try:
            words = _dstack(Dstack(project=project), "ps", "--all", "--json")
            done = commands.run(words, label=LABEL)
            text = commands.checked(done, what=LABEL, fix="is its server reachable?")
            for run in json.loads(text[text.find("{") :])["runs"]:
                name, word = str(run["run_spec"]["run_name"]), str(run["status"])
                if any(job.job == name for job in jobs):
                    state = JobState(state=STATES.get(word, word.upper()), asked="dstack")
                    answers.states.setdefault(name, state)  # the newest comes first
        except (ColotrainError, ValueError, LookupError, TypeError, AttributeError) as error:
            answers.trouble = answers.trouble or f"{LABEL}: {error}"
    return answers


def log_command(job: Submitted, *, lines: int, follow: bool) -> list[str]:
    """Return the command that prints what node 0 prints; dstack counts no lines."""
    settings = job.section(Dstack)
    if follow:
        return _dstack(settings, "attach", "--logs", "--", job.job)
    return _dstack(settings, "logs", "--", job.job)


asked_gpus = elsewhere.rank_gpus
