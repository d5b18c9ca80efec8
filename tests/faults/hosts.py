"""Hosts on one machine: network namespaces with names, addresses and process tables of their own.

They hang on one bridge. A host's processes see its own /etc/hosts; its own name is 127.0.1.1, as
Debian's installer writes it, unless told otherwise.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

TOOLS = ("ip", "unshare", "mount", "hostname", "taskset")


def missing() -> str:
    """Why hosts cannot be made here; empty where they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    lacking = [tool for tool in TOOLS if shutil.which(tool) is None]
    if lacking:
        return f"not installed: {', '.join(lacking)}"
    name = f"ct{os.getpid()}x"
    try:
        done = ip("netns", "add", name, check=False)
        if done.returncode:
            return f"no network namespaces: {done.stderr.strip()}"
        bridge = ip("link", "add", f"{name}b", "type", "bridge", check=False)
        ip("link", "del", f"{name}b", check=False)
        return f"no bridges: {bridge.stderr.strip()}" if bridge.returncode else ""
    finally:
        ip("netns", "del", name, check=False)


def ip(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True, check=check, timeout=20)


@dataclass(frozen=True)
class Host:
    name: str
    address: str
    link: str
    """The bridge's end of its cable."""
    hosts_file: Path
    core: int
    """All its processes share one."""
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(
        self, *words: str, cwd: Path, env: dict[str, str] | None = None
    ) -> subprocess.Popen[str]:
        inside = (
            f"mount --bind {shlex.quote(str(self.hosts_file))} /etc/hosts && "
            f'hostname {self.name} && exec "$@"'
        )
        spaces = ("--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
        prefix = ("ip", "netns", "exec", self.name, "taskset", "-c", str(self.core))
        process = subprocess.Popen(
            [*prefix, "unshare", *spaces, "sh", "-c", inside, "sh", *words],
            cwd=cwd,
            env={**os.environ, "CI": "1", **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        return process

    def colotrain(self, *arguments: str, cwd: Path) -> subprocess.Popen[str]:
        return self.start(sys.executable, "-m", "colotrain", *arguments, cwd=cwd)

    def cut(self) -> None:
        """Pull its cable."""
        ip("link", "set", self.link, "down")

    def mend(self) -> None:
        ip("link", "set", self.link, "up")

    def signal(self, number: int) -> None:
        """Send all its processes a signal."""
        for process in self.processes:
            if process.poll() is None:
                inside = psutil.Process(process.pid).children(recursive=True)
                for one in [*inside, psutil.Process(process.pid)]:
                    one.send_signal(number)

    def kill(self) -> None:
        """End all its processes at once."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.communicate()


@contextmanager
def network(num_hosts: int, folder: Path, *, own_name: str = "127.0.1.1") -> Iterator[list[Host]]:
    """So many hosts that reach one another; all is taken away at the end."""
    tag, hosts = f"ct{os.getpid() % 100000}", list[Host]()
    bridge = f"{tag}br"
    ip("link", "add", bridge, "type", "bridge")
    try:
        ip("link", "set", bridge, "up")
        for index in range(num_hosts):
            hosts.append(_host(tag, index, bridge, folder))
        for host in hosts:
            others = "".join(f"{h.address} {h.name}\n" for h in hosts if h is not host)
            own = own_name or host.address
            host.hosts_file.write_text(f"127.0.0.1 localhost\n{own} {host.name}\n{others}")
        yield hosts
    finally:
        for host in hosts:
            host.kill()
            ip("netns", "del", host.name, check=False)
            ip("link", "del", host.link, check=False)
        ip("link", "del", bridge, check=False)


def _host(tag: str, index: int, bridge: str, folder: Path) -> Host:
    name, link, address = f"{tag}-{index}", f"{tag}v{index}", f"10.199.0.{index + 1}"
    ip("netns", "add", name)
    ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
    ip("link", "set", link, "master", bridge, "up")
    ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
    ip("-n", name, "link", "set", "eth0", "up")
    ip("-n", name, "link", "set", "lo", "up")
    core = sorted(os.sched_getaffinity(0))[index % len(os.sched_getaffinity(0))]
    return Host(name, address, link, folder / f"hosts-{index}", core)
