"""Number of ranks, their device and memory, and their part of the batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from colotrain.config.schema import Config, Mesh
from colotrain.config.schema_cluster import Cluster
from colotrain.config.sizes import check_size, parse_size
from colotrain.errors import Problem, suggest
from colotrain.planner.hardware import Hardware, Sheet, from_sheet, typical_cpu
from colotrain.planner.layout import Layout
from colotrain.planner.machine import Machine
from colotrain.planner.rates import hardware_of, known
from colotrain.spec.axes import DP_REPLICATE, DP_SHARD, MeshPlan, Ranks
from colotrain.spec.batch import Sizes, solve
from colotrain.spec.pipeline_schedule import DEFAULT_CHUNKS
from colotrain.spec.plan import BatchPlan, ClusterPlan
from colotrain.spec.sequence import BlockSequence

MOST_CPU_RANKS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale(ClusterPlan):
    """The ranks of a run, what each has of its machine, and how they divide the model."""

    mesh: MeshPlan
    sequence: BlockSequence = field(default_factory=BlockSequence)
    """The model's blocks, where stages divide them."""

    @property
    def world(self) -> int:
        return self.nodes * self.procs_per_node

    @property
    def copies(self) -> int:
        """Ranks of a stage, or tensor-parallel groups of them: those in the plugin's mesh."""
        return self.ranks.size(DP_REPLICATE, DP_SHARD)

    @property
    def ranks(self) -> Ranks:
        """The arrangement of the ranks, without replicas."""
        return Ranks.of(self.mesh, world=self.world)


def scale_out(
    settings: Config, machine: Machine, problems: list[Problem]
) -> tuple[Scale, BatchPlan | None]:
    """Ranks and batch, computed together. After a problem the batch is None, the scale a guess."""
    cluster = settings.cluster
    hardware = settings.hardware
    device = cluster.device
    if device == "auto":
        device = machine.device if hardware.name is None else hardware.device
    problems += _check_device(settings, device, machine)
    problems += _check_hardware(settings)
    default = ranks_here(device, machine)
    if hardware.name is not None and device == "cuda" and machine.num_devices == 0:
        default = (hardware.devices_per_node, hardware.devices_per_node)
    mesh = _mesh(settings.mesh)
    problems += _check_mesh(settings.cluster, mesh, most_procs=default[1])
    batch = _solve(settings, mesh, default, problems)
    nodes = max(1, cluster.nodes)
    procs = 0 if cluster.procs_per_node == "auto" else cluster.procs_per_node
    if cluster.procs_per_node == "auto":
        procs = batch.data_parallel * mesh.together // nodes if batch else default[0]
    procs = max(1, procs)
    scale = Scale(
        nodes=nodes,
        procs_per_node=procs,
        device=device,
        threads_per_rank=machine.threads_of(procs),
        memory_bytes=_memory_bytes(settings, device, procs, machine, problems),
        threads_set_by=machine.threads_set_by,
        mesh=mesh,
    )
    return scale, batch


def _check_device(settings: Config, device: str, machine: Machine) -> Iterator[Problem]:
    cluster, key = settings.cluster, "cluster.device"
    if device not in ("cpu", "cuda"):
        fix = suggest(device, ("auto", "cpu", "cuda"))
        yield Problem(key=key, value=device, expected="auto, cpu or cuda", fix=fix)
    elsewhere = settings.hardware.name is not None
    here = machine.num_devices > 0 or elsewhere
    if device == "cuda" and not here and cluster.procs_per_node == "auto":
        fix = "set cluster.device=cpu, or plan for another machine as with hardware=h100"
        yield Problem(key=key, value=device, expected="a GPU that torch can use", fix=fix)


def _check_hardware(settings: Config) -> Iterator[Problem]:
    """Problems of described hardware with some, but not all, of the figures that timing needs."""
    hardware, precision = settings.hardware, settings.train.precision
    if hardware.name is None:
        return
    yield from (
        check_size("hardware.memory", hardware.memory, 0) if hardware.memory != "auto" else ()
    )
    if hardware.devices_per_node < 1:
        yield Problem(
            key="hardware.devices_per_node", value=hardware.devices_per_node, expected="1 or more"
        )
    rates = ("memory_gb_per_s", "link_gb_per_s", "node_gb_per_s")
    if not hardware.is_timed and not any(getattr(hardware, name) for name in rates):
        return
    if precision not in hardware.tflops:
        known = ", ".join(hardware.tflops) or "none"
        fix = f"train.precision is one of those it has, or set hardware.tflops={{{precision}:N}}"
        expected = f"a peak in {precision} (has {known})"
        yield Problem(key="hardware.tflops", expected=expected, fix=fix)
    for name in rates:
        if getattr(hardware, name) <= 0:
            fix = f"set hardware.{name} as in conf/hardware/a100-80g.yaml"
            yield Problem(key=f"hardware.{name}", expected="a number above 0", fix=fix)
    for name, value in hardware.tflops.items():
        if value <= 0:
            yield Problem(key=f"hardware.tflops.{name}", value=value, expected="a number above 0")


def _check_mesh(cluster: Cluster, mesh: MeshPlan, *, most_procs: int) -> Iterator[Problem]:
    """Problem of ranks that cannot be divided into groups with the same samples.

    The stages of a group may be on different nodes; what else divides samples may not.
    """
    procs, nodes = cluster.procs_per_node, cluster.nodes
    axes = mesh.above_one or {"mesh.tp": 1}
    inside = dataclasses.replace(mesh, pp=1)
    if nodes > 1 and not _holds_groups(procs, most_procs, inside.unit(nodes)):
        nodes, mesh, axes = 1, inside, inside.above_one
    if _holds_groups(procs, most_procs, mesh.unit(max(1, nodes))):
        return
    key, size = " × ".join(axes), " × ".join(map(str, axes.values()))
    if procs == "auto":
        expected = f"at most {most_procs}, as many ranks as a node gets here"
        if nodes > 1:
            expected = f"what {nodes} nodes of at most {most_procs} ranks share evenly"
        fix = "lower it, or set cluster.procs_per_node"
        yield Problem(key=key, value=size, expected=expected, fix=fix)
        return
    whole = max(1, nodes) * procs
    ranks = (
        f"{whole}, the ranks of {nodes} nodes" if nodes > 1 else f"cluster.procs_per_node={procs}"
    )
    expected = f"a divisor of {ranks}"
    sizes = ", ".join(str(n) for n in range(1, whole + 1) if whole % n == 0)
    yield Problem(key=key, value=size, expected=expected, fix=f"one of {sizes}")


def _holds_groups(procs: int | str, most_procs: int, unit: int) -> bool:
    """Whether each node's ranks are a multiple of `unit`, or can be."""
    return procs < 1 or procs % unit == 0 if isinstance(procs, int) else unit <= most_procs


def _mesh(mesh: Mesh) -> MeshPlan:
    """The axes beside the plugin's; 1 for sizes that are refused."""
    interleaved = mesh.pp > 1 and mesh.pp_schedule == "interleaved"
    chunks = max(1, mesh.pp_chunks or DEFAULT_CHUNKS) if interleaved else 1
    return MeshPlan(
        pp=max(1, mesh.pp),
        pp_chunks=chunks,
        cp=max(1, mesh.cp),
        tp=max(1, mesh.tp),
        ep=max(1, mesh.ep),
        sequence_parallel=mesh.sequence_parallel and mesh.tp > 1,
    )


def ranks_here(device: str, machine: Machine) -> tuple[int, int]:
    """Number of ranks that a machine starts by default, and the most that a batch may imply."""
    if device == "cuda":
        return max(1, machine.num_devices), max(1, machine.num_devices)
    return min(machine.num_cores, MOST_CPU_RANKS), 2 * machine.num_cores


def _solve(
    settings: Config, mesh: MeshPlan, ranks: tuple[int, int], problems: list[Problem]
) -> BatchPlan | None:
    train, cluster, steps = settings.train, settings.cluster, settings.accumulate.steps
    unknown = train.global_batch is None and train.micro_batch is None
    has_model = settings.model.target is not None or settings.model.hf is not None
    if unknown and (not has_model or touches(problems, ("recipe",))):
        return None  # a valid recipe would have set them
    sized = ("train.global_batch", "train.micro_batch", "accumulate", "cluster", "mesh")
    if touches(problems, sized):
        return None
    if train.micro_batch == "auto" and train.global_batch is None:
        expected = "a size, of which train.micro_batch=auto takes a part"
        problems.append(Problem(key="train.global_batch", value=None, expected=expected))
        return None
    procs = cluster.procs_per_node
    found = solve(
        Sizes(
            global_batch=train.global_batch,
            micro_batch=None if train.micro_batch == "auto" else train.micro_batch,
            accumulation_steps=None if steps == "auto" else steps,
            procs_per_node=None if procs == "auto" else procs,
            nodes=cluster.nodes,
            mesh=mesh,
            default_procs=ranks[0],
            most_procs=ranks[1],
        )
    )
    if isinstance(found, Problem):
        problems.append(found)
        return None
    return found


def touches(problems: Sequence[Problem], keys: Sequence[str]) -> bool:
    """Whether there is a problem at one of the keys, or below it."""
    return any(p.key == key or p.key.startswith(f"{key}.") for p in problems for key in keys)


def _memory_bytes(
    settings: Config, device: str, procs: int, machine: Machine, problems: list[Problem]
) -> int:
    """Bytes of memory per rank: its GPU's, or an equal share of the host's; 0 where unknown."""
    cluster, described = settings.cluster, settings.hardware.memory
    whole = machine.device_memory_bytes if device == "cuda" else machine.host_memory_bytes // procs
    if settings.hardware.name is not None and described != "auto" and device != "cpu":
        whole = whole if touches(problems, ("hardware.memory",)) else parse_size(described)
    if cluster.memory == "auto":
        return whole
    wrong = list(check_size("cluster.memory", cluster.memory, whole))
    problems += wrong
    return whole if wrong else parse_size(cluster.memory, whole=whole)


def timed_hardware(
    settings: Config, scale: Scale, machine: Machine
) -> Callable[[Layout], Hardware] | None:
    """Function from layout to hardware: as described, as measured here, or typical CPU cores."""
    described, train = settings.hardware, settings.train
    if described.name is not None and described.is_timed and scale.device != "cpu":
        fp32 = "tf32" if train.tf32 and "tf32" in described.tflops else "fp32"
        precision = fp32 if train.precision == "fp32" else train.precision
        sheet = Sheet(
            name=described.name,
            peak_flops=described.tflops[precision] * 1e12,
            memory_bytes_per_s=described.memory_gb_per_s * 1e9,
            link_bytes_per_s=described.link_gb_per_s * 1e9,
            node_bytes_per_s=described.node_gb_per_s * 1e9,
        )
        procs, parts = scale.procs_per_node, scale.mesh.parts
        return lambda layout: from_sheet(sheet, layout, procs_per_node=procs, parts=parts)
    if scale.device != "cpu":
        return None
    ranks, precision = scale.procs_per_node, train.precision
    measured = known(cores=machine.cores_used(ranks), ranks=ranks, precision=precision)
    typical = typical_cpu(threads=scale.threads_per_rank, precision=precision)
    here = typical if measured is None else hardware_of(measured)
    return lambda layout: here
