"""Faults planted in real runs: the cause is named in one line, and the run goes on as it should."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from colotrain.engine.state.manifest import damage
from colotrain.parent_process import has_ended
from tests.faults.kills import ROOT
from tests.representatives import representatives
from tests.running import COMMAND_TIMEOUT_S, SMALL, Colotrain, Result, losses, pid_of, wait_for_step

pytestmark = [
    pytest.mark.timeout(1800),  # seconds, of a busy machine
]

STEPS = 12
PLAN = (
    *SMALL,
    f"train.max_steps={STEPS}",
    "checkpoint.every=4",
    "plugin=zero2",
    "name=hurt",
    "train.on_gradients=tests.faults.plant:nothing",
)
NARROW = """
import torch
import torch.nn.functional as F
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(6, 1)

    def forward(self, x):
        return F.mse_loss(self.line(x), x[:, :1])

def data():
    return [{"x": torch.randn(6)} for _ in range(32)]
"""
"""One output: of two ranks, one holds nothing."""
FLAWED = """
import pathlib
import torch
from torch import nn

class Model(nn.Linear):
    def forward(self, x):
        return super().forward(x).square().mean()

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, index):
        if index == 7:
            title = pathlib.Path("/proc/self/cmdline").read_text().strip(chr(0))
            pathlib.Path("title").write_text(title)
            raise KeyError("no such column")
        return {"x": torch.ones(8)}
"""
"""A sample that cannot be read."""
Started = Callable[[subprocess.Popen[str]], subprocess.Popen[str]]


def environment(**order: Any) -> dict[str, str]:
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return {"PYTHONPATH": path, "PLANT": json.dumps(order)}


def planted(colotrain: Colotrain, what: str, *overrides: str, **order: Any) -> Result:
    """A run in which rank 1 does `what` in step 6, unless `order` says otherwise."""
    order = {"what": what, "rank": 1, "step": 6} | order
    return colotrain("run", *PLAN, *overrides, "--json", env=environment(**order))


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    colotrain = Colotrain(tmp_path_factory.mktemp("straight"))
    result = colotrain("run", *PLAN, "--json", env=environment())
    assert result.code == 0, result.err
    return losses(result.json)


def causes(colotrain: Colotrain) -> list[str]:
    return [e.fields["cause"] for e in colotrain.events("hurt") if e.kind == "restart"]


@pytest.mark.parametrize(
    ("what", "cause"),
    [
        ("kill", "rank 1 was killed by SIGKILL"),
        ("refuse", "ValueError: the reactor is too warm"),
        ("leave", "rank 1 ended with exit code 0 before the run was over"),
    ],
)
def test_a_rank_that_dies_is_named_and_the_run_restarted(
    colotrain: Colotrain, straight: list[float], what: str, cause: str
) -> None:
    result = planted(colotrain, what)
    assert result.code == 0, result.err
    assert len(causes(colotrain)) == 1
    assert cause in causes(colotrain)[0]
    assert "Terminating process" not in result.err
    assert losses(result.json) == straight


def test_the_loss_of_the_fork_server_ends_its_ranks_before_others_take_their_place(
    colotrain: Colotrain, straight: list[float]
) -> None:
    """multiprocessing then takes all ranks for ended, though they could still write checkpoints."""
    result = planted(replace(colotrain, cold=True), "kill_parent")
    assert result.code == 0, result.err
    assert len(causes(colotrain)) == 1
    assert "which starts this machine's ranks, was killed by SIGKILL" in causes(colotrain)[0]
    assert losses(result.json) == straight
    ranks = {e.fields["pid"] for e in colotrain.events("hurt") if e.kind == "started"}
    assert len(ranks) == 4
    assert all(has_ended(pid) for pid in ranks)


@pytest.mark.parametrize(
    ("what", "cause"),
    [("hang", "rank 1 (process {pid}) hung in"), ("stop", "was stopped (SIGSTOP) in")],
)
def test_a_rank_that_falls_silent_is_named_with_its_stack(
    colotrain: Colotrain, straight: list[float], what: str, cause: str
) -> None:
    result = planted(colotrain, what, "elastic.hang_timeout_s=6")
    assert result.code == 0, result.err
    started = [e for e in colotrain.events("hurt") if e.kind == "started" and e.rank == 1]
    [found] = causes(colotrain)
    assert cause.format(pid=started[0].fields["pid"]) in found
    assert "rank 0" not in found
    assert "of step 6" in found
    if what == "hang":
        assert "plant.py" in found
        assert "in hang" in found
    assert losses(result.json) == straight


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_one_rank_saves_and_stops_all(
    colotrain: Colotrain,
    started: Started,
    straight: list[float],
    number: signal.Signals,
) -> None:
    order = {"what": "pause", "rank": 0, "steps": [6]}
    process = started(colotrain.start("run", *PLAN, env=environment(**order)))
    wait_for_step(colotrain, "hurt", 5)
    os.kill(pid_of(colotrain, "hurt", 1), number)
    (colotrain.cwd / "go-6").touch()
    _, err = process.communicate(timeout=COMMAND_TIMEOUT_S)
    assert process.returncode == 75, err
    saved = [p for p in colotrain.rundir("hurt").checkpoints.iterdir() if damage(p) is None]
    assert max(path.name for path in saved) in ("step-00000006", "step-00000007")
    resumed = colotrain("resume", "hurt", "--json", env=environment())
    assert losses(resumed.json) == straight


@pytest.mark.slow
def test_a_run_under_nohup_outlives_its_terminal(colotrain: Colotrain, started: Started) -> None:
    order = {"what": "pause", "rank": 0, "steps": [6]}
    ignores = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does, before it executes
    try:
        process = started(colotrain.start("run", *PLAN, env=environment(**order), new_session=True))
    finally:
        signal.signal(signal.SIGHUP, ignores)
    wait_for_step(colotrain, "hurt", 5)
    os.killpg(process.pid, signal.SIGHUP)
    (colotrain.cwd / "go-6").touch()
    _, err = process.communicate(timeout=COMMAND_TIMEOUT_S)
    assert process.returncode == 0, err


def test_a_stop_takes_no_longer_than_its_grace(colotrain: Colotrain, started: Started) -> None:
    settings = ("elastic.grace_s=2", "elastic.hang_timeout_s=300")
    order = {"what": "hang", "rank": 1, "step": 6}
    process = started(colotrain.start("run", *PLAN, *settings, env=environment(**order)))
    wait_for_step(colotrain, "hurt", 5)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=COMMAND_TIMEOUT_S)
    assert process.returncode == 1
    [error] = [line for line in err.splitlines() if line.startswith("error:")]
    assert "asked to stop, and ended after elastic.grace_s=2" in error
    assert not causes(colotrain)


def test_what_fails_in_the_same_place_again_is_not_tried_a_third_time(colotrain: Colotrain) -> None:
    result = planted(colotrain, "refuse", "elastic.max_restarts=3", always=True)
    assert result.code == 1
    [error] = [line for line in result.err.splitlines() if line.startswith("error:")]
    assert "rank 1 failed in optimizer of step 6: ValueError: the reactor is too warm" in error
    assert "plant.py:62)" in error  # the line that raised it
    assert "1 restart did not help" in error
    assert result.err.count("the reactor is too warm") == 2  # the restart, and the end
    assert len(causes(colotrain)) == 1


def test_an_error_in_a_dataset_ends_the_run_at_once(colotrain: Colotrain) -> None:
    """No restart would read another sample there; a rank also has its name in the process list."""
    (colotrain.cwd / "flawed.py").write_text(FLAWED)
    settings = (
        "model.target=flawed:Model",
        "model.args={in_features: 8, out_features: 2}",
        "data.target=flawed:Data",
        "train={max_steps: 50, global_batch: 8, micro_batch: 2}",
        "cluster.procs_per_node=2",
        "elastic.max_restarts=3",
        "name=flawed",
    )
    result = colotrain("run", *settings)
    assert result.code == 1, result.err
    [error] = [line for line in result.err.splitlines() if line.startswith("error:")]
    assert "sample 7 raised KeyError" in error
    assert "flawed.py:18" in error  # the line that raised it
    assert not any(event.kind == "restart" for event in colotrain.events("flawed"))
    title = (colotrain.cwd / "title").read_text()
    assert re.fullmatch(r"colotrain: flawed rank [01]", title)


def test_workers_that_all_leave_early_have_not_finished(colotrain: Colotrain) -> None:
    settings = ("cluster.procs_per_node=1", "elastic.max_restarts=0")
    result = planted(colotrain, "leave", *settings, rank=0)
    assert result.code == 1
    assert "exit code 0" in next(x for x in result.err.splitlines() if x.startswith("error:"))


@pytest.fixture
def memory_cgroup() -> Iterator[Path]:
    """A memory cgroup of 1 GiB."""
    root = Path("/sys/fs/cgroup/memory")
    folder = root / f"colotrain-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(str(1 << 30))
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made ({error})")
    yield folder
    folder.rmdir()


def test_a_rank_that_takes_all_memory_is_named(
    colotrain: Colotrain, straight: list[float], memory_cgroup: Path
) -> None:
    result = planted(colotrain, "allocate", limit=str(memory_cgroup / "cgroup.procs"))
    assert result.code == 0, result.err
    [cause] = causes(colotrain)
    assert "rank 1 was killed by SIGKILL (the kernel ended it for want of memory)" in cause
    assert losses(result.json) == straight


@pytest.fixture
def small_disk(colotrain: Colotrain) -> Iterator[Path]:
    """The checkpoints' folder of the run `hurt`, on a file system with room for two of them."""
    folder = colotrain.rundir("hurt").checkpoints
    folder.mkdir(parents=True)
    command = ("mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder))
    mounted = shutil.which("mount") and subprocess.run(command, capture_output=True, text=True)
    if not mounted or mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted ({mounted and mounted.stderr.strip()})")
    yield folder
    subprocess.run(("umount", "-l", str(folder)), check=True)


def test_a_full_disk_does_not_stop_training_and_harms_no_checkpoint(
    colotrain: Colotrain, started: Started, straight: list[float], small_disk: Path
) -> None:
    order = {"what": "pause", "rank": 0, "steps": [5, 11]}
    filler = small_disk / "filler"
    settings = ("checkpoint.every=2", "--json")
    process = started(colotrain.start("run", *PLAN, *settings, env=environment(**order)))
    wait_for(colotrain, "checkpoint", step=4)
    filler.write_bytes(bytes(1 << 19))
    (colotrain.cwd / "go-5").touch()
    assert "No space left on device" in wait_for(colotrain, "checkpoint_failed", step=6)
    wait_for(colotrain, "checkpoint_failed", step=10)
    kept = sorted(path for path in small_disk.iterdir() if path != filler)
    assert [path.name for path in kept] == ["step-00000002", "step-00000004"]
    assert [damage(path) for path in kept] == [None, None]
    filler.unlink()
    (colotrain.cwd / "go-11").touch()
    out, err = process.communicate(timeout=COMMAND_TIMEOUT_S)
    assert process.returncode == 0, err
    assert "event=checkpoint_failed" in err
    assert losses(json.loads(out)) == straight
    assert not list(small_disk.glob(".*"))


def test_a_disk_that_is_full_at_the_end_is_an_error(colotrain: Colotrain, small_disk: Path) -> None:
    (small_disk / "filler").write_bytes(bytes(3 << 19))
    result = colotrain("run", *PLAN, "checkpoint.every=null", env=environment())
    assert result.code == 1
    [error] = [line for line in result.err.splitlines() if line.startswith("error:")]
    assert "failed in checkpoint of step 12: " in error
    assert "step 13" not in error
    assert "No space left on device" in error
    assert not list(small_disk.glob("*step*"))


def wait_for(
    colotrain: Colotrain, kind: str, *, step: int, timeout_s: float = COMMAND_TIMEOUT_S
) -> str:
    """Wait for an event of rank 0; returns its error, if it tells one."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        is_there = colotrain.rundir("hurt").events.is_dir()
        for event in colotrain.events("hurt") if is_there else []:
            if event.kind == kind and event.fields.get("step") == step:
                return str(event.fields.get("error", ""))
        time.sleep(0.05)
    raise TimeoutError(f"no {kind} of step {step}")


@pytest.mark.parametrize("plugin", representatives(["zero1", "fsdp-hybrid"], kept=["fsdp-hybrid"]))
def test_a_flipped_bit_is_found_named_and_undone(
    colotrain: Colotrain, straight: list[float], plugin: str
) -> None:
    settings = ["elastic.check_every=1", f"plugin={plugin}"]
    settings += ["plugin.shard_size=1"] if plugin == "fsdp-hybrid" else []
    result = planted(colotrain, "flip", *settings)
    assert result.code == 0, result.err
    [found] = [e for e in colotrain.events("hurt") if e.kind == "corruption"]
    assert found.fields["persistent"] is True
    assert found.fields["found"] == ["embed.weight on rank 1 changed between two updates"]
    [cause] = causes(colotrain)
    assert "silent data corruption, and persistent: embed.weight on rank 1" in cause
    assert losses(result.json) == pytest.approx(straight, abs=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_rank_that_holds_nothing_takes_part_in_the_search(
    colotrain: Colotrain, precision: str
) -> None:
    """In fp32 both ranks read one copy of the parameters; in bf16 each gathers its own."""
    (colotrain.cwd / "narrow.py").write_text(NARROW)
    settings = ("model.target=narrow:Model", "data.target=narrow:data", "plugin=zero2")
    more = ("optim.name=sgd", "train.max_steps=4", "elastic.check_every=1", "train.eval_steps=0")
    more += (f"train.precision={precision}",)
    sizes = ("train.global_batch=4", "train.micro_batch=2", "cluster.procs_per_node=2")
    bounded = ("elastic.hang_timeout_s=20", "elastic.max_restarts=0")
    summary = colotrain.run(*settings, *more, *sizes, *bounded)
    assert summary["steps"] == 4


@pytest.mark.slow
def test_a_detached_run_outlives_the_terminal_and_is_reached(colotrain: Colotrain) -> None:
    settings = ("train.max_steps=5000", "checkpoint.every=0")
    command = ("run", *PLAN, *settings, "--detach")
    shell = colotrain.start(*command, new_session=True, env=environment())
    out, err = shell.communicate(timeout=COMMAND_TIMEOUT_S)
    assert shell.returncode == 0, err
    assert Path(out.strip()) == colotrain.rundir("hurt").path
    with contextlib.suppress(ProcessLookupError):
        os.killpg(shell.pid, signal.SIGHUP)
    wait_for_step(colotrain, "hurt", 2)
    assert "running" in colotrain("dashboard", "hurt", "--once").out
    stopped = colotrain("stop", "hurt")
    assert stopped.code == 0, stopped.err
    assert "preempted" in stopped.out
    printed = colotrain("logs", "hurt", "--lines", "1000").out
    assert re.search(r"^launcher: .*step=1/5000", printed, re.MULTILINE)
    assert re.search(r"^launcher: .*preempted", printed, re.MULTILINE)
    assert oct(colotrain.rundir("hurt").path.stat().st_mode)[-3:] == "700"


def test_a_detached_run_that_cannot_start_says_why(colotrain: Colotrain) -> None:
    (colotrain.cwd / "empty.bin").write_bytes(b"\0")
    settings = ("data.corpus=null", "data.path=empty.bin")
    result = colotrain("run", *PLAN, *settings, "--detach", env=environment())
    assert result.code != 0
    assert "a multiple of 2 bytes" in result.err
