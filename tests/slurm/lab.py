"""A real SLURM on one machine: slurmctld and two or more slurmd on loopback, in a folder."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "squeue", "scontrol", "scancel")
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
START_S = 40.0
MUNGE_SOCKET = Path("/run/munge/munge.socket.2")
CONFIG = """\
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5
SlurmctldParameters=preempt_send_user_signal
SlurmctldPort={controller_port}
StateSaveLocation={lab}/state
SlurmdSpoolDir={lab}/spool/%n
SlurmctldPidFile={lab}/run/slurmctld.pid
SlurmdPidFile={lab}/run/slurmd.%n.pid
SlurmctldLogFile={lab}/log/slurmctld.log
SlurmdLogFile={lab}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/linux
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc={lab}/log/jobcomp.txt
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,sched_min_interval=0,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=30
MinJobAge=3600
SlurmctldTimeout=30
SlurmdTimeout=15
{requeue_exit}
JobRequeue=1
GresTypes=gpu
NodeName=n[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{port}-{last_port}] CPUs=8 \
Boards=1 SocketsPerBoard=1 CoresPerSocket=8 ThreadsPerCore=1 RealMemory={memory_mb} Gres={gres} \
State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
PartitionName=low Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE \
GraceTime=60
"""


def missing() -> str:
    """Why there can be no SLURM here; empty where there can."""
    if os.geteuid() != 0:
        return f"a SLURM of its own needs root, not {getpass.getuser()}"
    lacking = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    return f"not installed: {', '.join(lacking)} (slurm-wlm, munge)" if lacking else ""


@dataclass(frozen=True)
class Lab:
    folder: Path
    nodes: int

    @property
    def config(self) -> Path:
        return self.folder / "slurm.conf"

    def __call__(self, *words: str, timeout_s: float = 20) -> str:
        """One of SLURM's commands; what it prints."""
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=timeout_s, env=self.environment
        )
        return done.stdout

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.config), "PATH": PATH}

    def pid(self, name: str) -> int:
        return int((self.folder / "run" / f"{name}.pid").read_text())

    def start_node(self, number: int) -> None:
        words = ["slurmd", "-f", str(self.config), "-N", f"n{number}"]
        subprocess.run(words, check=True, env=self.environment, timeout=20)

    def kill_node(self, number: int) -> None:
        """As a machine that dies: its slurmd, and all that it has started."""
        pid = self.pid(f"slurmd.n{number}")
        started = [p for p in _descendants(pid) if p != pid]
        steps = [p for p in _processes("slurmstepd") if _of_node(p, f"n{number}")]
        os.kill(pid, signal.SIGKILL)
        for victim in [*started, *[c for p in steps for c in _descendants(p)]]:
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)

    def wait_idle(self, timeout_s: float = START_S) -> None:
        deadline = time.monotonic() + timeout_s
        while (
            self("sinfo", "-h", "-N", "-p", "main", "-o", "%T").split().count("idle") < self.nodes
        ):
            if time.monotonic() > deadline:
                raise TimeoutError(self("sinfo", "-N", "-l") + self("squeue"))
            time.sleep(0.2)

    def state(self, job: str) -> str:
        return self._of(job, "JobState")

    def _of(self, job: str, key: str) -> str:
        """One of the values that SLURM shows for a job; they stand on one line."""
        text = self("scontrol", "show", "job", "-o", job)
        return text.partition(f" {key}=")[2].partition(" ")[0]

    def log(self, job: str) -> str:
        path = Path(self._of(job, "StdOut"))
        return path.read_text() if path.is_file() else ""

    def wait_for(self, job: str, *states: str, timeout_s: float = 120) -> str:
        deadline = time.monotonic() + timeout_s
        while (now := self.state(job)) not in states:
            if time.monotonic() > deadline:
                raise TimeoutError(f"job {job} is {now}, not {states}\n{self.log(job)}")
            time.sleep(0.3)
        return now


@contextmanager
def running(
    folder: Path,
    *,
    nodes: int = 2,
    requeue_exit: bool = True,
    gres: str = "gpu:4",
    memory_mb: int = 8000,
) -> Iterator[Lab]:
    """SLURM in `folder`, until the end of the block; its jobs are cancelled then.

    Its nodes claim to have `gres`, `gpu:TYPE:NUMBER`, and `memory_mb` each.
    """
    for name in ("state", "spool", "log", "run"):
        (folder / name).mkdir(parents=True)
    *_, kind, num_gpus = gres.split(":")
    for number in range(int(num_gpus)):
        os.mknod(folder / f"fakegpu{number}", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    typed = "" if kind == "gpu" else f"Type={kind} "
    files = f"File={folder}/fakegpu[0-{int(num_gpus) - 1}]"
    (folder / "gres.conf").write_text(f"NodeName=n[1-{nodes}] Name=gpu {typed}{files}\n")
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    base = _free_ports(nodes + 1)
    lab = Lab(folder, nodes)
    text = CONFIG.format(
        host=socket.gethostname(),
        lab=folder,
        nodes=nodes,
        controller_port=base,
        port=base + 1,
        last_port=base + nodes,
        requeue_exit="RequeueExit=85" if requeue_exit else "",
        gres=gres,
        memory_mb=memory_mb,
    )
    lab.config.write_text(text)
    with _munge():
        try:
            words = ["slurmctld", "-f", str(lab.config), "-i"]
            subprocess.run(words, check=True, env=lab.environment, timeout=20)
            for number in range(1, nodes + 1):
                lab.start_node(number)
            lab.wait_idle()
            yield lab
        finally:
            _stop(lab)


def _stop(lab: Lab) -> None:
    with suppress(subprocess.SubprocessError):
        lab("scancel", "--state=PENDING")
        lab("scancel", "--full", "--signal=KILL", *lab("squeue", "-h", "-o", "%A").split())
        lab("scancel", *lab("squeue", "-h", "-o", "%A").split())
        deadline = time.monotonic() + 15
        while lab("squeue", "-h").strip() and time.monotonic() < deadline:
            time.sleep(0.2)
    for name in [*(f"slurmd.n{n}" for n in range(1, lab.nodes + 1)), "slurmctld"]:
        with suppress(OSError, ValueError):
            pid = lab.pid(name)
            os.kill(pid, signal.SIGTERM)
            _wait_gone(pid)
    for pid in _processes("slurmstepd"):
        if str(lab.folder) in _environment(pid):
            for victim in _descendants(pid):
                with suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)


@contextmanager
def _munge() -> Iterator[None]:
    """munged, which may be running already: then it is left alone."""
    if subprocess.run(["munge", "-n"], capture_output=True, timeout=10).returncode == 0:
        yield
        return
    subprocess.run(
        ["install", "-d", "-o", "munge", "-g", "munge", "-m", "755", "/run/munge"], check=True
    )
    as_munge = ["setpriv", "--reuid=munge", "--regid=munge", "--clear-groups"]
    process = subprocess.Popen(
        [*as_munge, shutil.which("munged", path=PATH) or "munged", "--foreground", "--force"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 20
        while subprocess.run(["munge", "-n"], capture_output=True, timeout=10).returncode:
            assert process.poll() is None, "munged ended"
            assert time.monotonic() < deadline, "munged does not answer"
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        process.wait(timeout=10)


def _free_ports(num: int) -> int:
    """The first of so many neighbours that nobody listens on."""
    for base in range(16800 + os.getpid() % 1000 * 8, 32000, 16):
        with suppress(OSError):
            for port in range(base, base + num):
                socket.create_server(("127.0.0.1", port)).close()
            return base
    raise RuntimeError("no free ports")


def _wait_gone(pid: int, timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        time.sleep(0.05)


def _processes(name: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if name in (entry / "cmdline").read_text("utf-8", "replace").partition(" ")[0]:
                    found.append(int(entry.name))
    return found


def _environment(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/environ").read_text("utf-8", "replace")
    except OSError:
        return ""


def _of_node(pid: int, node: str) -> bool:
    """Whether a slurmstepd belongs to a node: its children are told the node's name."""
    mark = f"SLURMD_NODENAME={node}\0"
    return any(mark in _environment(child) for child in _descendants(pid))


def _descendants(pid: int) -> list[int]:
    """`pid` and all below it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, IndexError, ValueError):
                words = (entry / "stat").read_text().rpartition(")")[2].split()
                children.setdefault(int(words[1]), []).append(int(entry.name))
    found, front = [pid], [pid]
    while front:
        front = [child for parent in front for child in children.get(parent, [])]
        found += front
    return found
