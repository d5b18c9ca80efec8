"""Several hosts: the same losses as on one, and what happens when one of them goes or comes."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from colotrain.events.event import Event
from tests.dist.conftest import SMALL, Colotrain
from tests.dist.test_run import wait_for_step
from tests.faults.hosts import Host, missing, network

REASON = missing()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)

PORT = 29501
PLAN = (*SMALL, "plugin=fsdp-hybrid", "train.global_batch=16", "train.max_steps=20")
RANKS = "cluster.procs_per_node=2"
SAME = 1e-5
"""Of losses: ranks sum in another order."""


@pytest.fixture
def two_hosts(tmp_path: Path) -> Iterator[list[Host]]:
    with network(2, tmp_path) as hosts:
        yield hosts


def losses(summary: dict) -> dict[int, float]:
    return dict(summary["loss"]["history"])


def begin(
    hosts: list[Host], cwd: Path, name: str, *settings: str, nodes: int | None = None
) -> list[subprocess.Popen[str]]:
    """Launch the run by hand, on each host with its number."""
    head = f"cluster.rdzv_endpoint={hosts[0].address}:{PORT}"
    shared = (*PLAN, *settings, f"name={name}", f"cluster.nodes={nodes or len(hosts)}", head)
    return [
        host.colotrain("run", *shared, f"cluster.node_rank={rank}", "--json", cwd=cwd)
        for rank, host in enumerate(hosts)
    ]


def end(process: subprocess.Popen[str], *, within_s: float = 120) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=within_s)
    return process.returncode, out, err


def events(cwd: Path, name: str, kind: str) -> list[Event]:
    return [event for event in Colotrain(cwd).events(name) if event.kind == kind]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of one host with two ranks."""
    colotrain = Colotrain(tmp_path_factory.mktemp("straight"))
    return losses(colotrain.run(*PLAN, "plugin=zero3", RANKS, "name=straight"))


@pytest.mark.slow
@pytest.mark.parametrize("num_hosts", [2, 4])
def test_hosts_give_the_losses_of_one(tmp_path: Path, num_hosts: int) -> None:
    """fsdp-hybrid 2 × 2, with two ranks on each of two hosts, or one on each of four."""
    ranks = 4 // num_hosts
    size = ("plugin.shard_size=2", "train.max_steps=6")
    one = Colotrain(tmp_path).run(*PLAN, *size, "cluster.procs_per_node=4", "name=one")
    with network(num_hosts, tmp_path) as hosts:
        started = begin(hosts, tmp_path, "many", *size, f"cluster.procs_per_node={ranks}")
        ended = [end(process) for process in started]
    assert [code for code, _, _ in ended] == [0] * num_hosts, ended
    many = json.loads(ended[0][1])
    assert losses(many) == pytest.approx(losses(one), abs=SAME)
    by_host = {e.fields["host"] for e in events(tmp_path, "many", "started")}
    assert by_host == {host.name for host in hosts}
    assert many["memory"]["peak_by_rank"][3] > 0


@pytest.mark.slow
def test_a_node_that_differs_is_refused_by_name(two_hosts: list[Host], tmp_path: Path) -> None:
    head = f"cluster.rdzv_endpoint={two_hosts[0].address}:{PORT}"
    shared = (*PLAN, "cluster.nodes=2", RANKS, head, "name=odd")
    first = two_hosts[0].colotrain("run", *shared, "cluster.node_rank=0", cwd=tmp_path)
    other = two_hosts[1].colotrain(
        "run", *shared, "cluster.node_rank=1", "optim.lr=0.5", cwd=tmp_path
    )
    for code, _, err in (end(other), end(first)):
        assert code == 2, err
        assert f"node 1 ({two_hosts[1].name}) differs from node 0" in err
        assert "optim.lr 0.5, not 0.003" in err
        assert "Traceback" not in err


def test_a_node_without_the_shared_folder_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from colotrain.launch import membership
    from colotrain.launch.node_registry import NodeInfo, NodeRegistry, Refused, RendezvousError

    monkeypatch.setattr(membership, "FOLDER_S", 0.5)
    info = NodeInfo(node=0, host="a", instance="x", versions={}, plan={})
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    registry = NodeRegistry(
        listener,
        secret="s",
        info=info,
        min_nodes=1,
        max_nodes=2,
        expected_nodes=1,
        open_store=lambda address: 1,
        plan_digest="",
    )
    with pytest.raises(RendezvousError, match="one shared folder") as raised:
        membership.Membership(
            ("127.0.0.1", port), info, secret=lambda: "other", lost_s=5
        ).next_round(timeout_s=20)
    assert not isinstance(raised.value, Refused)
    registry.close()


@pytest.mark.slow
def test_a_host_is_killed_and_the_other_goes_on(
    two_hosts: list[Host], tmp_path: Path, straight: dict[int, float]
) -> None:
    elastic = ("elastic.min_nodes=1", "checkpoint.every=3", "plugin=zero3", RANKS)
    first, _ = begin(two_hosts, tmp_path, "hurt", *elastic)
    wait_for_step(Colotrain(tmp_path), "hurt", 4)
    two_hosts[1].kill()
    killed_at = time.time()
    code, out, err = end(first)
    assert code == 0, err
    summary = json.loads(out)
    assert summary["restarts"] == 1
    assert losses(summary) == pytest.approx(straight, abs=SAME)
    again = [e for e in events(tmp_path, "hurt", "started") if e.fields["world_size"] == 2]
    assert again
    assert again[0].t - killed_at < 30


@pytest.mark.slow
@pytest.mark.parametrize("size", [(RANKS,), ("cluster.procs_per_node=1", "mesh.pp=2")])
def test_a_lost_host_goes_on_from_the_copies_of_the_other_one(
    two_hosts: list[Host], tmp_path: Path, size: tuple[str, ...]
) -> None:
    """Without any checkpoint; no step that all ranks had finished is made again.

    Also where each host has one stage of the model; with the losses of one rank.
    """
    settings = ("elastic.memory_copy=1GiB", "checkpoint.every=0", "plugin=zero3", *size)
    settings += ("train.max_steps=40", "train.eval_every=0")
    undisturbed = [end(process) for process in begin(two_hosts, tmp_path, "calm", *settings)]
    assert [code for code, _, _ in undisturbed] == [0, 0], undisturbed
    first, _ = begin(two_hosts, tmp_path, "hurt", *settings)
    wait_for_step(Colotrain(tmp_path), "hurt", 4)
    two_hosts[1].kill()
    killed_at = time.time()
    head = f"cluster.rdzv_endpoint={two_hosts[0].address}:{PORT}"
    shared = (*PLAN, *settings, "name=hurt", "cluster.nodes=2", head, "--json")
    replacement = two_hosts[1].colotrain("run", *shared, "cluster.node_rank=1", cwd=tmp_path)
    code, out, err = end(first)
    assert (code, end(replacement)[0]) == (0, 0), err
    steps = [e for e in events(tmp_path, "hurt", "step") if e.attempt == 0 and e.t < killed_at]
    ranks = {e.rank for e in steps}
    newest = [max(e.fields["step"] for e in steps if e.rank == rank) for rank in ranks]
    assert len(ranks) == (4 if RANKS in size else 2)
    resumed = [e.fields for e in events(tmp_path, "hurt", "resumed")]
    assert [fields["in_memory"] for fields in resumed] == [True]
    assert resumed[0]["step"] >= min(newest) >= 4
    assert losses(json.loads(out)) == losses(json.loads(undisturbed[0][1]))
    alone = (*settings, "mesh.pp=1", "cluster.procs_per_node=1", "name=alone")
    one = Colotrain(tmp_path).run(*PLAN, *alone)
    assert losses(json.loads(out)) == pytest.approx(losses(one), abs=SAME)


@pytest.mark.slow
def test_one_host_goes_on_alone_from_the_copies_of_both(
    two_hosts: list[Host], tmp_path: Path
) -> None:
    """As from a checkpoint of that very step, but there is none."""
    settings = ("elastic.min_nodes=1", "plugin=zero3", RANKS, "train.max_steps=40")
    settings += ("elastic.memory_copy=1GiB", "train.eval_every=0")
    saving = (*settings, "checkpoint.every=1", "checkpoint.keep=40")
    undisturbed = [end(process) for process in begin(two_hosts, tmp_path, "calm", *saving)]
    assert [code for code, _, _ in undisturbed] == [0, 0], undisturbed
    first, _ = begin(two_hosts, tmp_path, "hurt", *settings, "checkpoint.every=0")
    wait_for_step(Colotrain(tmp_path), "hurt", 4)
    two_hosts[1].kill()
    killed_at = time.time()
    code, out, err = end(first)
    assert code == 0, err
    steps = [e for e in events(tmp_path, "hurt", "step") if e.attempt == 0 and e.t < killed_at]
    newest = [max(e.fields["step"] for e in steps if e.rank == rank) for rank in range(4)]
    resumed = [e.fields for e in events(tmp_path, "hurt", "resumed")]
    assert [fields["in_memory"] for fields in resumed] == [True]
    step = resumed[0]["step"]
    assert step >= min(newest) >= 4
    saved = Colotrain(tmp_path).rundir("calm").checkpoint(step)
    one = (*PLAN, *settings[1:], "cluster.nodes=1", f"checkpoint.resume={saved}", "name=disk")
    from_disk = losses(Colotrain(tmp_path).run(*one))
    found = losses(json.loads(out))
    assert {k: v for k, v in found.items() if k > step} == from_disk
    before = losses(json.loads(undisturbed[0][1]))
    assert [found[k] for k in range(1, step + 1)] == [before[k] for k in range(1, step + 1)]


WAITING = """\
import os, time
def wait(model, step):
    if step > 4 and not os.path.exists("go"):
        time.sleep(2)
"""


IN_MEMORY = ("elastic.memory_copy=1GiB", "checkpoint.every=0", "train.eval_every=0")


@pytest.mark.slow
@pytest.mark.parametrize("kept", [(), IN_MEMORY], ids=["checkpoints", "copies alone"])
def test_a_host_joins_late(two_hosts: list[Host], tmp_path: Path, kept: tuple[str, ...]) -> None:
    """What the first host had done is kept; the global batch and so the losses stay."""
    elastic = ("elastic.max_nodes=2", "plugin=zero3", RANKS, "train.max_steps=30", *kept)
    alone = losses(Colotrain(tmp_path).run(*PLAN, *elastic[1:], "name=alone"))
    (tmp_path / "hook.py").write_text(WAITING)
    same = ("name=joined", "train.on_gradients=hook:wait", *elastic)
    head = f"cluster.rdzv_endpoint={two_hosts[0].address}:{PORT}"
    shared = (*PLAN, *same, "cluster.nodes=1", head, "--json")
    first = two_hosts[0].colotrain("run", *shared, "cluster.node_rank=0", cwd=tmp_path)
    wait_for_step(Colotrain(tmp_path), "joined", 2)
    second = two_hosts[1].colotrain("run", *shared, "cluster.node_rank=1", cwd=tmp_path)
    deadline = time.monotonic() + 100
    while len(events(tmp_path, "joined", "started")) < 6:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    (tmp_path / "go").touch()
    code, out, err = end(first)
    assert code == 0, err
    assert end(second)[0] == 0
    assert losses(json.loads(out)) == pytest.approx(alone, abs=SAME)
    started = events(tmp_path, "joined", "started")
    assert sorted(e.fields["world_size"] for e in started) == [2, 2, 4, 4, 4, 4]
    assert all(e.fields["step"] >= 2 for e in started if e.attempt == 1)
    if kept:
        resumed = [e.fields for e in events(tmp_path, "joined", "resumed")]
        assert [fields["in_memory"] for fields in resumed] == [True]
        assert 2 <= resumed[0]["step"] < 30
    restart = events(tmp_path, "joined", "restart")[0]
    assert "node 1 joins" in restart.fields["cause"]


@pytest.mark.slow
def test_the_host_of_the_registry_dies(two_hosts: list[Host], tmp_path: Path) -> None:
    """The other one ends in bounded time and says why."""
    _, second = begin(two_hosts, tmp_path, "headless", RANKS, "train.max_steps=5000")
    wait_for_step(Colotrain(tmp_path), "headless", 2)
    two_hosts[0].kill()
    killed_at = time.monotonic()
    code, _, err = end(second, within_s=60)
    assert time.monotonic() - killed_at < 45
    assert code == 1
    assert f"node 0 at {two_hosts[0].address}:{PORT} is out of reach" in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_cable_is_out_for_three_seconds(
    two_hosts: list[Host], tmp_path: Path, straight: dict[int, float]
) -> None:
    first, second = begin(two_hosts, tmp_path, "cut", RANKS)
    wait_for_step(Colotrain(tmp_path), "cut", 3)
    two_hosts[1].cut()
    time.sleep(3)
    two_hosts[1].mend()
    code, out, err = end(first)
    assert (code, end(second)[0]) == (0, 0), err
    summary = json.loads(out)
    assert summary["restarts"] == 0
    assert losses(summary) == pytest.approx(straight, abs=SAME)


@pytest.mark.slow
def test_a_cable_is_out_for_forty_five_seconds(
    two_hosts: list[Host], tmp_path: Path, straight: dict[int, float]
) -> None:
    """Both nodes are needed: the lost one comes back, and all go on from the last save."""
    settings = ("checkpoint.every=3", RANKS, "elastic.hang_timeout_s=120")
    first, second = begin(two_hosts, tmp_path, "cut", *settings)
    wait_for_step(Colotrain(tmp_path), "cut", 4)
    two_hosts[1].cut()
    time.sleep(45)
    two_hosts[1].mend()
    code, out, err = end(first)
    assert (code, end(second)[0]) == (0, 0), err
    summary = json.loads(out)
    assert losses(summary) == pytest.approx(straight, abs=SAME)
    causes = [e.fields["cause"] for e in events(tmp_path, "cut", "restart")]
    assert causes
    assert "node 1" in causes[0]


def stop_and_wake(hosts: list[Host], seconds: float, *, between_s: float = 0) -> None:
    """As `scontrol suspend` and `resume`: every process of a host, one host after the other."""
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for host in hosts:
            host.signal(number)
            time.sleep(between_s)
        if number == signal.SIGSTOP:
            time.sleep(seconds)


SUSPENDED = ("checkpoint.every=3", RANKS, "elastic.hang_timeout_s=20", "train.max_steps=60")


@pytest.mark.slow
def test_all_hosts_are_suspended_for_longer_than_a_rank_may_hang(
    two_hosts: list[Host], tmp_path: Path
) -> None:
    """Nothing is restarted, although they neither sleep nor wake at the same moment."""
    first, second = begin(two_hosts, tmp_path, "asleep", *SUSPENDED)
    wait_for_step(Colotrain(tmp_path), "asleep", 4)
    stop_and_wake(two_hosts, 45, between_s=2)
    code, out, err = end(first)
    assert (code, end(second)[0]) == (0, 0), err
    assert json.loads(out)["restarts"] == 0, err
    assert not events(tmp_path, "asleep", "restart")
    assert any("were stopped for" in e.fields["text"] for e in events(tmp_path, "asleep", "note"))


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1])
def test_one_host_is_suspended_and_the_run_goes_on_when_it_wakes(
    two_hosts: list[Host], tmp_path: Path, index: int
) -> None:
    first, second = begin(two_hosts, tmp_path, "asleep", *SUSPENDED)
    wait_for_step(Colotrain(tmp_path), "asleep", 4)
    stop_and_wake([two_hosts[index]], 30)
    code, out, err = end(first)
    assert (code, end(second)[0]) == (0, 0), err
    assert json.loads(out)["steps"] == 60
