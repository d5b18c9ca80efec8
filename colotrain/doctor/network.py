"""Checks of names, addresses, ports and interfaces, and of SLURM where it is installed."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from colotrain.addresses import LOOPBACK, is_loopback
from colotrain.doctor.finding import Environment, Finding, fail, ok, warn

ASK_S = 5.0
LEFT_OVER = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK")
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def check_loopback(_: Environment) -> Iterator[Finding]:
    """Check the loopback interface, over which the workers of one machine connect."""
    try:
        with socket.create_server((LOOPBACK, 0)) as server:
            socket.create_connection(server.getsockname()[:2], timeout=2).close()
    except OSError as error:
        fix = "`ip link set lo up`; in a container, give it a network"
        yield fail("loopback", f"{LOOPBACK} cannot be used ({error})", fix)
        return
    yield ok("loopback", f"{LOOPBACK} can be used")


def check_name(env: Environment) -> Iterator[Finding]:
    """Check that this machine's name resolves to an address that other machines can use."""
    name = env.host
    try:
        found = sorted({str(i[4][0]) for i in socket.getaddrinfo(name, None)})
    except OSError as error:
        fix = f"add a line `ADDRESS {name}` to /etc/hosts, with an address that others reach"
        yield fail("name", f"this machine does not know its own name {name} ({error})", fix)
        return
    loopback = [a for a in found if is_loopback(a)]
    if loopback:
        text = (
            f"its own name {name} is {loopback[0]} here, so that other machines which are told "
            "it find themselves: rendezvous by name hangs"
        )
        fix = (
            f"in /etc/hosts give {name} the address that others reach, not {loopback[0]}; "
            "colotrain itself goes by cluster.rdzv_endpoint and the interface towards it"
        )
        yield warn("name", text, fix)
    else:
        yield ok("name", f"{name} is {', '.join(found)}")


def check_head(env: Environment) -> Iterator[Finding]:
    """Check node 0's endpoint: resolvable, port free on node 0, not loopback on other nodes."""
    if env.head is None:
        return
    host, port = env.head
    try:
        found = sorted({str(i[4][0]) for i in socket.getaddrinfo(host, port)})
    except OSError as error:
        fix = "write node 0's address in cluster.rdzv_endpoint instead"
        yield fail("head", f"cluster.rdzv_endpoint={host}:{port}: unknown name ({error})", fix)
        return
    if env.nodes > 1 and env.rank and all(map(is_loopback, found)):
        fix = "write an address of node 0 that other machines reach"
        yield fail("head", f"cluster.rdzv_endpoint={host}:{port} is {found[0]}, this machine", fix)
        return
    if env.rank == 0:
        yield from _check_free(host, port)
    else:
        yield ok("head", f"{host} is {', '.join(found)}")


def _check_free(host: str, port: int) -> Iterator[Finding]:
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        users = [c.pid for c in _connections() if c.laddr and c.laddr.port == port]
        who = f", used by process {users[0]}" if users and users[0] else ""
        fix = "choose another port above 1023 in cluster.rdzv_endpoint, on every node"
        yield fail("port", f"port {port} cannot be listened on ({error.strerror}{who})", fix)
        return
    yield ok("port", f"port {port} is free on {host}")


def _connections() -> list[Any]:
    try:
        return list(psutil.net_connections("tcp"))
    except (psutil.Error, OSError):
        return []


def check_environment(env: Environment) -> Iterator[Finding]:
    """Check for variables that would make workers use a wrong interface or launcher."""
    known = set(psutil.net_if_addrs())
    good = True
    for name in INTERFACES:
        wanted = env.variables.get(name, "")
        plain = wanted.lstrip("^=").split(",")[0]
        if wanted and not wanted.startswith("^") and not any(k.startswith(plain) for k in known):
            good = False
            fix = f"unset it, or name one of {', '.join(sorted(known))}"
            yield fail("environment", f"{name}={wanted}: there is no such interface", fix)
    left = [name for name in LEFT_OVER if name in env.variables]
    if left:
        good = False
        fix = f"unset {' '.join(left)}; colotrain sets them for its workers itself"
        yield warn("environment", f"{', '.join(left)} of another launcher are set", fix)
    if good:
        yield ok("environment", "no variable of torch or NCCL is in the way")


def check_interconnect(_: Environment) -> Iterator[Finding]:
    """Check InfiniBand ports and network interfaces."""
    ports = sorted(Path("/sys/class/infiniband").glob("*/ports/*/state"))
    down = [p for p in ports if "ACTIVE" not in p.read_text("utf-8", "replace")]
    if down:
        names = ", ".join(p.parts[-4] for p in down)
        fix = "check cables and `ibstat`; NCCL_IB_HCA can leave them out"
        yield warn("interconnect", f"InfiniBand ports are not active: {names}", fix)
    stats = {n: s for n, s in psutil.net_if_stats().items() if s.isup and n != "lo"}
    shown = ", ".join(f"{n} {s.speed} Mb/s" if s.speed > 0 else n for n, s in sorted(stats.items()))
    if not stats and not ports:
        fix = "runs on one machine need none; for several, bring one up"
        yield warn("interconnect", "no network interface but loopback is up", fix)
    elif not down:
        yield ok("interconnect", f"{len(ports)} InfiniBand ports; {shown}" if ports else shown)


def check_slurm(env: Environment) -> Iterator[Finding]:
    """Check that SLURM's commands, if installed, answer."""
    path = env.variables.get("PATH", "")
    if shutil.which("sbatch", path=path) is None:
        yield ok("slurm", "not here; `colotrain submit` needs it, nothing else does")
        return
    try:
        words = [shutil.which("sinfo", path=path) or "sinfo", "--noheader", "--format=%P"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=ASK_S)
        said = done.stderr.strip().splitlines()[-1:] or ["no partitions"]
    except (OSError, subprocess.SubprocessError) as error:
        yield warn("slurm", f"sinfo does not answer ({error})", "is slurmctld up? ask the site")
        return
    if done.returncode or not done.stdout.split():
        yield warn("slurm", f"sinfo: {said[0]}", "is slurmctld up, and is munge? ask the site")
    else:
        yield ok("slurm", f"partitions {', '.join(done.stdout.split())}")
