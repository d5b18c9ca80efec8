"""Rendezvous of a run's launchers, in the form that torch's elastic agent expects.

Each round has a store of its own in node 0's launcher, because the store of a dead attempt must not
be reused. It listens at the address by which the nodes reach node 0, and on loopback only in runs
on one node.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Any

from colotrain import host
from colotrain.addresses import LOOPBACK, is_loopback, listen, listen_at, serve_store
from colotrain.errors import UsageError
from colotrain.launch.copy_keeper import CopyKeeper, MemoryFiles
from colotrain.launch.membership import Membership, Round, SingleNode
from colotrain.launch.node_registry import Leaving, NodeInfo, NodeRegistry
from colotrain.records import to_plain
from colotrain.rundir import RunDir, read_json
from colotrain.spec.axes import node_of
from colotrain.spec.elastic import CopyPlaces
from colotrain.spec.plan import RunPlan

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler

STORES_KEPT = 2
"""Number of stores kept: the newest round's, and the previous one for workers still exiting."""
OF_ONE_MACHINE = {
    "": ("memory", "warnings"),
    "cluster": ("memory_bytes", "threads_per_rank", "threads_set_by"),
    "plugin": ("reason",),
    "elastic": ("memory_copy",),
}
"""Plan fields, by section, that may differ between machines; node 0's values apply to all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node's rank in the run, and the address at which node 0's launcher listens."""

    rank: int = 0
    host: str = LOOPBACK
    port: int = 0

    @property
    def is_head(self) -> bool:
        return self.rank == 0


class Rendezvous:
    """A launcher's part in the rendezvous: the registry (only on node 0) and its membership."""

    def __init__(
        self,
        plan: RunPlan,
        rundir: RunDir,
        node: Node,
        *,
        files: MemoryFiles,
        stop: Callable[[], bool],
        say: Callable[[str], None],
    ) -> None:
        """`files` hold the copies of this node's ranks. `stop` is polled while waiting for other
        nodes: True ends the wait. `say` is called with the names of the missing nodes.

        Raises `UsageError` if node 0 cannot listen.
        """
        self.plan, self.rundir, self.node = plan, rundir, node
        self.wait_s, self.say = plan.elastic.hang_timeout_s, say
        self.stores: list[Any] = []
        self.registry: NodeRegistry | None = None
        self.keeper: CopyKeeper | None = None
        self.files, self.own, self.buddy = files, "", ""
        """Addresses of this keeper and of the one that keeps this node's copies, in this round."""
        self.key, self.round, self.plan_digest = "", 0, ""
        """Secret of this round, its number, which all nodes count alike, and its plan's digest."""
        self.secret = ""
        """Secret of this launch; empty until it was read."""
        self.membership: SingleNode | Membership = SingleNode(self._open_store, plan.digest)
        if plan.elastic.max_nodes > 1:
            info = make_node_info(plan, node)
            if node.is_head:
                self.registry = self._open_registry(info)
            where = (LOOPBACK if node.is_head else node.host, node.port)
            if plan.elastic.memory_copy.enabled:
                listener = listen(node.host, 0)
                self.keeper = CopyKeeper(listener, secret=lambda: self.secret, files=files, say=say)
            self.membership = Membership(
                where,
                info,
                secret=self._read_secret,
                lost_s=self.wait_s,
                keeper_port=self.keeper.port if self.keeper is not None else 0,
                stop=stop,
            )

    def _open_registry(self, info: NodeInfo) -> NodeRegistry:
        node, elastic = self.node, self.plan.elastic
        self.secret = secrets.token_hex(32)
        try:
            listener = listen(node.host, node.port)
        except OSError as error:
            raise UsageError(
                f"cluster.rdzv_endpoint={node.host}:{node.port}: node 0 cannot listen there "
                f"({error})",
                "choose a free port above 1023, and the same one on every node",
            ) from error
        self.rundir.write(self.rundir.rendezvous_file, json.dumps({"secret": self.secret}))
        return NodeRegistry(
            listener,
            secret=self.secret,
            info=info,
            min_nodes=elastic.min_nodes,
            max_nodes=elastic.max_nodes,
            expected_nodes=self.plan.cluster.nodes,
            open_store=self._open_store,
            plan_digest=self.plan.digest,
            spare_nodes=elastic.spare_nodes,
            say=self.say,
        )

    def leave(self, rank: int, why: str) -> tuple[int, Leaving]:
        """Let the run go on without the node of a rank; return the node and the answer. Node 0."""
        assert self.registry is not None
        place = node_of(rank, procs_per_node=self.plan.cluster.procs_per_node)
        nodes = self.registry.nodes
        if place >= len(nodes):
            return place, Leaving(later=True)
        saves = self.plan.checkpoint.enabled
        return nodes[place], self.registry.leave(nodes[place], why, saves=saves)

    def _read_secret(self) -> str:
        """Return the secret of this launch, which node 0 may have written just now."""
        if not self.node.is_head:
            with suppress(OSError, ValueError, KeyError, TypeError):
                self.secret = str(
                    read_json(self.rundir.rendezvous_file, self.rundir.open)["secret"]
                )
        return self.secret

    def _open_store(self, address: str) -> int:
        """Open a new store in this process, which listens there alone; return its port."""
        listener = listen_at(address or (LOOPBACK if is_loopback(self.node.host) else ""))
        store = serve_store(listener, timeout=self.timeout)
        self.stores = [*self.stores, store][-STORES_KEPT:]
        return int(store.port)

    @property
    def timeout(self) -> datetime.timedelta:
        return datetime.timedelta(seconds=self.wait_s)

    def end(self, cause: str = "") -> None:
        """Leave; with a `cause`, the run has failed and ends on every node."""
        if self.keeper is not None:
            self.keeper.close()
        self.membership.end(cause)
        if self.registry is not None:
            self.registry.close()
            with contextlib.suppress(OSError):  # the folder may have become read-only
                self.rundir.rendezvous_file.unlink()

    def begin(self, found: Round) -> int:
        """Begin a round: note who keeps this node's copies; return the node's place in it."""
        place = found.nodes.index(self.node.rank)
        if self.keeper is not None:
            self.keeper.end_senders()
        self.key, self.round, self.plan_digest = found.key, found.number, found.plan_digest
        self.own = found.keepers[place]
        theirs = found.keepers[place - 1]
        self.buddy = theirs if self.own and theirs != self.own else ""
        return place

    def copy_places(self) -> CopyPlaces:
        """Return where this node's ranks of the newest round find copies and send theirs."""
        kept = self.keeper.handles() if self.keeper is not None else ()
        return CopyPlaces(
            launcher=os.getpid(),
            files=(*self.files.handles, *kept),
            own=self.own,
            buddy=self.buddy,
            secret=self.secret if self.own else "",
        )

    def handler(self) -> RendezvousHandler:
        """Return the rendezvous handler for torch's agent."""
        from torch.distributed import PrefixStore, TCPStore
        from torch.distributed.elastic.rendezvous import (
            RendezvousHandler,
            RendezvousInfo,
            RendezvousStoreInfo,
        )

        ours = self

        class Handler(RendezvousHandler):
            """Orders ranks by node rank; workers use the round's store."""

            use_agent_store = True

            def get_backend(self) -> str:
                return "colotrain"

            def get_run_id(self) -> str:
                return ours.rundir.name

            def next_rendezvous(self) -> RendezvousInfo:
                found = ours.membership.next_round(timeout_s=ours.wait_s, say=ours.say)
                where = found.address, found.port
                store = TCPStore(*where, is_master=False, timeout=ours.timeout)
                rank = ours.begin(found)
                info = RendezvousStoreInfo(*where)
                return RendezvousInfo(PrefixStore("agents", store), rank, len(found.nodes), info)

            def num_nodes_waiting(self) -> int:
                return int(bool(ours.membership.regroup()))

            def is_closed(self) -> bool:
                return False

            def set_closed(self) -> None: ...

            def shutdown(self) -> bool:
                return True

        return Handler()


def make_node_info(plan: RunPlan, node: Node) -> NodeInfo:
    plain = to_plain(plan)
    for section, names in OF_ONE_MACHINE.items():
        holder = plain[section] if section else plain
        for name in names:
            holder.pop(name, None)
    return NodeInfo(
        node=node.rank,
        host=socket.gethostname(),
        instance=secrets.token_hex(8),
        boot=host.boot_id(),
        versions={name: metadata.version(name) for name in ("colotrain", "torch")},
        plan=plain,
    )
