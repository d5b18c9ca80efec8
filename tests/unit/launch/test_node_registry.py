"""Several nodes: the plan on another number of them, and the rendezvous of their launchers."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from colotrain import addresses
from colotrain.connections import Link, connect
from colotrain.engine.state.buddy import RemoteLauncher
from colotrain.errors import ColotrainError
from colotrain.launch import membership, node_registry, rendezvous
from colotrain.launch.copy_keeper import MemoryFiles
from colotrain.launch.membership import Membership, Round
from colotrain.launch.node_registry import NodeInfo, NodeRegistry, Refused, RendezvousError, Stopped
from colotrain.launch.rendezvous import Node, Rendezvous
from colotrain.rundir import RunDir
from colotrain.spec.axes import MeshPlan
from colotrain.spec.elastic import MemoryCopyPlan
from colotrain.spec.resizing import reachable, resize
from tests.following import free_port
from tests.unit.planner.test_resolve import lines, plan, with_values

ELASTIC = (("cluster.nodes", 2), ("elastic.min_nodes", 1), ("elastic.max_nodes", 4))
BATCH = (("train.global_batch", 32), ("train.micro_batch", 2), ("cluster.procs_per_node", 2))


def test_the_global_batch_stays_whatever_the_number_of_nodes() -> None:
    two = plan(*ELASTIC[:2], ("elastic.max_nodes", 2), *BATCH)
    assert (two.world_size, two.batch.accumulation_steps) == (4, 4)
    one = resize(two, 1)
    assert (one.world_size, one.batch.accumulation_steps, one.batch.data_parallel) == (2, 8, 2)
    assert one.batch.global_batch == two.batch.global_batch
    assert one.plugin.mesh == (2,)
    assert resize(two, 2) is two


def test_replicas_follow_the_nodes() -> None:
    two = plan(*ELASTIC, *BATCH, ("plugin.name", "fsdp-hybrid"), ("elastic.max_nodes", 2))
    assert [resize(two, nodes).plugin.mesh for nodes in (1, 2, 4)] == [(1, 2), (2, 2), (4, 2)]


def test_a_number_of_nodes_that_cannot_share_the_batch_is_refused() -> None:
    (line,) = lines(with_values(*ELASTIC, *BATCH))
    assert "which it is not for 3 (reachable: 1, 2, 4)" in line
    two = plan(*ELASTIC[:2], *BATCH)
    with pytest.raises(ColotrainError, match="numbers of nodes that can: 1, 2"):
        resize(two, 3)
    assert reachable(12, 1, range(1, 5), 2, MeshPlan()) == [1, 2, 3]
    assert reachable(12, 1, range(1, 7), 2, MeshPlan(tp=4)) == [2, 4, 6]


def test_a_number_of_nodes_that_replicas_do_not_fit_on_is_refused() -> None:
    hybrid = (("plugin.name", "fsdp-hybrid"), ("plugin.shard_size", 4), ("train.global_batch", 48))
    (line,) = lines(with_values(*ELASTIC, *BATCH[1:], *hybrid))
    assert "plugin.shard_size=4: expected a divisor of 2 × nodes" in line
    assert "which it is not for 1, 3" in line
    two = plan(("cluster.nodes", 2), *BATCH[1:], *hybrid)
    assert resize(two, 4).plugin.mesh == (2, 4)
    with pytest.raises(ColotrainError, match="6 ranks cannot be divided into replicas of 4"):
        resize(two, 3)


def node_info(node: int, **changes: Any) -> NodeInfo:
    made = {"host": f"host-{node}", "instance": f"i{node}", "versions": {"torch": "2.13"}}
    return NodeInfo(node=node, **{**made, "plan": {"a": {"b": 1}}, **changes})


class Launchers:
    """A registry and the launchers of its nodes, ended with the test."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("", 0))
        self.port = self.listener.getsockname()[1]
        self.stores = 0
        self.addresses: list[str] = []
        """Those at which the stores were to listen."""
        self.members: list[Membership] = []
        self.links: dict[threading.Thread, Link] = {}

    def connect(self, *args: Any, **kwargs: Any) -> Link:
        """`connect`, which remembers whose connection it made."""
        made = connect(*args, **kwargs)
        self.links[threading.current_thread()] = made
        return made

    def vanish(self, member: Membership) -> None:
        """Its process dies: the connection ends without a word."""
        member.info = node_info(1, plan={"other": 1})  # and it would not be let in again
        self.links[member._thread].cut()

    def open(
        self,
        min_nodes: int = 2,
        max_nodes: int = 2,
        expected_nodes: int = 2,
        spare_nodes: int = 0,
    ) -> NodeRegistry:
        self.registry = NodeRegistry(
            self.listener,
            secret="secret",
            info=node_info(0),
            min_nodes=min_nodes,
            max_nodes=max_nodes,
            expected_nodes=expected_nodes,
            open_store=self.open_store,
            plan_digest="digest",
            spare_nodes=spare_nodes,
        )
        return self.registry

    def open_store(self, address: str) -> int:
        self.stores += 1
        self.addresses.append(address)
        return 5000 + self.stores

    def join(self, node: int, secret: str = "secret", **changes: Any) -> Membership:
        stop, keeper_port = changes.pop("stop", lambda: False), changes.pop("keeper_port", 0)
        member = Membership(
            (changes.pop("head", "127.0.0.1"), self.port),
            node_info(node, **changes),
            secret=lambda: secret,
            lost_s=5,
            keeper_port=keeper_port,
            stop=stop,
        )
        self.members.append(member)
        return member

    def rounds(self, *members: Membership, timeout_s: float = 20) -> list[Round]:
        """All ask for the next round at once."""
        found: dict[int, Round] = {}

        def ask(index: int, member: Membership) -> None:
            found[index] = member.next_round(timeout_s=timeout_s)

        threads = [threading.Thread(target=ask, args=pair) for pair in enumerate(members)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout_s + 5)
        return [found[index] for index in range(len(members))]


@pytest.fixture
def launchers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launchers]:
    for module, name, value in (
        (node_registry, "RETURN_S", 0.3),
        (node_registry, "LAST_CALL_S", 0.5),
        (node_registry, "GOODBYE_S", 1.0),
        (membership, "RETURN_S", 0.3),
        (membership, "FOLDER_S", 0.5),
        (membership, "GONE_S", 0.5),
        (membership, "REPORT_S", 0.1),
    ):
        monkeypatch.setattr(module, name, value)
    made = Launchers()
    monkeypatch.setattr(membership, "connect", made.connect)
    yield made
    for member in made.members:
        member.end()
    made.listener.close()


def until(true: Callable[[], object], timeout_s: float = 15) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_round_has_the_nodes_in_the_order_of_their_numbers(launchers: Launchers) -> None:
    launchers.open(min_nodes=3, max_nodes=3, expected_nodes=3)
    found = launchers.rounds(launchers.join(2), launchers.join(0), launchers.join(1))
    assert {(r.number, r.nodes, r.port) for r in found} == {(1, (0, 1, 2), 5001)}
    assert {r.address for r in found} == {"127.0.0.1"}


def test_every_round_has_a_store_of_its_own(launchers: Launchers) -> None:
    launchers.open()
    members = launchers.join(0), launchers.join(1)
    assert [r.port for r in launchers.rounds(*members)] == [5001, 5001]
    assert [(r.number, r.port) for r in launchers.rounds(*members)] == [(2, 5002)] * 2


def test_a_round_has_a_key_a_plan_and_the_addresses_of_keepers(launchers: Launchers) -> None:
    """From the registry: whoever reaches torch's store could write other addresses there."""
    launchers.open()
    members = launchers.join(0, keeper_port=7000), launchers.join(1, keeper_port=7001)
    found = [launchers.rounds(*members) for _ in range(2)]
    assert {r.keepers for rounds in found for r in rounds} == {("127.0.0.1:7000", "127.0.0.1:7001")}
    assert {r.plan_digest for rounds in found for r in rounds} == {"digest"}
    keys = [{r.key for r in rounds} for rounds in found]
    assert [len(of_round) for of_round in keys] == [1, 1]
    assert all(len(key) == 64 for of_round in keys for key in of_round)
    assert keys[0] != keys[1]
    assert launchers.addresses == ["127.0.0.1"] * 2


def test_the_store_listens_where_the_nodes_reach_the_head(launchers: Launchers) -> None:
    launchers.open(min_nodes=1, max_nodes=3, expected_nodes=2)
    head, other = launchers.join(0, keeper_port=7000), launchers.join(1, head="127.0.0.2")
    found = launchers.rounds(head, other)
    assert [r.address for r in found] == ["127.0.0.2"] * 2
    assert [r.keepers for r in found] == [("127.0.0.2:7000", "")] * 2
    third = launchers.join(2, head="127.0.0.3")
    until(lambda: len(launchers.registry.members) == 3)
    launchers.rounds(head, other, third)
    assert launchers.addresses == ["127.0.0.2", ""]


def test_a_launcher_that_reaches_the_head_by_loopback_decides_no_address(
    launchers: Launchers,
) -> None:
    """As on node 0's machine, whose own name is 127.0.1.1: the others would reach themselves."""
    registry = launchers.open(min_nodes=3, max_nodes=3, expected_nodes=3)
    keepers = {"127.0.0.1": "127.0.0.1:7000", "127.0.1.1": "127.0.1.1:7001"}
    keepers["10.1.2.3"] = "10.1.2.4:7002"
    members = {
        node: node_registry._Member(node_info(node), address, keeper, waits=True)
        for node, (address, keeper) in enumerate(keepers.items())
    }
    registry.members |= members
    registry._form_round()
    assert (registry.address, launchers.addresses) == ("10.1.2.3", ["10.1.2.3"])
    assert registry.keepers == ["10.1.2.3:7000", "10.1.2.3:7001", "10.1.2.4:7002"]
    told = [registry._round_for(member)["address"] for member in members.values()]
    assert told == ["10.1.2.3", "10.1.2.3", ""]
    registry._service.close()


def test_a_folder_that_hangs_keeps_nobody_from_a_launcher(
    launchers: Launchers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keepers of copies read the secret from the shared folder for each connection."""
    two = plan(("cluster.nodes", 2))
    elastic = replace(two.elastic, memory_copy=MemoryCopyPlan(enabled=True))
    rundir, hangs = RunDir(tmp_path / "run"), threading.Event()
    rundir.create()

    def start(node: Node) -> Rendezvous:
        return Rendezvous(
            replace(two, elastic=elastic),
            rundir,
            node,
            files=MemoryFiles(two),
            stop=lambda: False,
            say=print,
        )

    head = start(Node(port=(port := free_port())))
    other = start(Node(rank=1, port=port))
    until(lambda: other.membership.state)  # type: ignore[union-attr]
    monkeypatch.setattr(rendezvous, "read_json", lambda file: hangs.wait(60))
    try:
        for keeper in (head.keeper, other.keeper):
            assert keeper is not None
            where = f"127.0.0.1:{keeper.port}"
            with contextlib.closing(RemoteLauncher(where, secret=head.secret)) as launcher:
                launcher.free_before(1)
    finally:
        hangs.set()
        other.end()
        head.end()


def test_an_answer_repeats_nothing_of_a_round_that_is_known(
    launchers: Launchers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All keepers, each second, to each of a thousand nodes, were 25 kB an answer."""
    answers: list[dict[str, Any]] = []
    read = Link.read

    def note(link: Link, *, within_s: float) -> dict[str, Any]:
        document = read(link, within_s=within_s)
        answers.extend([document] if "regroup" in document else [])
        return document

    monkeypatch.setattr(Link, "read", note)
    launchers.open()
    members = launchers.join(0, keeper_port=7000), launchers.join(1, keeper_port=7001)
    [first, _] = launchers.rounds(*members)
    known = len(answers)
    until(lambda: len(answers) > known + 6)
    told = [answer for answer in answers if "keepers" in answer]
    assert [answer["key"] for answer in told] == [first.key] * 2
    assert max(len(str(answer)) for answer in answers if "keepers" not in answer) < 300
    [second, _] = launchers.rounds(*members)
    assert second.keepers == first.keepers
    assert second.key != first.key


def test_a_node_that_joins_interrupts_the_round(launchers: Launchers) -> None:
    launchers.open(min_nodes=1, max_nodes=2, expected_nodes=1)
    first = launchers.join(0)
    assert launchers.rounds(first)[0].nodes == (0,)
    assert first.regroup() == ""
    second = launchers.join(1)
    late = threading.Thread(target=second.next_round, kwargs={"timeout_s": 20})
    late.start()
    until(lambda: first.regroup() == "node 1 joins")
    assert first.next_round(timeout_s=20).nodes == (0, 1)
    late.join(10)
    assert second.round == 2


def test_a_node_that_is_lost_is_named_and_the_rest_go_on(launchers: Launchers) -> None:
    launchers.open(min_nodes=1)
    first, second = launchers.join(0), launchers.join(1)
    launchers.rounds(first, second)
    launchers.vanish(second)
    until(first.regroup)
    assert first.regroup() == "node 1 (host-1) has gone"
    assert first.next_round(timeout_s=20).nodes == (0,)


def test_a_node_that_differs_is_told_what(launchers: Launchers) -> None:
    launchers.open()
    head = launchers.join(0)
    odd = launchers.join(1, versions={"torch": "2.12"}, plan={"a": {"b": 2}, "c": 3})
    for member in (odd, head):
        with pytest.raises(Refused) as raised:
            member.next_round(timeout_s=20)
        for part in ("node 1 (host-1)", "torch 2.12, not 2.13", "a.b 2, not 1", "c 3, not 'unset'"):
            assert part in str(raised.value)


def test_a_node_that_does_not_know_the_secret_is_not_let_in(launchers: Launchers) -> None:
    launchers.open(min_nodes=1)
    with pytest.raises(RendezvousError, match="both need one shared folder"):
        launchers.join(1, secret="guessed").next_round(timeout_s=20)
    assert launchers.registry.members == {}


def test_a_second_launcher_of_a_node_is_not_let_in(launchers: Launchers) -> None:
    launchers.open()
    launchers.rounds(launchers.join(0), launchers.join(1))
    with pytest.raises(RendezvousError, match=r"another launcher \(host-1\) is node 1"):
        launchers.join(1, instance="another").next_round(timeout_s=20)


@pytest.mark.parametrize(
    ("secret", "why"), [("guessed", "both need one shared folder"), (None, "is node 1")]
)
def test_why_a_node_is_not_let_in_is_told_long_before_it_gives_up(
    launchers: Launchers, monkeypatch: pytest.MonkeyPatch, secret: str | None, why: str
) -> None:
    monkeypatch.setattr(membership, "REFUSED_S", 0.2)
    monkeypatch.setattr(membership, "FOLDER_S", 2.0)
    launchers.open()
    launchers.rounds(launchers.join(0), launchers.join(1))
    said: list[str] = []
    given = {} if secret is None else {"secret": secret}
    with pytest.raises(RendezvousError, match="refuses this node"):
        launchers.join(1, instance="another", **given).next_round(timeout_s=20, say=said.append)
    (line,) = said
    assert line.startswith("waiting for node 0 at ")
    assert why in line


def test_the_wait_ends_with_the_name_of_who_is_missing(
    launchers: Launchers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "SAY_S", 0.2)
    launchers.open()
    said: list[str] = []
    with pytest.raises(RendezvousError, match="node 1 did not come within 3 s"):
        launchers.join(0).next_round(timeout_s=3, say=said.append)
    assert said == ["waiting for node 1"]


def test_the_wait_ends_when_the_run_is_stopped(launchers: Launchers) -> None:
    launchers.open()
    with pytest.raises(Stopped):
        launchers.join(0, stop=lambda: True).next_round(timeout_s=20)


def test_one_node_can_end_the_run_for_all(launchers: Launchers) -> None:
    launchers.open()
    first, second = launchers.join(0), launchers.join(1)
    launchers.rounds(first, second)
    second.end("rank 3 was killed")
    with pytest.raises(RendezvousError, match="rank 3 was killed"):
        first.next_round(timeout_s=20)


def test_a_launcher_that_takes_a_lost_ones_place_waits_for_the_next_round(
    launchers: Launchers,
) -> None:
    """It must not be told of the round in which the lost one was, whose store is used up."""
    launchers.open()
    head, lost = launchers.join(0), launchers.join(1)
    assert [found.number for found in launchers.rounds(head, lost)] == [1, 1]
    launchers.vanish(lost)
    deadline = time.monotonic() + 5
    while not head.regroup() and time.monotonic() < deadline:
        time.sleep(0.01)
    replacement = launchers.join(1, instance="another")
    assert [found.number for found in launchers.rounds(replacement, head)] == [2, 2]


def test_a_head_that_has_gone_is_named(launchers: Launchers) -> None:
    launchers.open()
    first, second = launchers.join(0), launchers.join(1)
    launchers.rounds(first, second)
    launchers.listener.shutdown(socket.SHUT_RDWR)
    launchers.listener.close()
    launchers.links[second._thread].cut()
    with pytest.raises(
        RendezvousError, match=f"node 0 at 127.0.0.1:{launchers.port} is out of reach"
    ):
        second.next_round(timeout_s=20)


@pytest.mark.parametrize(
    "line", [b"", b"x\n", b"[]\n", b"{}\n", b'{"proof": 1}\n', b"\xff\n", b'{"proof": "', b"9" * 99]
)
def test_garbage_neither_ends_the_rendezvous_nor_gets_in(launchers: Launchers, line: bytes) -> None:
    launchers.open()
    with socket.create_connection(("127.0.0.1", launchers.port), timeout=5) as stranger:
        stranger.sendall(line)
    assert len(launchers.rounds(launchers.join(0), launchers.join(1))) == 2


@pytest.mark.parametrize("number", ["seven", float("inf"), None, {}])
def test_a_member_that_sends_garbage_is_only_lost_itself(
    launchers: Launchers, number: object
) -> None:
    """After an infinite number it stayed a member, and no round began any more."""
    launchers.open(min_nodes=1)
    link = introduced(launchers)
    assert link.read(within_s=5)["refused"] == ""
    link.send({"round": number, "waits": []}, within_s=5)
    assert launchers.rounds(launchers.join(0))[0].nodes == (0,)


@pytest.mark.parametrize("node", [0.5, float("nan"), "1", None, -1, 2])
def test_a_node_has_one_of_the_runs_numbers(launchers: Launchers, node: object) -> None:
    launchers.open(min_nodes=1)
    assert introduced(launchers, node=node).read(within_s=5)["final"]
    assert launchers.rounds(launchers.join(0))[0].nodes == (0,)


def introduced(launchers: Launchers, **changes: object) -> Link:
    """Node 1, which has said who it is."""
    where = "127.0.0.1", launchers.port
    link = connect(where, secret="secret", service=node_registry.SERVICE, within_s=5)
    link.send(asdict(node_info(1)) | {"keeper": "", **changes}, within_s=5)
    return link


def test_a_launcher_that_is_cut_off_before_its_answer_is_no_member(
    launchers: Launchers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its place was taken for good: no round began, and nobody else could be that node."""
    monkeypatch.setattr(node_registry, "differences", lambda *_: time.sleep(0.3) or [])
    launchers.open(min_nodes=1)
    link = introduced(launchers)
    link.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    link.close()
    assert launchers.rounds(launchers.join(0))[0].nodes == (0,)
    launchers.join(1, instance="another")
    until(lambda: 1 in launchers.registry.members)


def test_a_store_listens_at_its_address_alone() -> None:
    for address, expected in (("127.0.0.2", "127.0.0.2"), ("::1", "::1"), ("192.0.2.1", "")):
        with addresses.listen_at(address) as made:
            assert made.getsockname()[0] in ((expected,) if expected else ("::", "0.0.0.0"))


def test_loopback_stays_loopback(tmp_path: Path) -> None:
    with addresses.listen("localhost", 0) as own, addresses.listen("10.1.2.3", 0) as shared:
        assert own.getsockname()[0] == "127.0.0.1"
        assert shared.getsockname()[0] in ("::", "0.0.0.0")
