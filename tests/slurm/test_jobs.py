"""Jobs on a real SLURM: what is submitted runs, survives, and can be looked at."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from colotrain.events.event import Event
from colotrain.events.log import EventReader
from colotrain.rundir import RunDir
from tests.running import Colotrain
from tests.slurm.lab import Lab, missing, running

REASON = missing()
pytestmark = [
    pytest.mark.skipif(bool(REASON), reason=REASON),
    pytest.mark.timeout(1800),
]

SAMPLES = """\
import time, torch
from pathlib import Path
class Slow:
    def __init__(self, seconds): self.seconds = seconds
    def __len__(self): return 64
    def __getitem__(self, i):
        time.sleep(self.seconds)
        tokens = torch.randint(0, 256, (17,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": tokens[:-1], "labels": tokens[1:]}
class SlowAtFirst(Slow):
    "Slow until the run has resumed once."
    def __init__(self, seconds, events):
        resumed = any('"kind":"resumed"' in f.read_text() for f in Path(events).glob("*"))
        super().__init__(0 if resumed else seconds)
"""
PLAN = (
    "recipe=llm-tiny",
    *("model.args.d_model=16", "model.args.num_layers=2", "model.args.num_heads=2"),
    *("model.args.d_hidden=32", "data.corpus=null", "data.target=samples:Slow", "data.seq_len=16"),
    *("data.validation_fraction=0", "train.global_batch=4", "train.micro_batch=1"),
    *("train.max_steps=12", "checkpoint.every=4", "cluster.procs_per_node=1", "cluster=slurm"),
    "cluster.device=cpu",
    *("cluster.nodes=2", "plugin=fsdp-hybrid"),
)
FAST, SLOW = "data.args.seconds=0", "data.args.seconds=0.5"
WAIT_S = 300


@dataclass(frozen=True)
class Site:
    """A cluster, and a folder that a user works in."""

    lab: Lab
    cwd: Path

    def colotrain(self, *arguments: str, code: int = 0) -> str:
        done = Colotrain(self.cwd)(*arguments, env=self.lab.environment)
        assert done.code == code, done.out + done.err
        return done.out if code == 0 else done.err

    def submit(self, *overrides: str) -> str:
        """Submit a run; its job."""
        return str(json.loads(self.colotrain("submit", *PLAN, *overrides, "--json"))["job"])

    def rundir(self, name: str) -> RunDir:
        return RunDir(self.cwd / "runs" / name)

    def events(self, name: str, kind: str) -> list[Event]:
        return [e for e in EventReader(self.rundir(name)).drain() if e.kind == kind]

    def wait_for_step(self, name: str, step: int) -> None:
        deadline = time.monotonic() + WAIT_S
        while not any(e.fields["step"] >= step for e in self.events(name, "step")):
            assert time.monotonic() < deadline, self.log(name)
            time.sleep(0.1)

    def log(self, name: str) -> str:
        return "".join(p.read_text() for p in self.rundir(name).logs.glob("job-*.log"))

    def losses(self, name: str) -> dict[int, float]:
        summary = json.loads(self.rundir(name).summary_file.read_text())
        assert summary["status"] == "finished"
        return dict(summary["loss"]["history"])

    def row(self, name: str) -> dict[str, Any]:
        rows = json.loads(self.colotrain("runs", "--json"))
        return next(row for row in rows if row["name"] == name)


def _site(folder: Path, *, requeue_exit: bool) -> Iterator[Site]:
    (folder / "work").mkdir()
    (folder / "work" / "samples.py").write_text(SAMPLES)
    with running(folder / "lab", requeue_exit=requeue_exit) as lab:
        yield Site(lab, folder / "work")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    yield from _site(tmp_path_factory.mktemp("slurm"), requeue_exit=True)


@pytest.fixture(scope="module")
def straight(site: Site) -> dict[int, float]:
    """The losses of a job that nothing happens to."""
    job = site.submit(FAST, "name=straight")
    assert site.lab.wait_for(job, "COMPLETED", "FAILED", timeout_s=WAIT_S) == "COMPLETED", site.log(
        "straight"
    )
    return site.losses("straight")


@pytest.mark.slow
def test_a_job_runs_on_two_nodes_and_can_be_looked_at(
    site: Site, straight: dict[int, float]
) -> None:
    assert len(straight) == 12
    started = site.events("straight", "started")
    assert [e.fields["world_size"] for e in started] == [2, 2]
    row = site.row("straight")
    assert (row["state"], row["job_state"]) == ("finished", "COMPLETED")
    assert "step=12/12" in site.colotrain("logs", "straight")
    assert "step=12/12" not in site.colotrain("logs", "straight", "--rank", "1")
    assert json.loads(site.colotrain("dashboard", "straight", "--json"))
    assert json.loads(site.colotrain("inspect-grads", "straight", "--json"))["parameters"]
    script = site.rundir("straight").job_script("sbatch").read_text()
    assert script == site.colotrain("submit", *PLAN, FAST, "name=straight", "--dry-run")
    said = site.colotrain("submit", *PLAN, FAST, "name=other", "--test-only")
    assert "to start at" in said
    assert not site.rundir("other").path.exists()


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["cluster.slurm.partition=nowhere"], "invalid partition specified: nowhere"),
        (["cluster.nodes=4"], "Requested node configuration is not available"),
        (["cluster.slurm.gres=gpu:9", "cluster.device=cpu"], "node configuration is not available"),
        (["cluster.slurm.partitoin=main"], "did you mean cluster.slurm.partition"),
        (["cluster.slurm.extra={mem:1G}"], "set cluster.slurm.memory"),
    ],
)
def test_what_cannot_run_is_refused_at_submit(
    site: Site, overrides: list[str], reason: str
) -> None:
    err = site.colotrain("submit", *PLAN, FAST, "name=refused", *overrides, code=2)
    assert reason in err
    assert not site.rundir("refused").path.exists()
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_stop_saves_and_cancels_for_good(site: Site) -> None:
    job = site.submit(SLOW, "name=stopped")
    site.wait_for_step("stopped", 1)
    assert site.row("stopped")["job_state"] == "RUNNING"
    said = site.colotrain("stop", "stopped")
    assert f"job {job} is cancelled" in said
    assert "`colotrain submit recipe=runs/stopped/config.yaml name=stopped` continues" in said
    state = site.lab.wait_for(job, "CANCELLED", "FAILED", "COMPLETED", "PENDING")
    assert state != "PENDING", "it was queued again"
    assert site.row("stopped")["state"] in ("preempted", "interrupted")
    assert list(site.rundir("stopped").checkpoints.glob("step-*"))


def test_a_job_that_waits_is_cancelled(site: Site) -> None:
    job = site.submit(FAST, "name=waits", "cluster.slurm.extra={begin: now+1hour}")
    row = site.row("waits")
    assert (row["job_state"], row["job_reason"]) == ("PENDING", "BeginTime")
    site.colotrain("stop", "waits")
    assert site.lab.state(job) == "CANCELLED"
    assert site.row("waits")["state"] == "cancelled"


@pytest.mark.slow
def test_a_preempted_job_is_queued_again_and_goes_on_exactly(
    site: Site, straight: dict[int, float]
) -> None:
    low = ("cluster.slurm.partition=low", "cluster.slurm.extra={exclusive: true}")
    job = site.submit(SLOW, "name=preempted", *low)
    site.wait_for_step("preempted", 2)
    urgent = ("-N2", "--exclusive", "-p", "main", "-o", "/dev/null", "--wrap", "sleep 2")
    assert "Submitted" in site.lab("sbatch", *urgent)
    site.lab.wait_for(job, "PENDING", timeout_s=WAIT_S)
    site.lab.wait_for(job, "COMPLETED", "FAILED", timeout_s=WAIT_S)
    assert site.losses("preempted") == straight
    assert "asking the run to save and stop" in site.log("preempted")
    assert site.events("preempted", "resumed")[0].fields["step"] >= 2


@pytest.mark.slow
def test_a_node_that_dies_costs_a_restart_and_nothing_else(
    site: Site, straight: dict[int, float]
) -> None:
    job = site.submit("data.args.seconds=1", "name=node-lost")
    site.wait_for_step("node-lost", 5)
    site.lab.kill_node(2)
    try:
        site.lab.wait_for(job, "PENDING", timeout_s=WAIT_S)
    finally:
        site.lab.start_node(2)
    assert site.lab.wait_for(job, "COMPLETED", "FAILED", timeout_s=WAIT_S) == "COMPLETED"
    assert site.losses("node-lost") == straight
    assert site.events("node-lost", "resumed")[0].fields["step"] >= 4


@pytest.mark.slow
def test_a_sweep_is_one_array_with_a_throttle(site: Site) -> None:
    sweep = ("optim.lr=1e-3,3e-4", "plugin=zero2,zero3", "name=four", "cluster.nodes=1")
    arguments = [o for o in PLAN if not o.startswith(("plugin=", "cluster.nodes="))]
    words = ["submit", "--sweep", "--max-parallel", "2", *arguments, *sweep, SLOW, "--json"]
    document = json.loads(site.colotrain(*words, "train.max_steps=3"))
    assert len(document["runs"]) == 4
    most, deadline = 0, time.monotonic() + WAIT_S
    while (states := site.lab("squeue", "-h", "--array", "-o", "%T").split()) and (
        time.monotonic() < deadline
    ):
        most = max(most, states.count("RUNNING"))
        time.sleep(0.3)
    assert most == 2
    table = json.loads(site.colotrain("runs", "--sweep", "four", "--json"))["runs"]
    assert [row["state"] for row in table] == ["finished"] * 4
    assert {tuple(row["chosen"].values()) for row in table} == {
        (lr, plugin) for lr in ("0.001", "0.0003") for plugin in ("zero2", "zero3")
    }
    by_rate: dict[str, set[float]] = {}
    for row in table:
        by_rate.setdefault(row["chosen"]["optim.lr"], set()).add(round(row["loss"], 4))
    assert all(len(found) == 1 for found in by_rate.values()), "a plugin changed the loss"
    assert "step=3/3" in site.colotrain("logs", "four-0")


@pytest.mark.timeout(1500)
@pytest.mark.slow
def test_time_runs_out_twice_and_the_run_goes_on_exactly(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Where the site requeues by no exit code, the job asks for it itself.

    A job has one to two minutes before it is warned, for SLURM warns up to a minute early: a busy
    machine starts its workers in that time and comes to a step, an idle one comes to some fifteen.
    The third job is fast, so that the test ends.
    """
    few = ("train.max_steps=40", "checkpoint.every=1")
    for site in _site(tmp_path_factory.mktemp("slurm"), requeue_exit=False):
        limits = ("cluster.slurm.time=3", "cluster.slurm.warn_s=60")
        events = site.rundir("short").events
        slow = (
            "data.target=samples:SlowAtFirst",
            "data.args.seconds=7",
            f"data.args.events={events}",
        )
        job = site.submit("name=short", *limits, *slow, *few)
        state = site.lab.wait_for(job, "COMPLETED", "FAILED", "TIMEOUT", timeout_s=1200)
        assert state == "COMPLETED", site.log("short")
        assert len(site.events("short", "resumed")) >= 2
        straight = site.submit(FAST, "name=straight", *few)
        site.lab.wait_for(straight, "COMPLETED", timeout_s=WAIT_S)
        assert site.losses("short") == site.losses("straight")
        log = site.log("short")
        assert log.count("USR1: asking the run to save and stop") >= 2
        assert "restart 2: " in log


@pytest.mark.slow
def test_the_cap_on_restarts_holds(site: Site) -> None:
    settings = ("cluster.slurm.max_requeues=0", "name=capped")
    job = site.submit(SLOW, *settings)
    site.wait_for_step("capped", 1)
    site.lab("scancel", "--batch", "--signal=USR1", job)
    assert site.lab.wait_for(job, "FAILED", "PENDING", "COMPLETED") == "FAILED"
    assert "which is the most" in site.log("capped")
    os.stat(site.rundir("capped").checkpoints)


@pytest.mark.slow
def test_a_job_that_slurm_suspends_for_longer_than_a_rank_may_hang_goes_on(site: Site) -> None:
    settings = ("name=suspended", "elastic.hang_timeout_s=15", "train.max_steps=40")
    job = site.submit(SLOW, *settings)
    site.wait_for_step("suspended", 2)
    site.lab("scontrol", "suspend", job)
    assert site.lab.wait_for(job, "SUSPENDED") == "SUSPENDED"

    def steps() -> int:
        return len(site.events("suspended", "step"))

    # The nodes stop a job's processes some time after SLURM says so, one step after the other.
    before, deadline = steps(), time.monotonic() + 180
    time.sleep(30)
    while steps() != before and time.monotonic() < deadline:
        before = steps()
        time.sleep(30)
    assert steps() == before < 80
    site.lab("scontrol", "resume", job)
    state = site.lab.wait_for(job, "COMPLETED", "FAILED", timeout_s=WAIT_S)
    assert state == "COMPLETED", site.log("suspended")
    assert len(site.losses("suspended")) == 40
    assert not site.events("suspended", "restart")
    notes = [event.fields["text"] for event in site.events("suspended", "note")]
    assert any("were stopped for" in text for text in notes), notes
