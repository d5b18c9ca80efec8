"""SLURM's commands, each with a timeout: submit, ask, cancel. Their output is not trusted."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import Sequence

from colotrain.errors import ColotrainError, UsageError
from colotrain.schedulers.job import Answers, JobState, NodeKind, Submitted
from colotrain.schedulers.slurm_settings import Slurm

LABEL = "SLURM"
JOB_ID = r"\d{1,20}(_\d{1,10})?"
SUBMIT_S = 60.0
ASK_S = 5.0
GIVES_GPUS = ("gpus", "gpus-per-task", "gpus-per-socket", "tres-per-node", "tres-per-job")
"""Flags of sbatch, besides --gpus-per-node, that give a job GPUs; so does --exclusive."""
MOST_SINGLE = 20
"""Maximum number of jobs that are asked for one by one."""
UNREACHED = (
    *("unable to contact", "communication connection failure", "connection refused"),
    *("could not establish a configuration source", "socket timed out", "zero bytes were"),
)
"""Parts of sbatch's messages when the controller does not answer."""


def test(script: str, slurm: Slurm) -> str:
    """Return what SLURM says about a job without submitting it; raise `UsageError` if refused."""
    done = _run(["sbatch", "--test-only"], text=script, timeout_s=SUBMIT_S)
    said = _said(done)
    if done.returncode:
        _check_reached(said)
        raise UsageError(f"SLURM refuses the job: {said}", "see `sinfo` for what there is")
    return said


def submit(script_file: str, slurm: Slurm) -> str:
    """Submit a script to SLURM; return the job's id."""
    done = _run(["sbatch", "--parsable", script_file], timeout_s=SUBMIT_S)
    found = re.match(r"(\d+)", done.stdout.strip())
    if done.returncode or found is None:
        _check_reached(_said(done))
        raise UsageError(f"SLURM refuses the job: {_said(done)}", f"its script is {script_file}")
    return found[1]


def _check_reached(said: str) -> None:
    if re.search("|".join(UNREACHED), said, re.IGNORECASE):
        problem = f"SLURM cannot be reached from here ({said.rpartition('; ')[2]})"
        raise UsageError(problem, "`--dry-run` prints the script")


def cancel(submitted: Submitted) -> None:
    """Remove a job from the queue, or end it."""
    job = submitted.job
    done = _run(["scancel", "--", job], timeout_s=ASK_S * 2)
    if done.returncode and "already" not in done.stderr and "Invalid job id" not in done.stderr:
        raise ColotrainError(f"job {job}: {_said(done)}", f"try `scancel {job}`")


def log_command(job: Submitted, *, lines: int, follow: bool) -> None:
    """Return None: the run's folder has the job's log."""


def _run(
    words: list[str], *, text: str | None = None, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            words, input=text, capture_output=True, text=True, timeout=timeout_s, errors="replace"
        )
    except FileNotFoundError as error:
        raise UsageError(
            f"{words[0]}: SLURM's commands are not here",
            "submit from a login node of the cluster, or use `colotrain run`",
        ) from error
    except subprocess.TimeoutExpired as error:
        raise ColotrainError(
            f"{words[0]}: no answer within {timeout_s:.0f} s", "is slurmctld up? try `sinfo`"
        ) from error


def _said(done: subprocess.CompletedProcess[str]) -> str:
    lines = [
        re.sub(r"^\w+: ((error|fatal): )?", "", line).strip()
        for line in (done.stderr or done.stdout).splitlines()
        if line.strip()
    ]
    return "; ".join(lines) or f"exit code {done.returncode}"


def ask(jobs: Sequence[Submitted]) -> Answers:
    """Return the states of jobs, from squeue, then scontrol, then sacct for those still missing."""
    answers, wanted = Answers(), {submitted.job for submitted in jobs}
    for command in (_squeue, _scontrol, _sacct):
        missing = sorted(wanted - set(answers.states))
        if not missing:
            break
        try:
            answers.states |= command(missing)
        except ColotrainError as error:
            answers.trouble = answers.trouble or str(error)
            if isinstance(error, UsageError):  # SLURM is not installed here
                break
    return answers


def _squeue(jobs: list[str]) -> dict[str, JobState]:
    """Ask for all jobs at once; `--array` gives waiting array elements a line each."""
    numbers = ",".join(sorted({job.partition("_")[0] for job in jobs}))
    words = ["squeue", "--noheader", "--array", "--states=all", f"--jobs={numbers}"]
    done = _run([*words, "--format=%i|%T|%r"], timeout_s=ASK_S)
    found = {}
    for line in done.stdout.splitlines():
        job, _, rest = line.strip().partition("|")
        state, _, reason = rest.partition("|")
        if job in jobs:
            found[job] = JobState(state=state, reason=_reason(reason), asked="squeue")
    return found


def _scontrol(jobs: list[str]) -> dict[str, JobState]:
    found = {}
    for job in jobs[:MOST_SINGLE]:
        done = _run(["scontrol", "show", "job", "-o", job], timeout_s=ASK_S)
        pairs = dict(re.findall(r"(\w+)=(\S*)", done.stdout))
        if "JobState" in pairs:
            reason = _reason(pairs.get("Reason", ""))
            found[job] = JobState(state=pairs["JobState"], reason=reason, asked="scontrol")
    return found


def _sacct(jobs: list[str]) -> dict[str, JobState]:
    """Ask sacct, with accounting or else from the file of ended jobs that `-c` reads."""
    columns = ["--noheader", "--parsable2", "--format=JobID,State", f"--jobs={','.join(jobs)}"]
    found: dict[str, JobState] = {}
    for words in (["sacct", "-X", *columns], ["sacct", "-c", *columns]):
        done = _run(words, timeout_s=ASK_S)
        for line in done.stdout.splitlines():
            job, _, state = line.partition("|")
            if job in jobs and state:
                found[job] = JobState(state=state.split()[0], asked="sacct")
        if found:
            break
    return found


def _reason(text: str) -> str:
    return "" if text in ("None", "(null)") else text


def node_kinds(partition: str | None = None) -> list[NodeKind]:
    """Ask sinfo which nodes a partition has (None: the default one; several: with commas).

    Empty if there is no such partition; raises `ColotrainError` if SLURM does not answer.
    """
    words = ["sinfo", "--noheader", "--exact", "--format=%D|%P|%X|%Y|%m|%G"]
    done = _run([*words, *([f"--partition={partition}"] if partition else [])], timeout_s=ASK_S)
    if done.returncode:
        raise ColotrainError(f"sinfo: {_said(done)}", "is slurmctld up? try `sinfo`")
    found = []
    for line in done.stdout.splitlines():
        nodes, name, sockets, cores, megabytes, gres = [*line.strip().split("|"), *[""] * 6][:6]
        if not partition and not name.endswith("*"):  # the asterisk marks the default partition
            continue
        gpu_type, num_gpus = gpus_of(gres)
        found.append(
            NodeKind(
                num_nodes=_count(nodes),
                num_cores=_count(sockets) * _count(cores),
                memory_bytes=_count(megabytes) << 20,
                gpu_type=gpu_type,
                num_gpus=num_gpus,
            )
        )
    return found


def gpus_of(gres: str) -> tuple[str, int]:
    """Return type and number of the GPUs in a gres list such as `gpu:h100:8(S:0-1),nvme:2`."""
    for resource in re.sub(r"\([^)]*\)", "", gres).split(","):
        name, *rest = resource.strip().split(":")
        if name == "gpu":
            number = int(rest.pop()) if rest and rest[-1].isdigit() else 1
            return ":".join(rest), number
    return "", 0


def asked_gpus(slurm: Slurm) -> tuple[str, int]:
    """Return type and number per node of the requested GPUs; `("", 0)` if none are requested.

    A setting is `8`, `h100:8`, `gpu:8`, `gpu:h100:8` or a list of resources with one of these.
    """
    if slurm.gpus_per_node is not None:
        return gpus_of(f"gpu:{slurm.gpus_per_node}")
    return gpus_of(slurm.gres or "")


def gives_gpus(slurm: Slurm) -> bool:
    """Whether flags without a key of their own give the job GPUs."""
    flags = (*GIVES_GPUS, "exclusive")
    return isinstance(slurm.extra, dict) and any(slurm.extra.get(name) for name in flags)


def on_every_node(words: list[str]) -> list[str]:
    """Return the srun command that runs `words` once on each node of this job."""
    num_nodes = os.environ.get("SLURM_NNODES", "1")
    return ["srun", "--ntasks-per-node=1", f"--ntasks={num_nodes}", *words]


def first_address() -> str:
    """Return the address at which SLURM reaches this job's first node."""

    def said(*words: str) -> str:
        done = subprocess.run(["scontrol", *words], capture_output=True, text=True, timeout=10)
        return done.stdout

    try:
        first = said("show", "hostnames", os.environ.get("SLURM_JOB_NODELIST", "")).split()[0]
        found = re.search(r"NodeAddr=(\S+)", said("show", "node", first))
        return found[1] if found else first
    except (OSError, IndexError, subprocess.SubprocessError):
        return socket.gethostname()


def _count(text: str) -> int:
    found = re.match(r"\d+", text)
    return int(found[0]) if found else 0
