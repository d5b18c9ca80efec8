"""Schema of machines: `cluster` and `hardware`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from colotrain.config.sizes import Size
from colotrain.schedulers.dstack import Dstack
from colotrain.schedulers.hosts import Hosts
from colotrain.schedulers.kubernetes import Kubernetes
from colotrain.schedulers.skypilot import SkyPilot
from colotrain.schedulers.slurm_settings import Slurm


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
    scheduler: Literal["slurm", "kubernetes", "skypilot", "dstack", "hosts"] | None = None
    """Scheduler of the run: `plan` plans for its nodes, as `submit` does; null: the first of these
    whose section has a setting that is given, otherwise this machine."""
    slurm: Slurm = field(default_factory=Slurm)
    """The job that `colotrain submit` submits to SLURM."""
    kubernetes: Kubernetes = field(default_factory=Kubernetes)
    """The job that it hands to Kubernetes."""
    skypilot: SkyPilot = field(default_factory=SkyPilot)
    """The task that it launches with SkyPilot."""
    dstack: Dstack = field(default_factory=Dstack)
    """The task that it hands to dstack."""
    hosts: Hosts = field(default_factory=Hosts)
    """The hosts on which it starts a launcher each, by ssh."""
