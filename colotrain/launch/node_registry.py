"""Head of the rendezvous: node 0's launcher registers all nodes and forms rounds.

Every node's launcher, node 0's own included, keeps one TCP connection to the head and reports every
second in lines of JSON; the answer is the state of the rendezvous. The head measures silence by its
own clock, so clocks may differ; time in which the head itself was suspended (by SLURM) does not
count as silence. A round is one attempt: the nodes in it, in the order of their ranks. Nodes for
which a round has no place are spare: they wait until one is free. A node and the head prove to one
another that they see the run's folder by a secret stored there, which also keeps strangers out
(`connections`).
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from colotrain.addresses import LOOPBACK, is_loopback
from colotrain.connections import MALFORMED, Link, Service
from colotrain.timeouts import wait_readable

SILENT_S = 15.0
"""Seconds without a report after which a node counts as lost."""
LAST_CALL_S = 30.0
"""Seconds that the first round waits for more nodes once it has the minimum number."""
RETURN_S = 3.0
"""Seconds within which a node whose connection broke may reconnect without being lost."""
GOODBYE_S = 10.0
"""Seconds that the head waits at the end for the other nodes to leave."""
SERVICE = "registry"


class RendezvousError(RuntimeError):
    """A node cannot go on with the others; the message says why."""


class Refused(RendezvousError):
    """The node's settings differ from the others', or the run has no place for it."""


class Stopped(RendezvousError):
    """The node was asked to stop while it waited for a round."""


class Left(RendezvousError):
    """The run goes on without this node, which held the others up."""


class NotNeeded(RendezvousError):
    """The run has ended while this node was a spare one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeInfo:
    """Node properties: `versions` and `plan` must be the same on all nodes."""

    node: int
    host: str
    instance: str
    """Random text that tells apart two launchers with the same node rank."""
    versions: dict[str, str]
    plan: dict[str, Any]
    """Run plan as plain data, without fields that may differ between machines."""
    boot: str = ""
    """The kernel's id of the machine's last start; empty where it is not known."""

    @property
    def machine(self) -> tuple[str, str]:
        """What tells two machines apart: containers of one machine have one kernel, but may have
        host names of their own, and those of two machines may have the same name."""
        return self.host, self.boot


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """Answer to the wish to leave a node."""

    later: bool = False
    """Whether the nodes are changing anyway, so that it must be asked again."""
    refusal: str = ""
    """Why it is not left; empty where it is."""
    host: str = ""
    successor: int | None = None
    """Spare node that takes its place; None where the run goes on with fewer."""
    nodes: int = 0
    """Nodes with which the run goes on."""


@dataclass(slots=True)
class _Member:
    info: NodeInfo
    address: str
    """Address by which the node reaches the head."""
    keeper: str
    """HOST:PORT of the launcher's `CopyKeeper`; empty where it has none."""
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
        open_store: Callable[[str], int],
        plan_digest: str,
        spare_nodes: int = 0,
        say: Callable[[str], None] = print,
    ) -> None:
        """`expected_nodes` are awaited at first, and there may be `spare_nodes` beside `max_nodes`;
        `open_store` opens a store at the address by which all nodes reach the head, if there is
        one, and returns its port."""
        self.info = info
        self.min_nodes, self.max_nodes, self.expected_nodes = min_nodes, max_nodes, expected_nodes
        self.open_store, self.plan_digest, self.spare_nodes = open_store, plan_digest, spare_nodes
        self.members: dict[int, _Member] = {}
        self.round, self.nodes, self.port, self.key = 0, list[int](), 0, ""
        self.address = ""
        """Address by which the others in the round reach the head, which uses it as well."""
        self.instances: dict[int, str] = {}
        """Instance of each launcher in the round: one that takes a node's place is not in it."""
        self.keepers: list[str] = []
        """Addresses of the `CopyKeeper`s of the round's launchers, in its order."""
        self.lost = ""
        """Message that names the first node lost from the round; empty if none was."""
        self.left: dict[tuple[str, str], str] = {}
        """Machine that was left → why. It is not let in again."""
        self.leaving: dict[int, str] = {}
        """Nodes of the round that are left, until the next round begins → why."""
        self.closed: str | None = None
        self.refusals: list[str] = []
        self._enough_since: float | None = None
        self._changed = threading.Condition()
        self._service = Service(
            listener, self._receive, secret=lambda: secret, name=SERVICE, say=say
        )

    def close(self) -> None:
        """Wait up to `GOODBYE_S` until all other nodes have left, then stop listening."""
        with self._changed:
            self.closed = self.closed or ""
            alone = lambda: set(self.members) <= {self.info.node}  # noqa: E731
            self._changed.wait_for(alone, timeout=GOODBYE_S)
        self._service.close()

    def _receive(self, link: Link) -> None:
        """Serve one node's connection from its first line to its end."""
        member, why = None, "has gone"
        try:
            answer, member = self._welcome(link)
            link.send(answer, within_s=SILENT_S)
            while member is not None:
                wait_readable(link, SILENT_S)
                if not self._answer(link, member):
                    break
        except TimeoutError:
            why = f"was silent for {SILENT_S:.0f} s"
        except MALFORMED:
            link.close()
            time.sleep(RETURN_S)
        if member is not None:
            self._remove(member, why)

    def _welcome(self, link: Link) -> tuple[dict[str, Any], _Member | None]:
        """Return the answer to a node's first line, and its member where it is let in."""
        hello = link.read(within_s=SILENT_S)
        info = NodeInfo(**{name: hello[name] for name in NodeInfo.__slots__})
        if (why := self.left.get(info.machine)) is not None and not self._is_saving(info):
            return {"refused": why, "final": True, "left": True}, None
        refusal, final = self._admit(info, link.own_address, str(hello["keeper"]))
        member = None if refusal else self.members[info.node]
        return {"refused": refusal, "final": final}, member

    def _admit(self, info: NodeInfo, address: str, keeper: str) -> tuple[str, bool]:
        """Return (why the node is refused or "", whether retrying is useless)."""
        node, who = info.node, f"node {info.node} ({info.host})"
        most = self.max_nodes + self.spare_nodes
        if node not in range(most):
            return f"{who}: this run has nodes 0 to {most - 1}", True
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
            waits = other is not None and other.waits
            self.members[node] = _Member(info, address, keeper, waits=waits)
        return "", False

    def _is_saving(self, info: NodeInfo) -> bool:
        """Whether the node of this launcher is being left, and its ranks may still save."""
        return bool(self.leaving) and self.instances.get(info.node) == info.instance

    def leave(self, node: int, why: str, *, saves: bool = True) -> Leaving:
        """Let the run go on without the machine of a node of its round, whose ranks save first.

        Unless the run `saves` checkpoints, other nodes must take the places of several: of two that
        are left at once nobody may have the copies in memory.
        """
        with self._changed:
            member, head = self.members.get(node), self.members.get(self.info.node)
            if member is None or head is None or node not in self.nodes or self._is_changing():
                return Leaving(later=True)
            machine, who = member.info.machine, f"node {node} ({member.info.host})"
            if machine == head.info.machine:
                return Leaving(refusal=f"{who} leads the run, so it cannot be left")
            on_it = [n for n in self.nodes if self.members[n].info.machine == machine]
            spare = [n for n in self._spare() if self.members[n].info.machine != machine]
            after = len(self.nodes) - len(on_it) + min(len(spare), len(on_it))
            least = self.min_nodes if saves or len(on_it) == 1 else len(self.nodes)
            if after < least:
                needs = f"the run needs {least} nodes, and no spare one waits"
                return Leaving(refusal=f"{who} is not left: {needs}")
            self.left[machine] = why
            self.leaving = dict.fromkeys(on_it, why)
            return Leaving(
                host=member.info.host, successor=spare[0] if spare else None, nodes=after
            )

    def _is_changing(self) -> bool:
        """Whether the next round is under way."""
        gone = any(n not in self.members for n in self.nodes)
        return bool(gone or self.lost or self.closed or self.leaving or self._newcomers())

    def _spare(self) -> list[int]:
        """Return the nodes outside the round that wait for a place."""
        return sorted(n for n, m in self.members.items() if m.waits and n not in self.nodes)

    def _newcomers(self) -> list[int]:
        """Return the waiting nodes for which the round must end."""
        room = self.max_nodes - sum(node in self.members for node in self.nodes)
        again = [n for n in self.nodes if n in self.members and self.members[n].waits]
        return [*again, *self._spare()[: max(0, room)]]

    def _answer(self, link: Link, member: _Member) -> bool:
        """Answer one report; return whether the node is still a member."""
        report = link.read(within_s=SILENT_S)
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
            state = self._state(member, stale=stale)
            if state["round"] > known:
                state |= self._round_for(member)
        link.send(state, within_s=SILENT_S)
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
        """Begin the next round if all present nodes wait for it and their number suffices.

        A node that is left must have gone before: it may still save.
        """
        waiting = sorted(node for node, member in self.members.items() if member.waits)
        enough = self.min_nodes <= len(waiting) == len(self.members)
        saving = any(member.info.machine in self.left for member in self.members.values())
        if not enough or saving or self.info.node not in waiting or self.closed is not None:
            self._enough_since = None
            return
        self._enough_since = self._enough_since or time.monotonic()
        patient = self.round == 0 and time.monotonic() < self._enough_since + LAST_CALL_S
        if len(waiting) < self.expected_nodes and patient:
            return
        chosen = next_nodes(self.nodes, waiting, most=self.max_nodes)
        others = [self.members[node].address for node in chosen if node != self.info.node]
        # a launcher on the head's machine may reach it by loopback, which says nothing to others
        others = [one for one in others if not is_loopback(one)] or others
        self.address = others[0] if others else LOOPBACK
        try:
            self.port = self.open_store(self.address if len({*others}) < 2 else "")
        except (OSError, RuntimeError) as error:
            self.closed = f"node 0 cannot open a store: {error}"
            return
        self.round, self.nodes, self.lost, self.leaving = self.round + 1, chosen, "", {}
        self.key = secrets.token_hex(32)
        self.instances = {node: self.members[node].info.instance for node in chosen}
        self.keepers = [self._reachable(self.members[node].keeper) for node in chosen]
        for node in chosen:
            self.members[node].waits = False

    def _reachable(self, keeper: str) -> str:
        """Return the HOST:PORT by which others reach a keeper: on the head's machine launchers know
        theirs by loopback."""
        host, _, port = keeper.rpartition(":")
        return f"{self.address}:{port}" if is_loopback(host) else keeper

    def _round_for(self, member: _Member) -> dict[str, Any]:
        """Return what a node that is new in the round has to know of it."""
        is_near = member.info.node == self.info.node or is_loopback(member.address)
        return {
            "nodes": self.nodes,
            "port": self.port,
            "key": self.key,
            "plan_digest": self.plan_digest,
            "keepers": self.keepers,
            # the others know by which address they reach the head
            "address": self.address if is_near else "",
        }

    def _state(self, member: _Member, *, stale: bool) -> dict[str, Any]:
        node = member.info.node
        waiting = [n for n in self._newcomers() if n != node]
        fresh = [n for n in waiting if n not in self.nodes]
        missing = [str(n) for n in range(self.max_nodes) if n not in self.members and member.waits]
        why = "the others went on without this node"
        if self.leaving:
            first = min(self.leaving)
            why = f"node {first} is left: {self.leaving[first]}"
        elif waiting:
            why = f"node {fresh[0]} joins" if fresh else f"node {waiting[0]} begins again"
        expected = bool(self.leaving) or (bool(fresh) and fresh == waiting)
        return {
            "round": 0 if member.waits or node not in self.nodes else self.round,
            "regroup": bool(stale or waiting or self.leaving or self.lost),
            "why": self.lost or why,
            "orderly": expected and not self.lost and not stale,
            "left": self.left.get(member.info.machine, ""),
            "spare": self.round > 0 and member.waits and node not in self.nodes,
            "missing": ", ".join(missing),
            "closed": self.closed,
            "refused": self.closed in self.refusals,
        }


def next_nodes(before: Sequence[int], waiting: Sequence[int], *, most: int) -> list[int]:
    """Return the nodes of the next round, of which the first has the first ranks.

    Nodes of the round `before` come first; others follow by their numbers, up to `most` nodes.
    Where there are as many as before, each keeps its place and new ones take the free places. So
    the ranks of those that stay keep their numbers, by which copies of their state in memory are
    found. Otherwise nodes are in the order of their numbers.
    """
    stay = [node for node in before if node in waiting]
    new = sorted(set(waiting) - set(stay))[: max(0, most - len(stay))]
    if len(stay) + len(new) != len(before):
        return sorted([*stay, *new])
    free = iter(new)
    return [node if node in stay else next(free) for node in before]
