"""Jobs on nodes that do not see the folder they are submitted from: in containers, in clouds.

Such a job carries its plan and its configuration; its run directory is on a volume of the nodes.
Names and values become data of a YAML document, which a YAML library writes.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from colotrain.errors import ConfigError, Problem
from colotrain.schedulers.job import Job

PORT = 29500
"""Port at which node 0 listens; each job has addresses of its own."""
PLAN_FOLDER = "/tmp/colotrain-plan"
"""Folder on the nodes into which a cloud's scheduler copies the files that a job carries."""
JOB_ID = r"[a-z][a-z0-9-]{0,39}"
"""Pattern of `legal_name`."""
NAME_LENGTH = 40
"""Maximum length of a job's name: schedulers append to it, and a host name has 63 characters."""
SECRET = re.compile(r"token|secret|passw|credential|(^|_)key($|_)|api_?key", re.IGNORECASE)
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """Settings that such schedulers share."""

    image: str | None = None
    """Container image with colotrain and your own modules."""
    python: str | None = None
    """Python interpreter in the image; null: `python`."""
    gpus_per_node: int | str | None = None
    """GPUs of each node (`8`, `H100:8`): one rank each, unless `cluster.procs_per_node` is set."""
    cpus_per_task: int | None = None
    """CPUs of each node."""
    memory: str | None = None
    """Memory of each node, as the scheduler writes it; SkyPilot and dstack take nodes with more."""
    volumes: dict[str, str] = field(default_factory=dict)
    """Volumes that all nodes of the job mount, by name: `{training: /shared}`."""
    runs_dir: str = "/shared/runs"
    """Folder of runs on the nodes, in one of the volumes."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables, none of which is a secret."""
    secrets: dict[str, str] = field(default_factory=dict)
    """Environment variables whose values the scheduler keeps, as references to them."""


def rank_gpus(settings: Elsewhere) -> tuple[str, int]:
    """Return type and number per node of the GPUs that are asked for; or `("", 0)`."""
    kind, _, number = str(settings.gpus_per_node or "").rpartition(":")
    return (kind, int(number)) if number.isdecimal() else ("", 0)


def check(section: str, settings: Elsewhere) -> Iterator[Problem]:
    """Yield values that cannot be meant; `section` is the key of the settings."""
    if settings.gpus_per_node is not None and not rank_gpus(settings)[1]:
        expected, fix = "a number, or TYPE:NUMBER", f"for example {section}.gpus_per_node=8"
        key, value = f"{section}.gpus_per_node", settings.gpus_per_node
        yield Problem(key=key, value=value, expected=expected, fix=fix)
    yield from check_path(f"{section}.runs_dir", settings.runs_dir)
    for name, path in settings.volumes.items():
        yield from check_path(f"{section}.volumes.{name}", path)
    for name in (*settings.env, *settings.secrets):
        if not VARIABLE.fullmatch(name):
            where = "env" if name in settings.env else "secrets"
            expected = "the name of an environment variable"
            yield Problem(key=f"{section}.{where}", value=repr(name), expected=expected)
    for name in settings.env:
        if SECRET.search(name):
            fix = f"name where it is kept in {section}.secrets"
            expected = "no secret: the file would hold its value"
            yield Problem(key=f"{section}.env.{name}", expected=expected, fix=fix)


def check_path(key: str, path: str) -> Iterator[Problem]:
    parts = PurePosixPath(path).parts
    if not path.startswith("/") or ".." in parts or not path.isprintable() or ":" in path:
        expected = "an absolute path without `..`, colons and line breaks"
        yield Problem(key=key, value=repr(path), expected=expected, fix="for example /shared")


def check_match(key: str, value: str, pattern: str, expected: str) -> Iterator[Problem]:
    if not re.fullmatch(pattern, value):
        yield Problem(key=key, value=repr(value), expected=expected, fix="correct it")


def check_complete(section: str, settings: Elsewhere, *, needs_image: bool = True) -> None:
    """Raise `ConfigError` if a job cannot be made of the settings, with all that is missing."""
    problems = []
    if needs_image and not settings.image:
        expected = "a container image with colotrain (scripts/Dockerfile makes one)"
        fix = f"for example {section}.image=registry.example.org/me/train:1"
        problems.append(Problem(key=f"{section}.image", expected=expected, fix=fix))
    runs = PurePosixPath(settings.runs_dir)
    if not any(runs.is_relative_to(path) for path in settings.volumes.values()):
        expected = f"a volume that holds {runs}, on which checkpoints outlive the job"
        fix = f"for example {section}.volumes={{training: {runs.parent}}}"
        problems.append(Problem(key=f"{section}.volumes", expected=expected, fix=fix))
    if problems:
        raise ConfigError(problems)


def legal_name(job: Job) -> str:
    """Return a name for the job's objects: of `[a-z0-9-]`, at most `NAME_LENGTH` long (RFC 1123).

    It begins with a letter. Its end is a digest of who submits and of the run's folder, so that
    runs whose names differ in other characters, or that belong to others, have other names.
    """
    plain = unicodedata.normalize("NFKD", job.name).encode("ascii", "ignore").decode().lower()
    stem = re.sub(r"[^a-z0-9]+", "-", plain).strip("-")
    stem = stem if stem[:1].isalpha() else f"run-{stem}"
    digest = hashlib.sha256(f"{job.owner}:{job.logs}".encode()).hexdigest()[:8]
    return f"{stem[: NAME_LENGTH - 9].rstrip('-')}-{digest}"


def node_command(
    job: Job, *, head: str, rank: str, literal: Callable[[str], str], carried: str = PLAN_FOLDER
) -> list[str]:
    """Return the words that take a node's part in the run; `carried` is the folder of its plan.

    The node expands `head` and `rank`; `literal` writes the job's words so that it does not.
    """
    (run,) = job.runs
    words = map(literal, (job.python, "-m", "colotrain", "node", "--trust-code", run))
    return [*words, "--head", head, "--node-rank", rank, "--plan", carried]


def to_yaml(*documents: Any) -> str:
    """Return documents as YAML, in which texts of several lines stand as they are."""
    import yaml

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: Any, value: str) -> Any:
        style = "|" if "\n" in value else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    return str(yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, width=1000))


def read_job(script_file: str) -> tuple[Any, str]:
    """Return the first document of a job's file, and the whole text."""
    import yaml

    with open(script_file, encoding="utf-8") as file:
        text = file.read()
    return next(yaml.safe_load_all(text)), text


def without_empty(record: dict[str, Any]) -> dict[str, Any]:
    """Return `record` without the settings that are not given."""
    return {key: value for key, value in record.items() if value not in (None, "", {}, [], ())}


def carried_files(job: Job) -> dict[str, str]:
    """Return path on the nodes → local path of the files that a job carries in `PLAN_FOLDER`."""
    return {f"{PLAN_FOLDER}/{PurePosixPath(path).name}": path for path in job.files}
