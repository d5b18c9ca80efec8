"""A worker as a process: its process group, the requests to stop it, and its first patience."""

from __future__ import annotations

import datetime
import os
import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from colotrain import host
from colotrain.addresses import LOOPBACK, address_towards, serve_store
from colotrain.engine.comms import exchange
from colotrain.engine.comms.notes import round_key
from colotrain.rundir import RunDir
from colotrain.spec.plan import RunPlan

PATIENCE_FACTOR = 5.0
"""Factor on the expected time between two heartbeats, after which a rank counts as silent."""
PCI_DEVICES = Path("/sys/bus/pci/devices")
STARTING_S, COMPILING_S = 600.0, 1800.0
SUSPENDED_S = 24 * 3600.0
"""Seconds for which all processes of a run may be stopped in the middle of a collective."""


def start_patience(plan: RunPlan) -> float:
    """Return the seconds a rank may be silent before its first step: imports, building, compiling.

    The plan may predict that a micro-batch takes longer.
    """
    micro_batch_s = plan.time.step_s / plan.batch.accumulation_steps
    starting_s = COMPILING_S if plan.train.compile else STARTING_S
    return max(plan.elastic.hang_timeout_s, starting_s, PATIENCE_FACTOR * micro_batch_s)


def patience_s(plan: RunPlan, laps: dict[str, float]) -> float:
    """Return the seconds for which a rank may be silent: a micro-batch may take long.

    `laps` are the host's: on a GPU the host is silent while it waits for all that it has queued.
    """
    micro_batch_s = laps["compute_s"] / plan.batch.accumulation_steps
    longest = max(micro_batch_s, laps["reduce_s"], laps["optimizer_s"])
    return max(plan.elastic.hang_timeout_s, PATIENCE_FACTOR * longest)


class StopRequest:
    """Receives requests to save and stop: a signal to this rank, or the run's control file.

    Processes that are forked from this rank (data loaders, the user's own) receive none for it.
    """

    REQUESTS = (signal.SIGTERM, signal.SIGUSR1)

    def __init__(self, rundir: RunDir) -> None:
        self.file = rundir.stop_file
        self.signal: str | None = None
        self.arrived, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # Python's own handlers run between two bytecodes, and a backward may take a minute
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in self.REQUESTS:
            signal.signal(number, self._on_signal)
        os.register_at_fork(after_in_child=self._leave)
        for number in (signal.SIGINT, signal.SIGHUP):  # the launcher handles these
            signal.signal(number, signal.SIG_IGN)

    def _on_signal(self, number: int, _: object) -> None:
        self.signal = signal.Signals(number).name

    def _leave(self) -> None:
        """In a forked process, let signals act as usual, and none of them reach the rank's pipe."""
        signal.set_wakeup_fd(-1)
        for number in self.REQUESTS:
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, signal.SIG_DFL)

    def __call__(self) -> str | None:
        with suppress(BlockingIOError):
            while numbers := os.read(self.arrived, 4096):  # of all signals that have a handler
                for number in self.REQUESTS:
                    if number in numbers:
                        self._on_signal(number, None)
        return self.signal or ("asked to stop" if self.file.exists() else None)


def connect(plan: RunPlan) -> torch.device:
    """Join the process group; every wait in it has a timeout.

    The launchers notice a rank that hangs or a node that is gone earlier, and can name it. A run
    whose processes were all stopped for hours (Ctrl-Z, SLURM's suspend) continues.
    """
    torch.set_num_threads(host.chosen_threads()[0] or plan.cluster.threads_per_rank)
    choose_interface(os.environ["MASTER_ADDR"])
    longest_s = start_patience(plan) + plan.elastic.hang_timeout_s + SUSPENDED_S
    timeout = datetime.timedelta(seconds=longest_s)
    if plan.cluster.device == "cpu":
        dist.init_process_group("gloo", timeout=timeout)
        round_key()
        return torch.device("cpu")
    device = torch.device(plan.cluster.device, int(os.environ["LOCAL_RANK"]))
    torch.accelerator.set_device_index(device.index)
    choose_tf32(plan.train.tf32)
    run_near(device)
    backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    dist.init_process_group(backend, timeout=timeout, device_id=device)
    round_key()
    return device


def choose_tf32(wanted: bool) -> None:
    """Let fp32 products on CUDA use TF32 or not; torch's own default is yes for convolutions."""
    torch.set_float32_matmul_precision("high" if wanted else "highest")
    torch.backends.cudnn.allow_tf32 = wanted


def run_near(device: torch.device) -> None:
    """Keep this process on the cores of its GPU's NUMA node, as far as it may use them."""
    if torch.version.cuda is None:
        return
    with suppress(OSError, ValueError, AttributeError, RuntimeError):
        gpu: Any = torch.cuda.get_device_properties(device)
        address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
        text = (PCI_DEVICES / address / "local_cpulist").read_text()
        if near := cores_of(text) & os.sched_getaffinity(0):
            os.sched_setaffinity(0, near)
            if not host.chosen_threads()[0]:
                torch.set_num_threads(min(torch.get_num_threads(), len(near)))


def cores_of(text: str) -> set[int]:
    """Return the numbers in the kernel's notation of a set of cores, such as `0-15,32-47`."""
    ends = [part.split("-") for part in text.strip().split(",") if part]
    return {core for pair in ends for core in range(int(pair[0]), int(pair[-1]) + 1)}


def choose_interface(store: str) -> None:
    """Let gloo use the interface that reaches the store's host, unless the user chose one.

    By default gloo takes the address of the host's own name, which may be 127.0.1.1.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ or not (own := address_towards(store)):
        return
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.address.partition("%")[0] == own for a in addresses):
            os.environ["GLOO_SOCKET_IFNAME"] = name


def loopback_store(port: int, *, is_master: bool, timeout: datetime.timedelta) -> Any:
    """Join a store of processes of this machine."""
    if is_master:
        return serve_store(socket.create_server((LOOPBACK, port)), timeout=timeout)
    return dist.TCPStore(LOOPBACK, port, is_master=False, timeout=timeout)


def agree_on_attempt(rundir: RunDir) -> int:
    """Return the number of this attempt over all launches of the run, the same on every rank."""
    return int(exchange.broadcast(rundir.next_attempt() if dist.get_rank() == 0 else None))
