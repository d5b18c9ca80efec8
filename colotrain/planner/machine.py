"""Devices, cores and memory of this machine within a container's limits, found without torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import psutil

from colotrain import host
from colotrain.spec.installed_torch import torch_has_cuda

NVIDIA = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Properties of a machine that a plan depends on."""

    device: Literal["cpu", "cuda"]
    num_devices: int
    """GPUs that may be used; 0 on a CPU machine."""
    num_cores: int
    """Physical cores that may be used."""
    host_memory_bytes: int
    """Bytes of host memory, or the container's limit."""
    device_memory_bytes: int
    """Bytes of the smallest GPU's memory; 0 on a CPU machine."""
    host_free_bytes: int = field(default=0, compare=False)
    """Bytes of host memory that are free now; 0 where unknown."""
    threads: int = 0
    """Threads that the user's environment gives each process; 0: cores are divided among ranks."""
    threads_set_by: str = ""
    """The environment variable that says so."""

    def threads_of(self, ranks: int) -> int:
        """Return the threads of each of `ranks` ranks on this machine."""
        return self.threads or max(1, self.num_cores // ranks)

    def warn_of_threads(self, ranks: int) -> Iterator[str]:
        """Yield a warning if each of `ranks` ranks computes with other threads than its share."""
        share = max(1, self.num_cores // ranks)
        if self.threads and self.threads != share:
            yield (
                f"{self.threads_set_by}={self.threads}: each rank computes with as many threads; "
                f"its share of the {self.num_cores} cores is {share}: "
                f"`env -u {self.threads_set_by} colotrain …` takes it"
            )

    def cores_used(self, ranks: int) -> int:
        """Return the cores on which `ranks` ranks compute."""
        return min(self.num_cores, self.threads * ranks) if self.threads else self.num_cores


def this_machine() -> Machine:
    """Describe the machine that this process runs on."""
    gpus = _gpu_memory_bytes() if torch_has_cuda() else []
    threads, variable = host.chosen_threads()
    return Machine(
        device="cuda" if gpus else "cpu",
        num_devices=len(gpus),
        num_cores=_num_cores(),
        host_memory_bytes=host.memory_bytes(),
        device_memory_bytes=min(gpus, default=0),
        host_free_bytes=host.free_bytes(),
        threads=threads,
        threads_set_by=variable,
    )


def _gpu_memory_bytes() -> list[int]:
    """Bytes of memory of each GPU that CUDA_VISIBLE_DEVICES selects, from nvidia-smi."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shutil.which("nvidia-smi") is None:
        count = len(list(NVIDIA.iterdir())) if NVIDIA.is_dir() else 0
        return _visible([(str(i), "", 0) for i in range(count)], visible)
    command = ["nvidia-smi", "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in done.stdout.splitlines()]
    gpus = [(row[0], row[1], _mebibytes(row[2])) for row in rows if len(row) == 3]
    return _visible(gpus, visible)


def _visible(gpus: list[tuple[str, str, int]], visible: str | None) -> list[int]:
    """Memory of the GPUs in CUDA_VISIBLE_DEVICES, as CUDA reads it.

    Entries are indices or UUID prefixes; those after the first that matches no GPU are ignored.
    Parts of a GPU (`MIG-…`) count as devices of unknown memory, 0.
    """
    if visible is None:
        return [memory for _, _, memory in gpus]
    kept = []
    for name in (part.strip() for part in visible.split(",")):
        found = [m for index, uuid, m in gpus if name and (name == index or uuid.startswith(name))]
        if name.startswith("MIG-"):
            found = [0]
        if not found:
            break
        kept.append(found[0])
    return kept


def _mebibytes(text: str) -> int:
    return int(text) << 20 if text.isdigit() else 0


def _num_cores() -> int:
    """Physical cores among the CPUs this process may run on, within the container's share."""
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
    num_cores = len({_core(cpu) for cpu in cpus}) or psutil.cpu_count(logical=False) or 1
    quotas = [int(quota) for quota in map(_cpu_quota, host.cgroups("cpu")) if quota]
    return max(1, min([num_cores, *quotas]))


def _core(cpu: int) -> str:
    """Name of the core of a CPU thread, equal for all threads of the core."""
    file = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    return host.text_of(file) or str(cpu)


def _cpu_quota(folder: Path) -> float | None:
    """Number of cores whose time the control group may use; None without a limit."""

    words = host.text_of(folder / "cpu.max").split() or [
        host.text_of(folder / "cpu.cfs_quota_us"),
        host.text_of(folder / "cpu.cfs_period_us"),
    ]
    if len(words) == 2 and words[0].isdigit() and words[1].isdigit():
        return max(1.0, int(words[0]) / int(words[1]))
    return None
