"""Checks of this machine: torch, devices, memory, limits."""

from __future__ import annotations

import importlib.metadata
import math
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from colotrain import host
from colotrain.doctor.finding import Environment, Finding, fail, graded, ok, size, warn
from colotrain.spec.installed_torch import torch_version

OLDEST_TORCH, NEWEST_TORCH = (2, 11), (2, 13)
TORCH_FIX = "pip install 'torch>=2.11,<2.14'"
GIB = 1 << 30
FEW_FILES, TOO_FEW_FILES = 4096, 512
FEW_PROCESSES, TOO_FEW_PROCESSES = 4096, 256


def check_torch(_: Environment) -> Iterator[Finding]:
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        yield fail("torch", "torch is not installed", TORCH_FIX)
        return
    if not OLDEST_TORCH <= (torch_version() or (0, 0)) <= NEWEST_TORCH:
        known = " to ".join(".".join(map(str, each)) for each in (OLDEST_TORCH, NEWEST_TORCH))
        yield fail("torch", f"torch {version}: the engine knows {known}", TORCH_FIX)
        return
    try:
        import torch
        import torch.distributed as dist
    except Exception as error:  # a broken installation fails in many ways
        yield fail("torch", f"torch {version} cannot be imported: {error}", "install it again")
        return
    backends = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    names = [name for name, there in backends.items() if there]
    if "gloo" not in names:
        yield fail("torch", f"torch {version} has no gloo", "install torch from its own index")
        return
    yield ok("torch", f"torch {version}, backends {', '.join(names)}")
    yield from _check_gpus(torch.cuda.is_available(), torch.version.cuda or "", "nccl" in names)


def _check_gpus(usable: bool, cuda: str, nccl: bool) -> Iterator[Finding]:
    driver = _driver()
    present = driver is not None or Path("/proc/driver/nvidia/gpus").is_dir()
    if usable:
        import torch

        names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
        what = f"{torch.cuda.device_count()} × {', '.join(sorted(names))}"
        yield ok("gpus", f"{what}, driver {driver or 'unknown'}, CUDA {cuda}")
        if not nccl:
            yield fail("gpus", "this torch has no NCCL", "install torch for CUDA")
    elif present and not cuda:
        fix = "install torch for CUDA (https://pytorch.org), or set cluster.device=cpu"
        yield warn("gpus", "there are GPUs, and this torch is built for CPU alone", fix)
    elif present:
        fix = f"a driver for CUDA {cuda}; see `nvidia-smi` (now {driver or 'without an answer'})"
        yield fail("gpus", "there are GPUs that torch cannot use", fix)
    else:
        yield ok("gpus", "none; runs use the CPU")


def _driver() -> str | None:
    """The driver's version, from nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.split()), None)


def check_memory(_: Environment) -> Iterator[Finding]:
    free = host.free_bytes()
    text, fix = f"{size(free)} of {size(host.memory_bytes())} are free", "end what uses it"
    ask = f"{fix}: a worker needs 0.3 GiB before its model"
    larger = f"{fix}, or take a larger machine"
    yield graded("memory", free, text, larger, least=GIB // 2, few=2 * GIB, ask=ask)


def check_load(_: Environment) -> Iterator[Finding]:
    cores, load = os.cpu_count() or 1, os.getloadavg()[0]
    text = f"{cores} cores, load {load:.1f}"
    if load > 2 * cores:
        yield warn("cpu", text, "others use this machine: `top` shows who")
    else:
        yield ok("cpu", text)


def check_limits(_: Environment) -> Iterator[Finding]:
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{_count(files)} open files (at most {_count(most)})"
    fix = "`ulimit -n 65536` before the run, or LimitNOFILE of slurmd on the nodes"
    yield graded("open files", _bounded(files), text, fix, least=TOO_FEW_FILES, few=FEW_FILES)
    processes, _hard = resource.getrlimit(resource.RLIMIT_NPROC)
    text, fix = f"{_count(processes)} processes and threads", "`ulimit -u`, or ask the site"
    least, few = TOO_FEW_PROCESSES, FEW_PROCESSES
    yield graded("processes", _bounded(processes), text, fix, least=least, few=few)
    locked, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if Path("/sys/class/infiniband").is_dir() and locked != resource.RLIM_INFINITY:
        text = f"only {size(locked)} may be locked, and InfiniBand locks its buffers"
        yield warn("locked memory", text, "`ulimit -l unlimited`, or LimitMEMLOCK of slurmd")


def _bounded(limit: int) -> float:
    return math.inf if limit == resource.RLIM_INFINITY else limit


def _count(limit: int) -> str:
    return "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}"


def check_shared_memory(env: Environment) -> Iterator[Finding]:
    try:
        free = shutil.disk_usage(env.shm).free
    except OSError as error:
        yield warn("/dev/shm", f"{env.shm}: {error}", "mount a tmpfs there")
        return
    if free < 64 << 20:
        fix = "start the container with --shm-size=8g (NCCL and data loaders need it)"
        yield warn("/dev/shm", f"{size(free)} are free in {env.shm}", fix)
    else:
        yield ok("/dev/shm", f"{size(free)} are free")
