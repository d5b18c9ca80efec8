"""What the driver and NCCL's flight recorder tell of a failure on GPUs stands in its cause."""

from __future__ import annotations

import os
import pickle
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from colotrain.events.event import Event
from colotrain.events.kinds import WorkerExit
from colotrain.events.log import EventWriter
from colotrain.launch import gpu_errors
from colotrain.launch.collective_dumps import explain
from colotrain.launch.rendezvous import Node
from colotrain.launch.state import Launch
from colotrain.launch.watch import Watch
from colotrain.records import to_plain
from colotrain.rundir import RunDir
from tests.unit.events.test_view import plan_of

HOST = socket.gethostname()


def record(seconds_ago: float, message: str) -> str:
    """A record as /dev/kmsg gives it, with a second line of properties."""
    at = (time.monotonic() - seconds_ago) * 1e6
    return f"4,17,{at:.0f},-;{message}\n SUBSYSTEM=pci\n"


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with no log and no commands but what a test puts there."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(gpu_errors, "KERNEL_LOG", tmp_path / "kmsg")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(folder: Path, name: str, body: str) -> None:
    (folder / name).write_text(f"#!/bin/sh\n{body}\n")
    (folder / name).chmod(0o755)


def test_an_xid_of_the_attempt_is_told_with_its_meaning(host: Path) -> None:
    (host / "kmsg").write_text(
        record(900, "NVRM: Xid (PCI:0000:3b:00): 48, of an earlier run")
        + record(20, "NVRM: Xid (PCI:0000:17:00): 79, pid='<unknown>', GPU has fallen off the bus.")
        + record(19, "NVRM: Xid (PCI:0000:17:00): 79, again")
        + record(18, "usb 1-1: new device; NVRM is not here")
    )
    assert gpu_errors.gpu_errors(60.0) == (
        f"on {HOST}: GPU 0000:17:00 has Xid 79 (the GPU is no longer reached over PCIe); it needs "
        "a reset (`nvidia-smi -r`), or another host"
    )
    assert gpu_errors.gpu_errors(0.0) == ""


def test_where_the_kernels_log_may_not_be_read_the_journal_is(host: Path) -> None:
    assert gpu_errors.gpu_errors(0.0) == ""  # neither is there
    command(host, "journalctl", 'echo "$@" > asked; echo "NVRM: Xid (0000:03:00): 31, Ch 1"')
    assert gpu_errors.gpu_errors(1000.0) == (
        f"on {HOST}: GPU 0000:03:00 has Xid 31 (a kernel accessed memory that is not mapped)"
    )
    since = float((host / "asked").read_text().partition("--since=@")[2].split()[0])
    assert since == pytest.approx(time.time() - 1000.0, abs=60)
    command(host, "journalctl", "exit 1")
    assert gpu_errors.gpu_errors(1000.0) == ""


def test_uncorrected_memory_errors_are_told(host: Path) -> None:
    command(host, "nvidia-smi", "echo '00000000:17:00.0, 0\n00000000:3B:00.0, 2\n0000:4, [N/A]'")
    told = gpu_errors.gpu_errors(0.0)
    assert told == f"on {HOST}: GPU 00000000:3B:00.0 counts 2 uncorrected memory errors"


def entry(name: str, number: int, state: str = "started", *, group: str = "0") -> dict[str, Any]:
    return {
        "process_group": (group, "default_pg"),
        "collective_seq_id": number,
        "profiling_name": f"nccl:{name}",
        "state": state,
        "is_p2p": False,
    }


def dump(prefix: Path, rank: int, *entries: dict[str, Any]) -> Path:
    path = prefix.with_name(f"{prefix.name}{rank}")
    path.write_bytes(pickle.dumps({"version": "2.10", "pg_config": {}, "entries": [*entries]}))
    return path


DONE = entry("all_gather", 811, "completed")


def test_the_rank_that_kept_the_others_waiting_is_named(tmp_path: Path) -> None:
    prefix = tmp_path / "collectives_rank"
    for rank in (0, 2):
        dump(prefix, rank, DONE, entry("all_gather", 812), entry("reduce_scatter", 813))
    assert explain(prefix, 0.0) == ""  # all of which something is known wait in the same
    dump(prefix, 1, DONE)
    told = (
        "rank 1 had joined no further collective, ranks 0, 2 waited in all_gather (number 812 of "
    )
    assert explain(prefix, 0.0) == f"{told}group 0)"
    assert explain(prefix, time.time() + 60) == ""  # of an earlier attempt


def test_ranks_in_different_collectives_are_named(tmp_path: Path) -> None:
    prefix = tmp_path / "collectives_rank"
    dump(prefix, 0, DONE, entry("all_gather", 812))
    dump(prefix, 1, DONE, entry("all_reduce", 812))
    assert explain(prefix, 0.0) == (
        "rank 0 waited in all_gather (number 812 of group 0), rank 1 waited in all_reduce (number "
        "812 of group 0)"
    )


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_cause_has_what_hosts_and_nccl_told(host: Path, device: str) -> None:
    rundir, plan = RunDir(host / "run"), plan_of()
    rundir.create()
    plan = replace(plan, cluster=replace(plan.cluster, device=device))
    (host / "kmsg").write_text(record(0, "NVRM: Xid (PCI:0000:17:00): 94, Contained"))
    events, watch = EventWriter(rundir.launcher_events), Watch(plan=plan, rundir=rundir)
    launch = Launch(plan=plan, rundir=rundir, events=events, worker="", node=Node(), watch=watch)
    dump(rundir.collective_dumps, 0, DONE, entry("all_gather", 812))
    dump(rundir.collective_dumps, 1, DONE)
    launch.record_exits([WorkerExit(rank=0, exit_code=-6, log="a", gave_up=True)])
    there = "on there: GPU 0000:3b:00 has Xid 74"
    fields = to_plain(WorkerExit(rank=1, exit_code=-6, log="b", gpu_errors=there))
    launch.take(
        [Event(kind=WorkerExit.KIND, t=time.time() + 1, rank=None, attempt=0, fields=fields)]
    )
    cause = launch.cause()
    own = f"on {HOST}: GPU 0000:17:00 has Xid 94 (an error in GPU memory ended the process that "
    assert (own in cause) == (device == "cuda")
    assert there in cause
    assert "rank 1 had joined no further collective, rank 0 waited in all_gather" in cause


class Code:
    def __reduce__(self) -> Any:
        return os.mkdir, ("made",)


def test_dumps_that_are_torn_or_hold_code_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = tmp_path / "collectives_rank"
    monkeypatch.chdir(tmp_path)
    dump(prefix, 0, DONE, entry("all_gather", 812))
    dump(prefix, 1, DONE)
    torn = dump(prefix, 2, DONE)
    torn.write_bytes(torn.read_bytes()[:20])
    prefix.with_name("collectives_rank3").write_bytes(pickle.dumps({"entries": Code()}))
    (tmp_path / "collectives_rank_x").write_text("")
    assert explain(prefix, 0.0).startswith("rank 1 had joined no further collective, rank 0 waited")
    assert not (tmp_path / "made").exists()


def test_a_rank_that_a_real_time_signal_ended_is_told_by_its_number() -> None:
    exits = [WorkerExit(rank=0, exit_code=code, log="") for code in (-35, -9, 0, 3, -9999)]
    assert [x.killed_by for x in exits] == ["signal 35", "SIGKILL", None, None, "signal 9999"]
