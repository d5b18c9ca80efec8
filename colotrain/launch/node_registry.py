"""Head of the rendezvous: node 0's launcher registers all nodes and forms rounds.

Every node's launcher, node 0's own included, keeps one TCP connection to the head and reports every
second in lines of JSON; the answer is the state of the rendezvous. The head measures silence by its
own clock, so clocks may differ; time in which the head itself was suspended (by SLURM) does not
count as silence. A round is one attempt: the nodes in it, ordered by node rank. A node proves that
it sees the run's folder by a secret stored there, which also keeps strangers out. Nothing received
is unpickled.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from io import BufferedRWPair
from typing import Any

from colotrain.connections import StrangerError, accept_all, read, send, welcome
from colotrain.launch.timeouts import wait_readable

SILENT_S = 15.0
"""Seconds without a report after which a node counts as lost."""
LAST_CALL_S = 30.0
"""Seconds that the first round waits for more nodes once it has the minimum number."""
RETURN_S = 3.0
"""Seconds within which a node whose connection broke may reconnect without being lost."""
GOODBYE_S = 10.0
"""Seconds that the head waits at the end for the other nodes to leave."""


class RendezvousError(RuntimeError):
    """A node cannot go on with the others; the message says why."""


class Refused(RendezvousError):
    """The node's settings differ from the others', or the run has no place for it."""


class Stopped(RendezvousError):
    """The node was asked to stop while it waited for a round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeInfo:
    """Node properties: all except `node`, `host` and `instance` must be the same on all nodes."""

    node: int
    host: str
    instance: str
    """Random text that tells apart two launchers with the same node rank."""
    versions: dict[str, str]
    plan: dict[str, Any]
    """Run plan as plain data, without fields that may differ between machines."""


@dataclass(slots=True)
class _Member:
    info: NodeInfo
    address: str
    """Address by which the node reaches the head."""
    waits: bool = False
    """Whether the node waits for the next round; otherwise it is in one."""


def differences(mine: NodeInfo, theirs: NodeInfo) -> list[str]:
    """Return the differences between two nodes, each as `name: theirs, not mine`."""
    found = [
        f"{name} {theirs.versions.get(name, 'unknown')}, not {value}"
        for name, value in mine.versions.items()
        if theirs.versions.get(name) != value
    ]
    ours, other = _flat(mine.plan), _flat(theirs.plan)
    return found + [
        f"{key} {other.get(key, 'unset')!r}, not {ours.get(key, 'unset')!r}"
        for key in sorted(ours.keys() | other.keys())
        if ours.get(key) != other.get(key)
    ]


def _flat(plain: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(plain, dict) or not plain:
        return {prefix.rstrip("."): plain}
    found: dict[str, Any] = {}
    for key, value in plain.items():
        found |= _flat(value, f"{prefix}{key}.")
    return found


class NodeRegistry:
    """The head's side of the rendezvous: admits nodes and forms rounds, until `close`."""

    def __init__(
        self,
        listener: socket.socket,
        *,
        secret: str,
        info: NodeInfo,
        min_nodes: int,
        max_nodes: int,
        expected_nodes: int,
        open_store: Callable[[], int],
    ) -> None:
        """`expected_nodes` are awaited at first; `open_store` opens a store, returns its port."""
        self.listener, self.secret, self.info = listener, secret, info
        self.min_nodes, self.max_nodes, self.expected_nodes = min_nodes, max_nodes, expected_nodes
        self.open_store = open_store
        self.members: dict[int, _Member] = {}
        self.round, self.nodes, self.port = 0, list[int](), 0
        self.instances: dict[int, str] = {}
        """Instance of each launcher in the round: one that takes a node's place is not in it."""
        self.lost = ""
        """Message that names the first node lost from the round; empty if none was."""
        self.closed: str | None = None
        self.refusals: list[str] = []
        self._enough_since: float | None = None
        self._changed = threading.Condition()
        accept_all(self.listener, self._receive, name="node-registry")

    def close(self) -> None:
        """Wait up to `GOODBYE_S` until all other nodes have left, then stop listening."""
        with self._changed:
            self.closed = self.closed or ""
            alone = lambda: set(self.members) <= {self.info.node}  # noqa: E731
            self._changed.wait_for(alone, timeout=GOODBYE_S)
        self.listener.close()

    def _receive(self, connection: socket.socket) -> None:
        """Serve one node's connection from its first line to its end."""
        member, why = None, "has gone"
        try:
            with connection, connection.makefile("rwb") as stream:
                connection.settimeout(SILENT_S)
                member = self._welcome(stream, connection.getsockname()[0])
                while member is not None:
                    wait_readable(connection, SILENT_S)
                    if not self._answer(stream, member):
                        break
        except TimeoutError:
            why = f"was silent for {SILENT_S:.0f} s"
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            time.sleep(RETURN_S)
        if member is not None:
            self._remove(member, why)

    def _welcome(self, stream: BufferedRWPair, address: str) -> _Member | None:
        try:
            hello = welcome(stream, self.secret)
        except StrangerError:
            refused = "it does not see what node 0 writes: both need one shared folder ./runs"
            send(stream, {"refused": refused, "final": False})
            return None
        info = NodeInfo(**{name: hello[name] for name in NodeInfo.__slots__})
        refusal, final = self._admit(info, address)
        send(stream, {"refused": refusal, "final": final})
        return None if refusal else self.members[info.node]

    def _admit(self, info: NodeInfo, address: str) -> tuple[str, bool]:
        """Return (why the node is refused or "", whether retrying is useless)."""
        node, who = info.node, f"node {info.node} ({info.host})"
        if not 0 <= node < self.max_nodes:
            return f"{who}: this run has nodes 0 to {self.max_nodes - 1}", True
        wrong = differences(self.info, info)
        if wrong:
            shown = "; ".join(wrong[:5])
            refusal = f"{who} differs from node 0 ({self.info.host}): {shown}"
            with self._changed:
                self.refusals.append(refusal)
                if self.round == 0 and self.min_nodes == self.max_nodes:
                    self.closed = self.closed or refusal
            return refusal, True
        with self._changed:
            other = self.members.get(node)
            if other is not None and other.info.instance != info.instance:
                return f"{who}: another launcher ({other.info.host}) is node {node}", False
            self.members[node] = _Member(info, address, waits=other is not None and other.waits)
        return "", False

    def _answer(self, stream: BufferedRWPair, member: _Member) -> bool:
        """Answer one report; return whether the node is still a member."""
        report = read(stream)
        if report.get("leave"):
            self._remove(member, "")
            return False
        with self._changed:
            if report.get("close"):
                self.closed = self.closed or str(report["close"])[:2000]
            known, node = int(report["round"]), member.info.node
            is_in_round = self.instances.get(node) == member.info.instance
            learns = self.round > known and is_in_round
            member.waits = bool(report["waits"]) and not learns
            self._form_round()
            stale = not report["waits"] and known != self.round
            send(stream, self._state(member, stale=stale))
        return self.members.get(node) is member

    def _remove(self, member: _Member, why: str) -> None:
        node = member.info.node
        with self._changed:
            if self.members.get(node) is not member:
                return
            del self.members[node]
            if why and node in self.nodes:
                self.lost = self.lost or f"node {node} ({member.info.host}) {why}"
            self._changed.notify_all()

    def _form_round(self) -> None:
        """Begin the next round if all present nodes wait for it and their number suffices."""
        waiting = sorted(node for node, member in self.members.items() if member.waits)
        enough = self.min_nodes <= len(waiting) == len(self.members)
        if not enough or self.info.node not in waiting or self.closed is not None:
            self._enough_since = None
            return
        self._enough_since = self._enough_since or time.monotonic()
        patient = self.round == 0 and time.monotonic() < self._enough_since + LAST_CALL_S
        if len(waiting) < self.expected_nodes and patient:
            return
        try:
            self.port = self.open_store()
        except (OSError, RuntimeError) as error:
            self.closed = f"node 0 cannot open a store: {error}"
            return
        self.round, self.nodes, self.lost = self.round + 1, waiting, ""
        self.instances = {node: self.members[node].info.instance for node in waiting}
        for member in self.members.values():
            member.waits = False

    def _state(self, member: _Member, *, stale: bool) -> dict[str, Any]:
        node, head = member.info.node, self.info.node
        waiting = [n for n, m in self.members.items() if m.waits and n != node]
        fresh = [n for n in waiting if n not in self.nodes]
        addresses = [m.address for n, m in self.members.items() if n != head]
        missing = [str(n) for n in range(self.max_nodes) if n not in self.members]
        why = "the others went on without this node"
        if waiting:
            why = f"node {fresh[0]} joins" if fresh else f"node {waiting[0]} begins again"
        return {
            "round": 0 if member.waits or node not in self.nodes else self.round,
            "nodes": self.nodes,
            "port": self.port,
            # the head uses the address by which the other nodes reach it
            "address": addresses[0] if node == head and addresses else "",
            "regroup": bool(stale or waiting or self.lost),
            "why": self.lost or why,
            "orderly": bool(fresh) and fresh == waiting and not self.lost and not stale,
            "missing": ", ".join(missing),
            "closed": self.closed,
            "refused": self.closed in self.refusals,
        }


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket: on loopback if `host` is loopback, otherwise on every address.

    The host name is not resolved: a machine may know itself by another address than its peers do.
    """
    if is_loopback(host):
        return socket.create_server(("127.0.0.1", port))
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def plain_address(address: str) -> str:
    """Return `10.0.0.1` for the IPv4-mapped form of an IPv6 socket, `::ffff:10.0.0.1`."""
    return address.removeprefix("::ffff:")
