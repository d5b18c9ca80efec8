"""`cluster=hosts` over real sshds, in network namespaces with processes of their own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.dist.conftest import SMALL, Colotrain
from tests.faults.hosts import Host, missing, network
from tests.running import wait_for_step

SSHD = shutil.which("sshd") or ("/usr/sbin/sshd" if Path("/usr/sbin/sshd").exists() else None)
LACKING = [tool for tool in ("ssh", "ssh-keygen") if shutil.which(tool) is None]
REASON = missing() or ("" if SSHD else "not installed: sshd") or ", ".join(LACKING)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(REASON), reason=REASON)]

RUN = (*SMALL, "plugin=zero2", "train.max_steps=20000", "checkpoint.every=5", "name=far")
HOSTS = ("cluster=hosts", "cluster.nodes=2", "cluster.procs_per_node=1", "cluster.device=cpu")


@dataclass(frozen=True)
class Site:
    hosts: list[Host]
    cwd: Path

    def colotrain(self, *arguments: str, code: int = 0) -> str:
        """Run a command on the first host, from which ssh reaches all; return what it printed."""
        path = f"{self.cwd / 'bin'}:/usr/sbin:/usr/bin:/sbin:/bin"
        words = ("env", f"PATH={path}", sys.executable, "-m", "colotrain", *arguments)
        process = self.hosts[0].start(*words, cwd=self.cwd)
        out, err = process.communicate(timeout=120)
        assert process.returncode == code, out + err
        return out if code == 0 else err

    def job(self) -> tuple[str, str]:
        (row,) = json.loads(self.colotrain("runs", "--json"))
        return row["job_state"], row["job_reason"] or ""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """Two hosts, each with an sshd; the user's ssh knows one of them under two names."""
    (tmp_path / "bin").mkdir()
    for name in ("host_key", "user_key"):
        words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)]
        subprocess.run(words, check=True, timeout=20)
    (tmp_path / "sshd_config").write_text(
        f"Port 2222\nHostKey {tmp_path}/host_key\nPidFile none\nUsePAM no\nStrictModes no\n"
        f"PermitRootLogin yes\nAuthorizedKeysFile {tmp_path}/user_key.pub\n"
    )
    with network(2, tmp_path) as hosts:
        public = (tmp_path / "host_key.pub").read_text()
        known = [f"[{host.address}]:2222 {public}" for host in hosts]
        (tmp_path / "known_hosts").write_text("".join(known))
        config = (
            f"UserKnownHostsFile {tmp_path}/known_hosts\nGlobalKnownHostsFile none\n"
            f"IdentityFile {tmp_path}/user_key\n"
            f"Host node-a\n HostName {hosts[0].address}\n"
            f"Host node-b\n HostName {hosts[1].address}\n"
            f"Host strange\n HostName {hosts[0].address}\n HostKeyAlias unheard-of\n"
            f"Host away\n HostName {hosts[0].address}\n Port 1\n"
            "Host *\n Port 2222\n"
        )
        (tmp_path / "ssh_config").write_text(config)
        ssh = tmp_path / "bin" / "ssh"
        ssh.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {tmp_path}/ssh_config "$@"\n')
        ssh.chmod(0o755)
        for host in hosts:
            inside = f"mount -t tmpfs none /run && mkdir /run/sshd && exec {SSHD} -D -f "
            host.start("sh", "-c", f"{inside} {tmp_path}/sshd_config", cwd=tmp_path)
        site = Site(hosts, tmp_path)
        yield site


def test_hosts_that_ssh_does_not_reach_are_named_at_once(site: Site) -> None:
    names = "cluster.hosts.names=[node-a,strange,away,node-b]"
    said = site.colotrain("submit", *RUN, *HOSTS, names, "cluster.nodes=4", code=2)
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(lines) == 2, said
    assert "=strange:" in lines[0]
    assert "Host key verification failed" in lines[0]
    assert "=away:" in lines[1]
    assert "Connection refused" in lines[1]
    assert not (site.cwd / "runs").exists()


def test_a_run_on_hosts_is_watched_stopped_and_resumed_and_a_lost_host_is_noticed(
    site: Site,
) -> None:
    submit = ("submit", *RUN, *HOSTS, "cluster.hosts.names=[node-a,node-b]")
    here = Colotrain(site.cwd)
    site.colotrain(*submit)
    wait_for_step(here, "far", 2)
    assert site.job() == ("RUNNING", "")
    assert "job node 1: node 1 of far" in site.colotrain("logs", "far")
    assert {e.fields["host"] for e in here.events("far") if e.kind == "started"} == {
        host.name for host in site.hosts
    }
    assert "preempted" in site.colotrain("stop", "far")
    assert site.job() == ("PREEMPTED", "")
    stopped_at = max(e.fields["step"] for e in here.events("far") if e.kind == "step")

    site.colotrain(*submit)
    wait_for_step(here, "far", stopped_at + 2)
    started = [e for e in here.events("far") if e.kind == "started" and e.attempt == 1]
    assert [e.fields["step"] for e in started] == [stopped_at] * 2
    site.hosts[1].kill()
    state, reason = site.job()
    assert state == "RUNNING"
    assert "node-b is not reached" in reason
    said = site.colotrain("stop", "far", code=1)
    assert "error: node-b is not reached" in said
    assert site.job()[0] == "NODE_FAIL"
