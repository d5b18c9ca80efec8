"""Schema of `cluster.slurm`, whose values go into a job script, and its checks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from colotrain.errors import Problem
from colotrain.spec.ranges import at_least


@dataclass(frozen=True, slots=True, kw_only=True)
class Slurm:
    """The job that `colotrain submit` submits to SLURM; null leaves a setting to the site."""

    partition: str | None = None
    """Partition, or several separated by commas."""
    account: str | None = None
    """Account that is charged."""
    qos: str | None = None
    """Quality of service."""
    time: str | int | None = None
    """Time limit: minutes, `HH:MM:SS` or `D-HH:MM:SS`."""
    gpus_per_node: int | str | None = None
    """GPUs on each node (`8`, `h100:8`): one rank each, unless `cluster.procs_per_node` is set."""
    gres: str | None = None
    """Generic resources of each node, for sites without `gpus_per_node`: `gpu:8`."""
    cpus_per_task: int | None = None
    """CPUs of each node, shared by its launcher and all its ranks."""
    memory: str | int | None = None
    """Memory of each node: `64G`; `0` is all of it."""
    exclude: str | None = None
    """Nodes not to use."""
    nodelist: str | None = None
    """Nodes to use."""
    dependency: str | None = None
    """Jobs to wait for: `afterok:1234`."""
    constraint: str | None = None
    """Features that nodes must have."""
    reservation: str | None = None
    """Reservation to run in."""
    mail_user: str | None = None
    """Recipient of mail."""
    mail_type: str | None = None
    """Events that send mail: `END,FAIL`."""
    comment: str | None = None
    """Any text."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Any other flag of sbatch, without its dashes: `{exclusive: true, switches: 1}`."""
    setup: list[str] = field(default_factory=list)
    """Shell lines to run first, unquoted: `module load cuda`."""
    container: list[str] = field(default_factory=list)
    """Words before the command on each node: `[apptainer, exec, --nv, image.sif]`."""
    python: str | None = None
    """Python interpreter on the nodes; null: the one that submits."""
    snapshot: bool = False
    """Run from a copy of the git working tree, so that later edits do not affect a queued job."""
    warn_s: int = 60
    """Seconds before the time limit at which the run saves and is requeued."""
    max_requeues: int = 100
    """Maximum number of times that a job is requeued after preemption or its time limit."""


TIME = re.compile(r"\d+|\d+:\d{1,2}(:\d{1,2})?|\d+-\d{1,2}(:\d{1,2}){0,2}|infinite|unlimited", re.I)
FLAG = re.compile(r"[a-z][a-z0-9-]*")
OWN = {
    "nodes": "cluster.nodes",
    "ntasks": "cluster.nodes",
    "ntasks-per-node": "cluster.procs_per_node",
    "job-name": "name",
    "signal": "cluster.slurm.warn_s",
    "array": "--sweep",
    "output": "the run directory's logs",
    "error": "the run directory's logs",
    "open-mode": "the run directory's logs",
    "requeue": "cluster.slurm.max_requeues",
    "no-requeue": "cluster.slurm.max_requeues",
    "chdir": "the folder you submit from",
    "export": "cluster.slurm.setup",
    "wrap": "colotrain itself",
    "parsable": "colotrain itself",
    "test-only": "`colotrain submit --test-only`",
}
"""sbatch flags that colotrain sets itself → the setting that they come from."""
RANGES = {
    "cluster.slurm.cpus_per_task": at_least(1),
    "cluster.slurm.warn_s": at_least(1),
    "cluster.slurm.max_requeues": at_least(0),
}
"""Key → the numbers that it may have."""
SECTION = {f.name.replace("_", "-") for f in fields(Slurm)} | {"mem", "gpus-per-node"}


def check_slurm(slurm: Slurm) -> Iterator[Problem]:
    """Yield settings that cannot appear in a script or that conflict."""
    for name in (f.name for f in fields(Slurm)):
        yield from _check_text(f"cluster.slurm.{name}", getattr(slurm, name))
    if slurm.time is not None and not TIME.fullmatch(str(slurm.time)):
        expected = "minutes, MM:SS, HH:MM:SS or D-HH:MM:SS"
        fix = "for example cluster.slurm.time=1-12:00:00"
        yield Problem(key="cluster.slurm.time", value=slurm.time, expected=expected, fix=fix)
    if slurm.gpus_per_node is not None and slurm.gres is not None:
        fix = "remove cluster.slurm.gres, or set gpus_per_node to null"
        expected = "one of gpus_per_node and gres"
        yield Problem(key="cluster.slurm.gres", value=slurm.gres, expected=expected, fix=fix)
    for flag, value in slurm.extra.items():
        yield from _check_flag(flag, value)


def _check_text(key: str, value: Any) -> Iterator[Problem]:
    """Refuse values with line breaks: the text after one would be another line of the script."""
    if isinstance(value, dict):
        for name, inside in value.items():
            yield from _check_text(f"{key}.{name}", inside)
    elif isinstance(value, list):
        for index, inside in enumerate(value):
            yield from _check_text(f"{key}[{index}]", inside)
    elif isinstance(value, str) and not value.isprintable():
        expected, fix = "text on one line, without control characters", "take them out"
        yield Problem(key=key, value=repr(value), expected=expected, fix=fix)
    elif value == "":
        yield Problem(key=key, value="''", expected="text", fix="or null")


def _check_flag(flag: str, value: Any) -> Iterator[Problem]:
    key = f"cluster.slurm.extra.{flag}"
    if not FLAG.fullmatch(flag):
        fix = "as in cluster.slurm.extra={exclusive:true}"
        expected = "a flag's long name without dashes before it"
        yield Problem(key=key, value=value, expected=expected, fix=fix)
    elif flag in OWN:
        yield Problem(
            key=key,
            value=value,
            expected="a flag that colotrain leaves free",
            fix=(f"it comes from {OWN[flag]}"),
        )
    elif flag in SECTION:
        name = {"mem": "memory"}.get(flag, flag.replace("-", "_"))
        expected = "a flag without a key of its own"
        yield Problem(key=key, value=value, expected=expected, fix=f"set cluster.slurm.{name}")
    elif not isinstance(value, bool | int | float | str) and value is not None:
        expected = "text, a number, true (for a flag without value) or null"
        yield Problem(key=key, value=value, expected=expected, fix="write one value")
