"""Several hosts of which one holds the others up: the run goes on without it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.dist.conftest import Colotrain
from tests.dist.test_run import wait_for_step
from tests.faults.hosts import Host, missing, network
from tests.faults.test_hosts import PLAN, PORT, begin, end, events, losses

REASON = missing()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(REASON), reason=REASON),
]

SLOW = """\
import os, socket, time
def wait(model, step):
    if socket.gethostname().endswith("-1"):
        time.sleep(0.25)
    while step == 49 and not os.path.exists("go"):
        time.sleep(0.1)
"""
STEPS = 50
SETTINGS = (
    *("plugin=zero3", "train.on_gradients=hook:wait", f"train.max_steps={STEPS}"),
    *("train.eval_every=0", "cluster.procs_per_node=2", "elastic.replace_slow=true"),
    *("elastic.replace_slow_after_s=4", "elastic.hang_timeout_s=60"),
)
LEFT = 76


def test_a_spare_host_takes_the_place_of_a_slow_one(tmp_path: Path) -> None:
    """Without any checkpoint: from the copies in memory, and no finished step is made again."""
    (tmp_path / "hook.py").write_text("def wait(model, step): pass\n")
    settings = (*SETTINGS, "elastic.memory_copy=1GiB", "checkpoint.every=0")
    settings += ("elastic.spare_nodes=1",)
    with network(3, tmp_path) as hosts:
        patient = "elastic.replace_slow=false"
        calm = begin(hosts[:2], tmp_path, "calm", *settings, patient, nodes=2)
        undisturbed = [end(process) for process in calm]
        assert [code for code, _, _ in undisturbed] == [0, 0], undisturbed
        (tmp_path / "hook.py").write_text(SLOW)
        first, slow = begin(hosts[:2], tmp_path, "slow", *settings, nodes=2)
        wait_for_step(Colotrain(tmp_path), "slow", 1)  # who comes first has a place
        spare = begin_alone(hosts[2], 2, tmp_path, settings)
        code, _, said = end(slow)
        assert code == LEFT, said
        again = end(begin_alone(hosts[1], 1, tmp_path, settings))
        (tmp_path / "go").touch()
        code, out, err = end(first)
        assert (code, end(spare)[0]) == (0, 0), err
    assert "node 1: was left, and the run goes on without this machine: rank" in said
    assert again[0] == LEFT, again
    (left,) = events(tmp_path, "slow", "node_left")
    assert (left.fields["node"], left.fields["host"]) == (1, hosts[1].name)
    assert left.fields["rank"] in (2, 3)
    assert (left.fields["successor"], left.fields["nodes"]) == (2, 2)
    assert left.fields["seconds"] >= 4
    (resumed,) = events(tmp_path, "slow", "resumed")
    assert resumed.fields["in_memory"] is True
    before = [e for e in events(tmp_path, "slow", "step") if e.attempt == 0]
    assert resumed.fields["step"] == max(e.fields["step"] for e in before)
    after = {
        e.rank: e.fields["host"] for e in events(tmp_path, "slow", "started") if e.attempt == 1
    }
    assert after == {0: hosts[0].name, 1: hosts[0].name, 2: hosts[2].name, 3: hosts[2].name}
    summary = json.loads(out)
    assert losses(summary) == losses(json.loads(undisturbed[0][1]))
    assert (summary["nodes_left"][0]["node"], summary["goodput"]["lost_steps"]) == (1, 0)
    listed = Colotrain(tmp_path)("runs").out
    assert "1, 1 node left" in listed


def begin_alone(
    host: Host, number: int, cwd: Path, settings: tuple[str, ...]
) -> subprocess.Popen[str]:
    """Start the launcher of one host more, or of one that was left once more."""
    head = f"cluster.rdzv_endpoint=10.199.0.1:{PORT}"
    shared = (*PLAN, *settings, "name=slow", "cluster.nodes=2", head)
    return host.colotrain("run", *shared, f"cluster.node_rank={number}", "--json", cwd=cwd)


def test_the_run_goes_on_alone_from_the_last_step(tmp_path: Path) -> None:
    """Ranks save at the end of the step at which their host is left."""
    (tmp_path / "go").touch()
    (tmp_path / "hook.py").write_text(SLOW)
    settings = (
        *SETTINGS,
        "elastic.min_nodes=1",
        "elastic.memory_copy=off",
        "checkpoint.every=1000",
    )
    with network(2, tmp_path) as hosts:
        first, slow = begin(hosts, tmp_path, "slow", *settings)
        code, _, said = end(slow)
        assert code == LEFT, said
        code, out, err = end(first)
        assert code == 0, err
    (left,) = events(tmp_path, "slow", "node_left")
    assert (left.fields["node"], left.fields["nodes"]) == (1, 1)
    (resumed,) = events(tmp_path, "slow", "resumed")
    before = [e.fields["step"] for e in events(tmp_path, "slow", "step") if e.attempt == 0]
    assert resumed.fields["step"] == max(before)
    assert json.loads(out)["steps"] == STEPS
    assert {e.fields["world_size"] for e in events(tmp_path, "slow", "started")} == {4, 2}
