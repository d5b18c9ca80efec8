"""How many ranks there are, where, with how much memory, and what each of them is fed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from colotrain.config.batch import Batch, Sizes, solve
from colotrain.config.machine import Machine
from colotrain.config.schema import Config
from colotrain.config.schema_cluster import Cluster
from colotrain.config.sizes import check_size, parse_size
from colotrain.errors import Problem, suggest

MOST_CPU_RANKS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The ranks of a run, and the memory each has."""

    nodes: int
    procs_per_node: int
    device: str
    memory_bytes: int

    @property
    def world(self) -> int:
        return self.nodes * self.procs_per_node


def scale_out(
    settings: Config, machine: Machine, problems: list[Problem]
) -> tuple[Scale, Batch | None]:
    """Ranks and batch, which follow from one another. After a problem the scale is a guess."""
    cluster = settings.cluster
    device = machine.device if cluster.device == "auto" else cluster.device
    problems += _check_device(cluster, device, machine)
    problems += _check_profile(settings)
    profile = cluster.profile
    default = ranks_here(device, machine)
    if profile.name is not None and device == "cuda" and machine.num_devices == 0:
        default = (profile.devices_per_node, profile.devices_per_node)
    batch = _solve(settings, default, problems)
    nodes = max(1, cluster.nodes)
    procs = 0 if cluster.procs_per_node == "auto" else cluster.procs_per_node
    if cluster.procs_per_node == "auto":
        procs = batch.world // nodes if batch else default[0]
    procs = max(1, procs)
    memory_bytes = _memory_bytes(cluster, device, procs, machine, problems)
    scale = Scale(nodes=nodes, procs_per_node=procs, device=device, memory_bytes=memory_bytes)
    return scale, batch


def _check_device(cluster: Cluster, device: str, machine: Machine) -> Iterator[Problem]:
    key = "cluster.device"
    if device not in ("cpu", "cuda"):
        fix = suggest(device, ("auto", "cpu", "cuda"))
        yield Problem(key=key, value=device, expected="auto, cpu or cuda", fix=fix)
    elsewhere = cluster.profile.name is not None
    here = machine.num_devices > 0 or elsewhere
    if device == "cuda" and not here and cluster.procs_per_node == "auto":
        fix = "set cluster.device=cpu, or cluster.procs_per_node and cluster.memory"
        yield Problem(key=key, value=device, expected="a GPU that torch can use", fix=fix)


def _check_profile(settings: Config) -> Iterator[Problem]:
    """A profile has all of its figures, or none."""
    profile, precision = settings.cluster.profile, settings.train.precision
    if profile.name is None:
        return
    key = "cluster.profile"
    if precision not in profile.tflops:
        known = ", ".join(profile.tflops) or "none"
        fix = f"train.precision is one of those it has, or set {key}.tflops={{{precision}:N}}"
        yield Problem(key=f"{key}.tflops", expected=f"a peak in {precision} (has {known})", fix=fix)
    for name in ("memory_gb_per_s", "link_gb_per_s", "node_gb_per_s"):
        if getattr(profile, name) <= 0:
            fix = f"set {key}.{name} as in conf/cluster/a100-80g.yaml"
            yield Problem(key=f"{key}.{name}", expected="a number above 0", fix=fix)
    for name, value in profile.tflops.items():
        if value <= 0:
            yield Problem(key=f"{key}.tflops.{name}", value=value, expected="a number above 0")


def ranks_here(device: str, machine: Machine) -> tuple[int, int]:
    """How many ranks a machine starts unasked, and how many it may be asked for by arithmetic."""
    if device == "cuda":
        return max(1, machine.num_devices), max(1, machine.num_devices)
    return min(machine.num_cores, MOST_CPU_RANKS), 2 * machine.num_cores


def _solve(settings: Config, ranks: tuple[int, int], problems: list[Problem]) -> Batch | None:
    train, cluster, steps = settings.train, settings.cluster, settings.accumulate.steps
    unknown = train.global_batch is None and train.micro_batch is None
    has_model = settings.model.target is not None or settings.model.hf is not None
    if unknown and (not has_model or touches(problems, ("recipe",))):
        return None  # they would have come with the recipe
    if touches(problems, ("train.global_batch", "train.micro_batch", "accumulate", "cluster")):
        return None
    found = solve(
        Sizes(
            global_batch=train.global_batch,
            micro_batch=train.micro_batch,
            accumulation=None if steps == "auto" else steps,
            procs_per_node=None if cluster.procs_per_node == "auto" else cluster.procs_per_node,
            nodes=cluster.nodes,
            default_procs=ranks[0],
            most_procs=ranks[1],
        )
    )
    if isinstance(found, Problem):
        problems.append(found)
        return None
    return found


def touches(problems: Sequence[Problem], keys: Sequence[str]) -> bool:
    """Whether something is wrong at one of the keys, or below it."""
    return any(p.key == key or p.key.startswith(f"{key}.") for p in problems for key in keys)


def _memory_bytes(
    cluster: Cluster, device: str, procs: int, machine: Machine, problems: list[Problem]
) -> int:
    """Memory of one rank: its GPU's, or an equal part of the host's."""
    whole = machine.device_memory_bytes if device == "cuda" else machine.host_memory_bytes // procs
    if cluster.memory == "auto":
        if whole == 0:
            fix = "for example cluster.memory=80GiB"
            expected = "the memory of a GPU (it could not be found out)"
            problems.append(Problem(key="cluster.memory", expected=expected, fix=fix))
        return whole
    wrong = list(check_size("cluster.memory", cluster.memory, whole))
    problems += wrong
    return whole if wrong else parse_size(cluster.memory, whole=whole)
