"""A node's side of the rendezvous: it reports to node 0, joins rounds, and reconnects.

`SingleNode` replaces it in a run on one node: it neither listens nor waits.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from colotrain.addresses import LOOPBACK
from colotrain.connections import Link, StrangerError, connect
from colotrain.launch.node_registry import (
    RETURN_S,
    SERVICE,
    SILENT_S,
    Left,
    NodeInfo,
    NotNeeded,
    Refused,
    RendezvousError,
    Stopped,
)
from colotrain.timeouts import POLL_S, AwakeTimeout, wait_readable

REPORT_S = 1.0
WAITING_REPORT_S = 0.1
"""Seconds between reports while waiting for a round."""
SAY_S = 5.0
"""Seconds of waiting after which the missing nodes are named."""
REFUSED_S = 2.0
"""Seconds after which it is told why node 0 does not let this node in yet."""
GONE_S = 10.0
"""Seconds of retries when the head's host refuses connections or its name was never known."""
NO_ADDRESS = (socket.gaierror, UnicodeError)
"""Errors of a name without an address, or that can have none."""
FOLDER_S = 60.0
"""Seconds that a network filesystem may take to show a file that the head has written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One attempt: its nodes and the address of its store."""

    number: int
    nodes: tuple[int, ...]
    address: str
    port: int
    key: str
    """Secret of the round's launchers and ranks."""
    plan_digest: str
    """Digest of the plan that node 0 has written, which the ranks read."""
    keepers: tuple[str, ...] = ("",)
    """Address of each node's `CopyKeeper`; empty where there is none."""


def _silent(text: str) -> None: ...


class SingleNode:
    """Rendezvous of a run on one node."""

    def __init__(self, open_store: Callable[[str], int], plan_digest: str) -> None:
        self.open_store, self.plan_digest, self.rounds = open_store, plan_digest, 0

    def next_round(self, *, timeout_s: float, say: Callable[[str], None] = _silent) -> Round:
        self.rounds += 1
        return Round(
            number=self.rounds,
            nodes=(0,),
            address=LOOPBACK,
            port=self.open_store(LOOPBACK),
            key=secrets.token_hex(32),
            plan_digest=self.plan_digest,
        )

    def regroup(self) -> str:
        return ""

    def is_orderly(self) -> bool:
        return True

    def end(self, cause: str = "") -> None: ...


class Membership:
    """Reports to the head (node 0's launcher) from a thread of its own, until `end`."""

    def __init__(
        self,
        head: tuple[str, int],
        info: NodeInfo,
        *,
        secret: Callable[[], str],
        lost_s: float,
        keeper_port: int = 0,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """`secret` reads the secret from the run's folder. `lost_s` is how many seconds the head
        may be out of reach. `keeper_port` is that of this launcher's `CopyKeeper`. `stop` ends the
        wait for a round with `Stopped`."""
        self.head, self.info, self.secret, self.lost_s = head, info, secret, lost_s
        self.stop, self.keeper_port = stop, keeper_port
        self.waits, self.round = False, 0
        """Whether the node waits for a round, and the number of its last round."""
        self.state: dict[str, Any] = {}
        self.error: RendezvousError | None = None
        self.trouble = ""
        """Error of the last attempt to reach the head."""
        self.refusal = ""
        """Why the head has not let this node in for `REFUSED_S`; empty where it has."""
        self.address = ""
        self._cause, self._ending, self._arrived = "", False, False
        self._resolved = False
        """Whether the head's name has had an address."""
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._keep_connected, name="membership", daemon=True)
        self._thread.start()

    def next_round(self, *, timeout_s: float, say: Callable[[str], None] = _silent) -> Round:
        """Wait until a new round with this node begins; `say` names the nodes that are missing."""
        timeout = AwakeTimeout(timeout_s)
        say_at: float | None = time.monotonic() + SAY_S
        told, told_refusal = False, ""
        with self._changed:
            self.waits = True
            self._changed.notify_all()
            while self.waits:
                self._check_end()
                if self.state.get("spare"):  # for as long as the run goes on
                    timeout = AwakeTimeout(timeout_s)
                    if not told:
                        told, say_at = True, None
                        say("spare: waits for a place in the run, which has all its nodes")
                if timeout.is_over():
                    raise RendezvousError(self._describe_missing(timeout_s))
                self._changed.wait(POLL_S)
                if self.refusal != told_refusal and self.waits:
                    told_refusal, say_at = self.refusal, None
                    say(f"waiting for {self._name_awaited()}")
                if say_at is not None and time.monotonic() > say_at and self.waits:
                    say_at = None
                    say(f"waiting for {self._name_awaited()}")
            state = self.state
        if told:
            say("no longer spare: trains in the place of a node that was lost or left")
        nodes = tuple(int(node) for node in state["nodes"])
        return Round(
            number=self.round,
            nodes=nodes,
            address=str(state["address"]) or self._address_of_head(),
            port=int(state["port"]),
            key=str(state["key"]),
            plan_digest=str(state["plan_digest"]),
            keepers=tuple(str(keeper) for keeper in state["keepers"]),
        )

    def _address_of_head(self) -> str:
        return self.address or self.head[0]

    def _check_end(self) -> None:
        if self.stop():
            raise Stopped("asked to stop while waiting for other nodes")
        if self.error is not None:
            raise self.error
        if self.state.get("left"):
            raise Left(str(self.state["left"]))
        closed = self.state.get("closed")
        if closed == "" and self.state.get("spare"):
            raise NotNeeded("the run has ended without this spare node")
        if closed is not None:
            kind = Refused if self.state.get("refused") else RendezvousError
            raise kind(closed or "the run has ended on the other nodes")

    def _name_awaited(self) -> str:
        if not self.state:
            return f"node 0 at {self.head[0]}:{self.head[1]} ({self.trouble or 'no answer yet'})"
        return f"node {self.state.get('missing') or 'of the last round, which ends'}"

    def _describe_missing(self, waited_s: float) -> str:
        host, port = self.head
        if not self.state:
            why = f" ({self.trouble})" if self.trouble else ""
            return f"node 0 at {host}:{port} did not answer for {waited_s:.0f} s{why}"
        return (
            f"node {self.state.get('missing') or 'unknown'} did not come within {waited_s:.0f} s; "
            "start it with the same settings and its own cluster.node_rank, or see "
            "`colotrain doctor`"
        )

    def regroup(self) -> str:
        """Return why this node must leave its round; empty while the round goes on."""
        with self._changed:
            if self.error is not None:
                return str(self.error)
            closed = str(self.state.get("closed") or "")
            return closed or (str(self.state["why"]) if self.state.get("regroup") else "")

    def is_orderly(self) -> bool:
        """Whether all nodes of the round are there, so that they can save before leaving it."""
        with self._changed:
            return bool(self.state.get("orderly")) and self.error is None

    def end(self, cause: str = "") -> None:
        """Leave the run; with a `cause`, end it on all nodes. Returns within seconds."""
        with self._changed:
            self._ending, self._cause = True, cause
            self._changed.notify_all()
        self._thread.join(timeout=5)

    def _keep_connected(self) -> None:
        since: float | None = None
        while not self._ending and self.error is None:
            try:
                with contextlib.closing(self._connect()) as link:
                    self.address, self._resolved = link.peer_address, True
                    self._introduce(link)
                    since, self._arrived, self.trouble = None, True, ""
                    self.refusal = ""
                    self._report(link)
                    return
            except RendezvousError as error:
                self._fail(error)
            except (OSError, ValueError, KeyError) as error:
                since = since or time.monotonic()
                self._on_unreachable(error, time.monotonic() - since)
                time.sleep(0.2)

    def _on_unreachable(self, error: Exception, silent_s: float) -> None:
        """Handle an unreachable head: leave the round, and give up after the time limit."""
        self.trouble = str(error) or type(error).__name__
        with self._changed:
            if self._arrived and silent_s > RETURN_S:
                self.state = self.state | {"regroup": True, "why": "node 0 is out of reach"}
        self._resolved |= not isinstance(error, (*NO_ADDRESS, _NotYet))
        # a network that is out has often lost its names, too
        has_gone = isinstance(error, ConnectionRefusedError if self._arrived else ())
        is_unknown = isinstance(error, NO_ADDRESS) and not self._resolved
        limit_s = self.lost_s
        if isinstance(error, _NotYet):
            limit_s = FOLDER_S
            self.refusal = self.trouble if silent_s > REFUSED_S else self.refusal
        elif has_gone or is_unknown:
            limit_s = GONE_S
        if silent_s > limit_s:
            self._fail(self._describe_unreachable(error))

    def _describe_unreachable(self, error: Exception) -> RendezvousError:
        host, port = self.head
        what = f"is out of reach: {self.trouble}"
        if isinstance(error, _NotYet):
            what = f"refuses this node: {self.trouble}"
        elif not self._resolved:
            fix = "correct cluster.rdzv_endpoint, or what gives this machine its names"
            what = f"has no address that is known here; {fix}"
        return RendezvousError(f"node 0 at {host}:{port} {what}")

    def _fail(self, error: RendezvousError) -> None:
        with self._changed:
            self.error = error
            self._changed.notify_all()

    def _connect(self) -> Link:
        secret = self.secret()
        try:
            return connect(self.head, secret=secret, service=SERVICE, within_s=SILENT_S)
        except StrangerError as error:
            what = "it does not see what node 0 writes: both need one shared folder ./runs"
            raise _NotYet(what) from error

    def _introduce(self, link: Link) -> None:
        keeper = f"{link.own_address}:{self.keeper_port}" if self.keeper_port else ""
        link.send(asdict(self.info) | {"keeper": keeper}, within_s=SILENT_S)
        answer = link.read(within_s=SILENT_S)
        if answer.get("left"):
            raise Left(str(answer["refused"]))
        if answer["refused"] and answer["final"]:
            raise Refused(str(answer["refused"]))
        if answer["refused"]:
            raise _NotYet(str(answer["refused"]))

    def _report(self, link: Link) -> None:
        while True:
            with self._changed:
                ending, cause = self._ending, self._cause
                report: dict[str, Any] = {"round": self.round, "waits": self.waits}
            if ending and cause:
                link.send(report | {"close": cause}, within_s=SILENT_S)
                link.read(within_s=SILENT_S)
            if ending:
                link.send({"leave": True}, within_s=SILENT_S)
                return
            link.send(report, within_s=SILENT_S)
            wait_readable(link, SILENT_S)
            state = link.read(within_s=SILENT_S)
            with self._changed:
                if self.waits == report["waits"]:
                    self._take(state)
                self._changed.wait(WAITING_REPORT_S if self.waits else REPORT_S)

    def _take(self, state: dict[str, Any]) -> None:
        self.state |= state
        if self.waits and int(state["round"]) > self.round:
            self.waits, self.round = False, int(state["round"])
            self.state["regroup"] = False
        self._changed.notify_all()


class _NotYet(ConnectionError):
    """The head does not admit this node now, but may do so later."""
