"""Schema of machines: `cluster`, with the SLURM job, and `hardware`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from colotrain.config.sizes import Size


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Machines that are planned for, if they are not this one (`hardware=h100`)."""

    name: str | None = None
    """Name of the device; null: this machine's devices, or those of a SLURM job's nodes."""
    device: str = "cuda"
    """torch's device type, used if `cluster.device` is auto."""
    memory: Size = "auto"
    """Memory of one device, as torch reports it: `79.1GiB`."""
    devices_per_node: int = 1
    """Devices per node, unless other settings give the number."""
    gres: list[str] = field(default_factory=list)
    """SLURM's names of the device, the TYPE in `gpu:TYPE:8`: lower-case globs, with `-` for `_`."""
    tflops: dict[str, float] = field(default_factory=dict)
    """Dense peak by precision, in 10^12 operations per second: `{bf16: 312}`; if empty, times are
    not estimated."""
    memory_gb_per_s: float = 0.0
    """Memory bandwidth of a device, in 10^9 bytes per second."""
    link_gb_per_s: float = 0.0
    """One-way bandwidth from a rank to the others of its node, in 10^9 bytes per second."""
    node_gb_per_s: float = 0.0
    """One-way bandwidth from a node to other nodes over all adapters, in 10^9 bytes per second."""

    @property
    def is_timed(self) -> bool:
        """Whether it has the peak rates from which times are estimated."""
        return bool(self.tflops)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Nodes and devices of the run."""

    nodes: int = 1
    """Number of nodes."""
    procs_per_node: int | Literal["auto"] = "auto"
    """Ranks per node; auto: one per GPU, or one per physical core on CPU (at most 8)."""
    device: str = "auto"
    """auto, cpu, or cuda."""
    memory: Size = "auto"
    """Memory that a rank may use; auto: the GPU's, or an equal part of the host's."""
    node_rank: int | None = None
    """Rank of this node, from 0, if several nodes are started by hand."""
    rdzv_endpoint: str | None = None
    """`HOST:PORT` at which node 0 listens, if several nodes are started by hand."""
    scheduler: Literal["slurm"] | None = None
    """Scheduler of the run: `plan` plans for its nodes, as `submit` does; null: SLURM if any
    `cluster.slurm` setting is given, otherwise this machine."""
    slurm: Slurm = field(default_factory=Slurm)
    """The job that `colotrain submit` submits to SLURM."""
