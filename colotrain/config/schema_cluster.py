"""What a user may write about machines: `cluster`, with the job for SLURM, and `hardware`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from colotrain.config.sizes import Size


@dataclass(frozen=True, slots=True, kw_only=True)
class Slurm:
    """The job that `colotrain submit` hands to SLURM; what is null is left to the site."""

    partition: str | None = None
    """Partition, or several with commas between."""
    account: str | None = None
    """Account that is charged."""
    qos: str | None = None
    """Quality of service."""
    time: str | int | None = None
    """Time limit: minutes, `HH:MM:SS` or `D-HH:MM:SS`."""
    gpus_per_node: int | str | None = None
    """GPUs on each node (`8`, `h100:8`): as many ranks, unless `cluster.procs_per_node` is set."""
    gres: str | None = None
    """Generic resources of each node, where a site has no `gpus_per_node`: `gpu:8`."""
    cpus_per_task: int | None = None
    """CPUs of each node: one launcher runs there, with all its ranks."""
    memory: str | int | None = None
    """Memory of each node: `64G`; `0` is all of it."""
    exclude: str | None = None
    """Nodes not to use."""
    nodelist: str | None = None
    """Nodes to use."""
    dependency: str | None = None
    """As in `afterok:1234`."""
    constraint: str | None = None
    """Features that nodes must have."""
    reservation: str | None = None
    """Reservation to run in."""
    mail_user: str | None = None
    """Who is told by mail."""
    mail_type: str | None = None
    """Of what: `END,FAIL`."""
    comment: str | None = None
    """Any text."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Any other flag of sbatch, without its dashes: `{exclusive: true, switches: 1}`."""
    setup: list[str] = field(default_factory=list)
    """Lines of shell before the run, as they are written: `module load cuda`."""
    container: list[str] = field(default_factory=list)
    """Words before the command on each node: `[apptainer, exec, --nv, image.sif]`."""
    python: str | None = None
    """The interpreter on the nodes; null: the one that submits."""
    snapshot: bool = False
    """Run from a copy of the git working tree, so that editing code cannot change a queued job."""
    warn_s: int = 60
    """Seconds before the time limit at which the run saves and is queued again."""
    max_requeues: int = 100
    """How often a job that was preempted or ran out of time is queued again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The machines that are planned for, where they are not this one (`hardware=h100`)."""

    name: str | None = None
    """What the device is called; null: what this machine has, or the nodes of a SLURM job."""
    device: str = "cuda"
    """What such a device is to torch, where `cluster.device` is auto."""
    memory: Size = "auto"
    """Memory of one device, as torch sees it: `79.1GiB`."""
    devices_per_node: int = 1
    """Devices of a node, where nothing else says how many."""
    gres: list[str] = field(default_factory=list)
    """What SLURM may call the device, the TYPE of `gpu:TYPE:8`: globs in lower case, with `-` for
    `_`."""
    tflops: dict[str, float] = field(default_factory=dict)
    """Dense peak by precision, in 10^12 operations per second: `{bf16: 312}`; without any figures
    times are not estimated."""
    memory_gb_per_s: float = 0.0
    """Memory bandwidth of a device, in 10^9 bytes per second."""
    link_gb_per_s: float = 0.0
    """What a rank can send to the others of its node, one way."""
    node_gb_per_s: float = 0.0
    """What a node can send to other nodes, one way, over all its adapters."""

    @property
    def is_timed(self) -> bool:
        """Whether it has the figures that times are estimated from."""
        return bool(self.tflops)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Where the run happens."""

    nodes: int = 1
    """Machines."""
    procs_per_node: int | Literal["auto"] = "auto"
    """Ranks per machine; auto: one per GPU, or one per physical core on CPU (at most 8)."""
    device: str = "auto"
    """auto, cpu, or cuda."""
    memory: Size = "auto"
    """Memory a rank may use; auto: the GPU's, or an equal part of the host's."""
    node_rank: int | None = None
    """Several machines started by hand: this one's number, from 0."""
    rdzv_endpoint: str | None = None
    """Several machines started by hand: `HOST:PORT` of machine 0, where the others find it."""
    scheduler: Literal["slurm"] | None = None
    """Who runs the job, so that `plan` plans for its nodes, as `submit` does; null: SLURM where
    `cluster.slurm` asks for anything, otherwise this machine."""
    slurm: Slurm = field(default_factory=Slurm)
    """The job that `colotrain submit` hands to SLURM."""
