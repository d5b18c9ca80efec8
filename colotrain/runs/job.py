"""Machines of a job: what its ranks will find on the nodes, not on this machine."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from colotrain.config.compose import gather
from colotrain.config.files import read_file
from colotrain.config.schema_cluster import Hardware
from colotrain.config.shipped import Search
from colotrain.config.sizes import parse_size
from colotrain.errors import ColotrainError, Problem
from colotrain.planner.machine import Machine
from colotrain.schedulers.job import NodeKind
from colotrain.schedulers.registry import SCHEDULERS, Scheduler, scheduler_or_default
from colotrain.spec.installed_torch import torch_has_cuda
from colotrain.spec.quantities import format_size


@dataclass(slots=True, kw_only=True)
class Job:
    """A configuration whose ranks run on a scheduler's nodes. `config` is changed in place."""

    config: dict[str, Any]
    scheduler: Scheduler
    machine: Machine
    """A node of the job as far as it is known; unknown fields are this machine's."""
    notices: list[str] = field(default_factory=list)
    """Notes on settings that were chosen for the user."""
    warnings: list[str] = field(default_factory=list)
    """Warnings about what is not known."""
    problems: list[Problem] = field(default_factory=list)

    @property
    def section(self) -> dict[str, Any]:
        """The scheduler's section, as it is written."""
        section: dict[str, Any] = self.config["cluster"][self.scheduler.name]
        return section

    @property
    def settings(self) -> Any:
        """The scheduler's settings; their types are checked later."""
        kind = self.scheduler.settings
        names = [field.name for field in fields(kind) if field.name in self.section]
        return kind(**{name: self.section[name] for name in names})


def on_nodes(config: dict[str, Any], here: Machine) -> Job:
    """Fill in the settings that a job leaves open, from what its scheduler reports on its nodes.

    GPUs are requested if the user requested none, with one rank each; their type selects the file
    under `hardware` that lists it. Unknown facts are warnings, not errors; but ranks on GPUs that
    the job does not get are an error.
    """
    scheduler = scheduler_or_default(config)
    if not scheduler.passes_environment:
        here = replace(here, threads=0, threads_set_by="")
    job = Job(config=config, scheduler=scheduler, machine=here)
    cluster = config.get("cluster")
    if not isinstance(cluster, dict) or not isinstance(cluster.get(scheduler.name), dict):
        return job  # another check reports this
    kind = _ask_for_kind(job, cluster)
    gpu_type, num_gpus = job.scheduler.commands.asked_gpus(job.settings)
    if not num_gpus and kind and kind.num_gpus and cluster.get("device") in ("auto", "cuda"):
        gpu_type, num_gpus = kind.gpu_type, kind.num_gpus
        asked = f"{gpu_type}:{num_gpus}" if gpu_type else num_gpus
        job.section["gpus_per_node"] = asked
        key = f"cluster.{scheduler.name}.gpus_per_node"
        job.notices.append(f"{key}={asked}: what the partition's nodes have")
    if num_gpus and cluster.get("device") in ("auto", "cuda"):
        _take_gpus(job, cluster, gpu_type or (kind.gpu_type if kind else ""), num_gpus, kind)
    elif kind or scheduler.is_elsewhere:
        num_cores = _cores(job, kind)
        cpus = {"device": "cpu", "num_devices": 0, "device_memory_bytes": 0}
        job.machine = _node(here, kind, num_cores=num_cores, **cpus)
    job.problems += _check_gpus(job, num_gpus)
    return job


def _ask_for_kind(job: Job, cluster: dict[str, Any]) -> NodeKind | None:
    """Return the kind of nodes that the job will most likely get; None if that is unknown."""
    if job.scheduler.nodes is None:
        return None
    partition = job.section.get("partition")
    name, label = job.scheduler.name, job.scheduler.label
    environment = os.environ.get("PATH"), os.environ.get(f"{name.upper()}_CONF")
    kinds = _kinds(name, str(partition or ""), *environment)
    if isinstance(kinds, str):
        job.warnings.append(f"{label} does not say what its nodes are ({kinds})")
        return None
    if not kinds:
        what = f"partition {partition}" if partition else "default partition"
        job.warnings.append(f"{label} does not say what its nodes are (it has no {what})")
        return None
    wanted, _ = job.scheduler.commands.asked_gpus(job.settings)
    described = job.config.get("hardware") or {}
    nodes = cluster.get("nodes")
    chosen = max(
        kinds,
        key=lambda kind: (
            bool(wanted) and kind.gpu_type == wanted,
            _matches(kind.gpu_type, described.get("gres") or []),
            isinstance(nodes, int) and kind.num_nodes >= nodes,
            kind.num_gpus > 0 and cluster.get("device") != "cpu",
            kind.num_nodes,
        ),
    )
    if len({(kind.gpu_type, kind.num_gpus, kind.memory_bytes) for kind in kinds}) > 1:
        gpus = f"{chosen.num_gpus} × {chosen.gpu_type or 'GPU'}" if chosen.num_gpus else "no GPU"
        job.notices.append(
            f"the partition's nodes differ: planned for its {chosen.num_nodes} with {gpus} and "
            f"{format_size(chosen.memory_bytes)}"
        )
    return chosen


@functools.cache
def _kinds(scheduler: str, partition: str, *_: str | None) -> list[NodeKind] | str:
    """Return the kinds of nodes or an error message; cached for all runs of a sweep."""
    nodes = SCHEDULERS[scheduler].nodes
    assert nodes is not None
    try:
        return nodes.node_kinds(partition or None)
    except ColotrainError as error:
        return error.problem


def _take_gpus(
    job: Job, cluster: dict[str, Any], gpu_type: str, num_gpus: int, kind: NodeKind | None
) -> None:
    """Plan one rank per GPU, on the described hardware or the one that the GPU type selects."""
    described, label = job.config.get("hardware"), job.scheduler.label
    if isinstance(described, dict) and described.get("name") is None:
        name = hardware_of(gpu_type, Search.at(Path.cwd())) if gpu_type else None
        if name:
            job.notices.append(f"hardware={name}: what {label} calls {gpu_type}")
            described.update(gather([f"hardware={name}"])[0]["hardware"])
        else:
            what = f"GPUs that {label} calls {gpu_type}" if gpu_type else "GPUs without a type"
            fix = "choose hardware=NAME, or describe them in ./conf/hardware/NAME.yaml"
            job.warnings.append(f"{what} are not known: {fix}")
    own = job.scheduler.is_elsewhere or job.section.get("container")
    if not torch_has_cuda() and not own:
        python = job.section.get("python")
        if python is None:
            fix = f"name one that has it in cluster.{job.scheduler.name}.python"
            job.warnings.append(f"the job's interpreter has a torch without CUDA: {fix}")
    if cluster.get("procs_per_node") == "auto":
        cluster["procs_per_node"] = num_gpus
    job.machine = _node(
        job.machine,
        kind,
        device="cuda",
        num_devices=num_gpus,
        num_cores=_cores(job, kind),
        device_memory_bytes=_memory_bytes(described),
    )


def _memory_bytes(described: Any) -> int:
    """Return the memory of a device as described; 0 if it is missing or invalid."""
    try:
        return parse_size(described["memory"])
    except (TypeError, KeyError, ValueError):
        return 0


def _cores(job: Job, kind: NodeKind | None) -> int:
    """Return the cores that a node's ranks share: those requested, else the number known."""
    asked, here = job.section.get("cpus_per_task"), job.machine
    if isinstance(asked, int) and asked > 0:
        return asked
    return min(here.num_cores, kind.num_cores or here.num_cores) if kind else here.num_cores


def _node(here: Machine, kind: NodeKind | None, **known: Any) -> Machine:
    host_bytes = kind.memory_bytes if kind and kind.memory_bytes else here.host_memory_bytes
    return replace(here, host_memory_bytes=host_bytes, host_free_bytes=0, **known)


def hardware_of(gpu_type: str, search: Search) -> str | None:
    """Return the name of the file under `hardware` that describes a scheduler's `gpu_type`."""
    names = search.names("hardware")
    if _plain(gpu_type) in names:
        return _plain(gpu_type)
    return next((name for name in names if _matches(gpu_type, _gres(name, search))), None)


def _matches(gpu_type: str, globs: list[str]) -> bool:
    return bool(gpu_type) and any(fnmatchcase(_plain(gpu_type), glob) for glob in globs)


def _plain(gpu_type: str) -> str:
    return gpu_type.lower().replace("_", "-").replace(" ", "-")


def _gres(name: str, search: Search) -> list[str]:
    """Return the patterns of schedulers' GPU types for the hardware that a file describes."""
    file = search.find(f"hardware/{name}")
    found = read_file(file, []).settings.get("gres") if file else None
    return [str(glob) for glob in found or []]


def _check_gpus(job: Job, num_gpus: int | None) -> Iterator[Problem]:
    """Yield a problem if ranks on GPUs would get none."""
    described, device = job.config.get("hardware"), job.config["cluster"].get("device")
    if device == "auto" and isinstance(described, dict) and described.get("name") is not None:
        device = described.get("device", Hardware().device)
    nodes = job.scheduler.nodes
    if device == "cuda" and not num_gpus and not (nodes and nodes.gives_gpus(job.settings)):
        key = f"cluster.{job.scheduler.name}.gpus_per_node"
        yield Problem(
            key=key,
            expected="GPUs for the ranks of a job on cuda, which asks for none",
            fix=f"set it, as in {key}=8, or set cluster.device=cpu",
        )
