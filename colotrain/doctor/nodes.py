"""Checks that need all nodes, which connect to node 0, share their findings and all-reduce."""

from __future__ import annotations

import datetime
import json
import secrets
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from colotrain.addresses import LOOPBACK, is_loopback, listen_at, serve_store
from colotrain.doctor.exchange import judge, time_all_reduce
from colotrain.doctor.finding import Environment, Finding, fail, ok, warn

RENDEZVOUS_S = 120.0
CLOCK_S = 2.0
FOLDER_S = 30.0


def check_nodes(env: Environment, mine: list[Finding]) -> dict[str, list[Finding]]:
    """Findings of all nodes by host, and findings about their differences. All nodes must call.

    Node 0 listens on `env.head`. Other nodes get an empty result.
    """
    assert env.head is not None
    host, port = env.head
    try:
        return _check_nodes(env, mine)
    except (RuntimeError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0][:200]
        text = f"node {env.rank} of {env.nodes} could not meet the others at {host}:{port}"
        fix = "run it on every node at once, with ports of node 0 open to the others"
        return {env.host: [*mine, fail("nodes", f"{text} ({reason})", fix)]}


def _check_nodes(env: Environment, mine: list[Finding]) -> dict[str, list[Finding]]:
    from torch.distributed import TCPStore

    assert env.head is not None
    host, port = env.head
    is_head = env.rank == 0
    timeout = datetime.timedelta(seconds=RENDEZVOUS_S)
    if is_head:
        store = serve_store(listen_at(_own_address(host), port), timeout=timeout)
        token = secrets.token_hex(16)
        env.runs.mkdir(parents=True, exist_ok=True)
        probe = env.runs / f".colotrain-doctor-{token}"
        probe.write_text(token)
        store.set("token", token)
    else:
        store = TCPStore(host, port, is_master=False, timeout=timeout)
        token = store.get("token").decode()
        probe = env.runs / f".colotrain-doctor-{token}"
    about = {
        "host": env.host,
        "sees_folder": is_head or _appears(probe),
        "versions": {name: metadata.version(name) for name in ("colotrain", "torch")},
        "head": "" if is_head else _address_of(host),
        "findings": [asdict(finding) for finding in mine],
    }
    skew_s = _skew(store, env)
    store.set(f"about/{env.rank}", json.dumps(about | {"skew_s": skew_s}))
    rows = [json.loads(store.get(f"about/{rank}")) for rank in range(env.nodes)]
    if is_head:
        probe.unlink(missing_ok=True)
    towards = next((row["head"] for row in rows if row["head"]), LOOPBACK)
    found = _bandwidth(env, store, towards)
    store.set(f"done/{env.rank}", "1")
    if not is_head:
        return {}
    for rank in range(env.nodes):
        store.get(f"done/{rank}")
    by_host = {row["host"]: [Finding(**f) for f in row["findings"]] for row in rows}
    return by_host | {"all nodes": [*compare(rows), *found]}


def _appears(path: Path) -> bool:
    deadline = time.monotonic() + FOLDER_S
    while not path.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def _skew(store: Any, env: Environment) -> float:
    """Seconds that this clock is certainly ahead of node 0's, negative if it is behind."""
    if env.rank == 0:
        for rank in range(1, env.nodes):
            store.get(f"ask/{rank}")
            store.set(f"time/{rank}", repr(time.time()))
        return 0.0
    asked = time.time()
    store.set(f"ask/{env.rank}", "1")
    told = float(store.get(f"time/{env.rank}"))
    # node 0 may answer late, in the order of ranks: only a time before the question or after
    # the answer proves a difference
    return max(0.0, told - time.time()) * -1 + max(0.0, asked - told)


def _own_address(host: str) -> str:
    """Return the address that this machine has by this name; empty where the name is of loopback
    here, as others reach the machine by another address."""
    found = _address_of(host)
    return "" if is_loopback(found) and not is_loopback(host) else found


def _address_of(host: str) -> str:
    return str(socket.getaddrinfo(host, None)[0][4][0])


def compare(rows: list[dict[str, Any]]) -> Iterator[Finding]:
    """Findings about differences between the first node and the others."""
    blind = [row["host"] for row in rows if not row["sees_folder"]]
    if blind:
        fix = "start from a folder that all nodes share (NFS, Lustre)"
        text = f"not the same ./runs on {', '.join(blind)} as on {rows[0]['host']}"
        yield fail("shared folder", text, fix)
    else:
        yield ok("shared folder", f"{len(rows)} nodes see the same ./runs")
    late = [f"{row['host']} {row['skew_s']:+.0f} s" for row in rows if abs(row["skew_s"]) > CLOCK_S]
    if late:
        fix = "synchronise the nodes' clocks (chrony, ntpd)"
        yield warn("clocks", f"off {rows[0]['host']}'s: {', '.join(late)}", fix)
    else:
        yield ok("clocks", "agree")
    for name, version in rows[0]["versions"].items():
        others = [
            f"{r['host']} {r['versions'][name]}" for r in rows if r["versions"][name] != version
        ]
        if others:
            text = f"{name} is {version} on {rows[0]['host']}, but {', '.join(others)}"
            yield fail("versions", text, "install the same on every node")
    hosts = [row["host"] for row in rows]
    if len(set(hosts)) < len(hosts):
        yield warn("hosts", f"several nodes are called {hosts[0]}", "one launcher per machine")


def _bandwidth(env: Environment, store: Any, host: str) -> list[Finding]:
    try:
        answer: dict[str, object] | str = time_all_reduce(store, host, env.rank, env.nodes)
    except (RuntimeError, OSError) as error:
        answer = str(error).strip().splitlines()[0][:200]
    return list(judge("all-reduce", answer, f"{env.nodes} nodes"))
