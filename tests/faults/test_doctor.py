"""The doctor finds faults that are really there: each test plants one and reads one line."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from colotrain.doctor.finding import Finding
from colotrain.doctor.nodes import compare
from tests.running import Colotrain, Result

NEEDS_ROOT = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("unshare") is None, reason="mount namespaces need root"
)


def examine(
    cwd: Path,
    only: str,
    *settings: str,
    inside: str = "",
    spaces: tuple[str, ...] = ("--mount", "--uts"),
    env: dict[str, str] | None = None,
    before: Callable[[], None] | None = None,
) -> tuple[int, dict[str, Finding]]:
    """Run the doctor, after the shell lines `inside` in namespaces of its own: code, findings."""
    words = ["doctor", *settings, "--only", only, "--json"]
    if inside or before:
        done = run_anew(words, cwd, inside=inside, spaces=spaces, before=before)
    else:
        done = Colotrain(cwd)(*words, env=env)
    assert done.out, done.err
    (rows,) = done.json["hosts"].values()
    found = [Finding(**row) for row in rows]
    assert all(f.fix for f in found if f.status != "ok")
    return done.code, {f.check: f for f in found}


def run_anew(
    words: list[str],
    cwd: Path,
    *,
    inside: str,
    spaces: tuple[str, ...],
    before: Callable[[], None] | None,
) -> Result:
    """As a new Python, in namespaces or under limits of its own."""
    command = [sys.executable, "-m", "colotrain", *words]
    if inside:
        command = ["unshare", *spaces, "sh", "-e", "-c", f'{inside}\nexec "$@"', "sh", *command]
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=200, preexec_fn=before
    )
    return Result(done.returncode, done.stdout, done.stderr)


def hosts_file(folder: Path, text: str) -> str:
    (folder / "hosts").write_text(text)
    return f"hostname planted\nmount --bind {folder}/hosts /etc/hosts"


@NEEDS_ROOT
def test_its_own_name_that_is_loopback(tmp_path: Path) -> None:
    inside = hosts_file(tmp_path, "127.0.0.1 localhost\n127.0.1.1 planted\n")
    code, found = examine(tmp_path, "name", inside=inside)
    assert (code, found["name"].status) == (0, "warn")
    assert "planted is 127.0.1.1" in found["name"].text
    assert "/etc/hosts" in found["name"].fix


@NEEDS_ROOT
def test_its_own_name_that_nobody_knows(tmp_path: Path) -> None:
    inside = (
        hosts_file(tmp_path, "127.0.0.1 localhost\n") + "\nmount --bind /dev/null /etc/resolv.conf"
    )
    code, found = examine(tmp_path, "name", inside=inside)
    assert (code, found["name"].status) == (1, "fail")


@NEEDS_ROOT
def test_a_name_that_others_can_use_is_fine(tmp_path: Path) -> None:
    inside = hosts_file(tmp_path, "127.0.0.1 localhost\n10.1.2.3 planted\n")
    code, found = examine(tmp_path, "name", inside=inside)
    assert (code, found["name"].status) == (0, "ok")


@NEEDS_ROOT
def test_no_loopback(tmp_path: Path) -> None:
    code, found = examine(tmp_path, "loopback", inside="true", spaces=("--net",))
    assert (code, found["loopback"].status) == (1, "fail")
    assert "ip link set lo up" in found["loopback"].fix


@NEEDS_ROOT
def test_a_run_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    inside = f"mount -t tmpfs -o ro none {tmp_path}/runs"
    code, found = examine(tmp_path, "runs", inside=inside)
    assert (code, found["runs"].status) == (1, "fail")


@NEEDS_ROOT
def test_a_disk_that_is_nearly_full(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    inside = f"mount -t tmpfs -o size=64m none {tmp_path}/runs"
    code, found = examine(tmp_path, "runs", inside=inside)
    assert (code, found["disk space"].status) == (1, "fail")
    assert found["runs"].status == "ok"


@NEEDS_ROOT
def test_little_shared_memory(tmp_path: Path) -> None:
    code, found = examine(tmp_path, "shm", inside="mount -t tmpfs -o size=1m none /dev/shm")
    assert (code, found["/dev/shm"].status) == (0, "warn")
    assert "--shm-size" in found["/dev/shm"].fix


def test_few_open_files(tmp_path: Path) -> None:
    limit = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))  # noqa: E731
    code, found = examine(tmp_path, "limits", before=limit)
    assert (code, found["open files"].status) == (1, "fail")
    assert "ulimit -n" in found["open files"].fix


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        code, found = examine(tmp_path, "head", f"cluster.rdzv_endpoint=localhost:{port}")
        assert (code, found["port"].status) == (1, "fail")
        assert f"port {port} cannot be listened on" in found["port"].text


def test_a_head_that_nobody_knows(tmp_path: Path) -> None:
    code, found = examine(tmp_path, "head", "cluster.rdzv_endpoint=no-such-host.invalid:29500")
    assert (code, found["head"].status) == (1, "fail")


def test_a_clock_that_is_behind(tmp_path: Path) -> None:
    plan = tmp_path / "runs" / "other" / "plan.json"
    plan.parent.mkdir(parents=True)
    plan.write_text("{}")
    os.utime(plan, (time.time() + 3600, time.time() + 3600))
    code, found = examine(tmp_path, "runs")
    assert (code, found["clock"].status) == (0, "warn")
    assert "in the future" in found["clock"].text


def test_variables_of_others(tmp_path: Path) -> None:
    env = {"GLOO_SOCKET_IFNAME": "ib77"}
    code, found = examine(tmp_path, "environment", env=env)
    assert (code, found["environment"].status) == (1, "fail")
    code, found = examine(tmp_path, "environment", env={"WORLD_SIZE": "8"})
    assert (code, found["environment"].status) == (0, "warn")
    assert "unset WORLD_SIZE" in found["environment"].fix


def test_a_slurm_that_does_not_answer(tmp_path: Path) -> None:
    for name, text in (("sbatch", "#!/bin/sh\n"), ("sinfo", "#!/bin/sh\nexec sleep 60\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    code, found = examine(tmp_path, "slurm", env=env)
    assert (code, found["slurm"].status) == (0, "warn")


def test_an_unusable_cache(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    env = {"COLOTRAIN_CACHE": str(tmp_path / "file" / "cache")}
    code, found = examine(tmp_path, "cache", env=env)
    assert (code, found["cache"].status) == (1, "fail")


def row(host: str, **changes: object) -> dict[str, object]:
    versions = {"torch": "2.13.0", "colotrain": "1"}
    return {"host": host, "sees_folder": True, "skew_s": 0.0, "versions": versions} | changes


def test_nodes_that_differ() -> None:
    old = row("b", versions={"torch": "2.12.0", "colotrain": "1"}, skew_s=-90.0, sees_folder=False)
    found = {f.check: f for f in compare([row("a"), old])}
    assert found["shared folder"].status == "fail"
    assert found["clocks"].status == "warn"
    assert "torch is 2.13.0 on a, but b 2.12.0" in found["versions"].text
    assert [f.status for f in compare([row("a"), row("b")])] == ["ok", "ok"]


def listens_at(pid: int, port: int) -> str:
    """The address at which a process listens, as soon as it does."""
    for _ in range(1200):
        for one in psutil.Process(pid).net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN and one.laddr.port == port:
                return str(one.laddr.ip)
        time.sleep(0.05)
    raise AssertionError(f"nobody listens at {port}")


def test_nodes_without_a_shared_folder_find_out(tmp_path: Path) -> None:
    """Two doctors that meet: the all-reduce works, the folder is not the same."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    processes = []
    for rank in range(2):
        cwd = tmp_path / str(rank)
        cwd.mkdir()
        settings = (
            "cluster.nodes=2",
            f"cluster.node_rank={rank}",
            f"cluster.rdzv_endpoint=127.0.0.1:{port}",
        )
        words = ["doctor", "--all-nodes", *settings, "--only", "cpu", "--json"]
        processes.append(Colotrain(cwd).start(*words))
        if rank == 0:
            assert listens_at(processes[0].pid, port) == "127.0.0.1"
    outs = [process.communicate(timeout=200)[0] for process in processes]
    assert (processes[0].returncode, outs[1]) == (1, "")
    between = {finding["check"]: finding for finding in json.loads(outs[0])["hosts"]["all nodes"]}
    assert between["shared folder"]["status"] == "fail"
    assert between["all-reduce"]["status"] in ("ok", "warn"), between["all-reduce"]
