"""The run directory: all files that a run reads and writes. RunDir defines every path in it."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from colotrain.errors import UsageError, suggest
from colotrain.spec.plan import RunPlan

RUNS = Path("runs")
HOW_TO_START = "start one, as in `colotrain run recipe=llm-tiny`"
OFFLOAD = "offload"
"""Folder of gemini's disk tier inside a run directory, if the user set no other."""
NOISE = "noise"
"""Content of a gradient record request that also asks for the gradient noise."""


class _At:
    """An attribute of `RunDir`: a path inside the run directory."""

    def __init__(self, inside: str) -> None:
        self.inside = inside

    def __get__(self, rundir: RunDir, _: type[RunDir]) -> Path:
        return rundir.path / self.inside


class RunDir:
    """Paths of one run. No other class or function joins file names of a run."""

    plan_file = _At("plan.json")
    summary_file = _At("summary.json")
    launcher_file = _At("launcher.json")
    """Identity of the launcher: host, process id and its start time."""
    events = _At("events")
    logs = _At("logs")
    checkpoints = _At("checkpoints")
    launcher_log = _At("logs/launcher.log")
    """Output of the launcher of a detached run."""
    notify_log = _At("logs/notify.log")
    """Output of the command that is told what becomes of the run."""
    stop_file = _At("control/stop")
    """File whose presence asks every rank to save and stop after its current step."""
    grads_request_file = _At("control/grads")
    """File whose presence asks for a gradient record of the next step."""
    profile_request_file = _At("control/profile.json")
    """File whose presence asks for traces of the next steps."""
    traces = _At("traces")
    """Traces of torch's profiler."""
    heartbeats = _At("control/heartbeats")
    """Folder of the ranks' heartbeats."""
    rendezvous_file = _At("control/meeting.json")
    """Secret by which the launchers of a run's nodes recognise one another."""
    cancel_file = _At("control/cancel")
    """File whose presence keeps the run's job from being requeued."""
    finished_file = _At("control/finished")
    """File that a job writes when its run has finished, so that a requeued job ends at once."""
    job_file = _At("job.json")
    """The run's job in a scheduler, with its script."""
    store_file = _At("control/store.json")
    """Files that are in the run's object store as they are here."""
    store_lock = _At("control/store.lock")
    """File that is locked by the process that sends the run to its store."""
    sending = _At("control/sending")
    """Folder of hard links to a checkpoint that is being sent, which may be deleted meanwhile."""
    hosts = _At("control/hosts")
    """Folder in which the hosts of a job record how their launchers fare, a file per node."""
    sweep_file = _At("sweep.json")
    """Runs and overrides of a sweep, in the sweep's folder."""
    code = _At("code")
    """Copy of the working tree from which the run was submitted."""
    config_file = _At("config.yaml")
    """Composed configuration, which can be given to `recipe=`."""
    signature_file = _At("signature.json")
    """Signatures of the plan and the configuration (`colotrain.runs.trust`)."""
    references_file = _At("references.safetensors")
    """Log-probabilities of preference pairs under the model as the run began."""
    teacher = _At("teacher")
    """What the teacher of a distillation says of the samples."""
    samples_file = _At("samples.jsonl")
    """Texts that the model wrote after evaluations: a JSON object per line."""
    cases = _At("cases")
    """verify: one run directory per case."""
    trajectory_file = _At("trajectory.safetensors")
    """verify: gradients and parameters of every step of a case."""
    verification_file = _At("facts.json")
    """verify: losses, step count and frozen names of a case."""
    audit = _At("audit")
    """audit: what the processes of the command wrote for the checks."""
    launcher_events = _At("events/launcher.jsonl")
    upload_events = _At("events/uploads.jsonl")

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).absolute()

    def __repr__(self) -> str:
        return f"RunDir({str(self.path)!r})"

    @property
    def name(self) -> str:
        return self.path.name

    def tier_folder(self, disk_path: str) -> Path:
        """Return the folder of gemini's disk tier; a relative path is inside the run directory."""
        return self.path / disk_path

    def request_grads(self, *, noise: bool = False) -> None:
        """Ask a running job for a gradient record of its next step."""
        self.grads_request_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(self.grads_request_file, NOISE if noise else "")

    def grads_request(self) -> str | None:
        """Return the content of the request, "" or `NOISE`; None if there is no request."""
        try:
            return self.grads_request_file.read_text("utf-8").strip()
        except OSError:
            return None

    def request_profile(self, *, num_steps: int, ranks: Sequence[int]) -> None:
        """Ask a running job for traces of its next steps."""
        self.profile_request_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        text = json.dumps({"num_steps": num_steps, "ranks": list(ranks)})
        write_atomically(self.profile_request_file, text)

    def profile_request(self) -> tuple[int, tuple[int, ...]] | None:
        """Return the number of steps and the ranks that are asked for; None if there are none."""
        try:
            asked = json.loads(self.profile_request_file.read_text("utf-8"))
            return max(1, int(asked["num_steps"])), tuple(int(rank) for rank in asked["ranks"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def job_script(self, ending: str) -> Path:
        """Return the submitted job script; for a sweep, it is in the sweep's folder."""
        return self.path / f"job.{ending}"

    def job_log(self, job: str, *, node: int = 0) -> Path:
        """Return the log of a job, or of a node that has one of its own."""
        return self.logs / (f"job-{job}-node{node}.log" if node else f"job-{job}.log")

    def trace_file(self, *, first: int, last: int, rank: int) -> Path:
        return self.traces / f"steps-{first:08d}-{last:08d}-rank{rank:05d}.json.gz"

    @property
    def collective_dumps(self) -> Path:
        """Prefix, before a rank, of the files of NCCL's flight recorder."""
        return self.logs / "collectives_rank"

    def heartbeat_file(self, rank: int) -> Path:
        return self.heartbeats / f"rank{rank:05d}.json"

    def audit_file(self, *, rank: int, pid: int) -> Path:
        return self.audit / f"rank{rank:05d}-{pid}.jsonl"

    def tracker(self, name: str) -> Path:
        """Return the folder of a tracker."""
        return self.path / "trackers" / name

    def event_file(self, *, rank: int, attempt: int) -> Path:
        return self.events / f"rank{rank:05d}-attempt{attempt:04d}.jsonl"

    def node_events(self, node: int) -> Path:
        """Return the events file of the launcher of a node other than 0."""
        return self.events / f"node{node:05d}.jsonl"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:08d}"

    def create(self) -> None:
        """Create the folders, readable only by the user."""
        for folder in (self.path, self.events, self.logs, self.checkpoints, self.stop_file.parent):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def write_plan(self, plan: RunPlan) -> None:
        """Write `plan.json`; an earlier, different plan is kept as `plan-N.json`."""
        text = plan.to_json()
        if self.plan_file.exists() and self.plan_file.read_text("utf-8") != text:
            number = len(list(self.path.glob("plan-*.json"))) + 1
            os.replace(self.plan_file, self.path / f"plan-{number}.json")
        write_atomically(self.plan_file, text)

    def plan(self) -> RunPlan:
        return RunPlan.load(self.plan_file)

    def write_summary(self, summary: dict[str, Any]) -> None:
        write_atomically(self.summary_file, json.dumps(summary, indent=2) + "\n")

    def next_attempt(self) -> int:
        """Return one more than the highest attempt with an event file, or 0."""
        found = re.compile(r"-attempt(\d+)\.jsonl$")
        numbers = [
            int(m[1])
            for entry in self.events.glob("rank*.jsonl")
            if (m := found.search(entry.name))
        ]
        return max(numbers, default=-1) + 1

    @staticmethod
    def find(name: str, *, root: Path = RUNS) -> RunDir:
        """Return the run called `name`: a path, or a name under `root`."""
        for candidate in (root / name, Path(name)):
            if (candidate / "plan.json").is_file():
                return RunDir(candidate)
        known = RunDir.all(root)
        raise UsageError(
            f"no run {name!r}",
            suggest(name, (run.name for run in known)) or f"there are none: {HOW_TO_START}",
        )

    @staticmethod
    def all(root: Path = RUNS) -> list[RunDir]:
        """Return all runs under `root`, oldest first."""
        found = [entry.parent for entry in root.glob("*/plan.json")]
        return [RunDir(p) for p in sorted(found, key=lambda p: (p / "plan.json").stat().st_mtime)]


def run_name(text: str) -> str:
    """Return `text` as a folder name: letters, digits, `.`, `_`, `-` only."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.") or "run"


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace `path` atomically: a reader sees the old or the new content, never a mixture."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(content.encode() if isinstance(content, str) else content)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        os.unlink(temporary)
        if isinstance(error, OSError) and error.filename is None:  # the disk is full
            error.filename = str(path)
        raise
