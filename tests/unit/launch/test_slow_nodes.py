"""Spare nodes, and nodes without which a run goes on because they hold the others up."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from colotrain.events.fold import Fold
from colotrain.events.machines import NodeLeft
from colotrain.launch.membership import Membership, Round
from colotrain.launch.node_registry import Leaving, Left, NotNeeded, RendezvousError, next_nodes
from colotrain.launch.slow_nodes import UNKNOWN, SlowNodes
from tests.unit.events.test_slow_ranks import pressed, steps
from tests.unit.launch.test_node_registry import Launchers, launchers, until
from tests.unit.planner.test_resolve import lines, plan, with_values

__all__ = ["launchers"]

WHY = "rank 1 holds the others up, 2.0× the median for 600 s"


class Waiting:
    """A launcher's wait for its next round, on a thread of its own."""

    def __init__(self, member: Membership) -> None:
        self.member, self.found, self.error = member, None, None
        self.said: list[str] = []
        self.found: Round | None
        self.error: RendezvousError | None
        self.thread = threading.Thread(target=self._wait, daemon=True)
        self.thread.start()

    def _wait(self) -> None:
        try:
            self.found = self.member.next_round(timeout_s=20, say=self.said.append)
        except RendezvousError as error:
            self.error = error

    def nodes(self) -> tuple[int, ...]:
        self.thread.join(20)
        assert self.found is not None, self.error
        return self.found.nodes


def with_spare(launchers: Launchers, *, least: int = 3) -> tuple[list[Membership], Waiting]:
    """Three nodes in their first round, and a fourth that waits for a place."""
    launchers.open(min_nodes=least, max_nodes=3, expected_nodes=3, spare_nodes=1)
    members = [launchers.join(node) for node in (0, 1, 2)]
    launchers.rounds(*members)
    spare = Waiting(launchers.join(3))
    until(lambda: spare.member.state.get("spare"))
    return members, spare


@pytest.mark.parametrize(
    ("before", "waiting", "most", "expected"),
    [
        ([], [2, 0, 1], 2, [0, 1]),
        ([0, 1, 2], [0, 2, 3], 3, [0, 3, 2]),
        ([0, 1, 2], [0, 3, 2, 4], 3, [0, 3, 2]),
        ([0, 3, 2], [0, 1, 2, 3], 3, [0, 3, 2]),
        ([0, 3, 2], [0, 2], 3, [0, 2]),
        ([0, 2], [0, 1, 2], 3, [0, 1, 2]),
    ],
)
def test_those_that_stay_keep_their_places(
    before: list[int], waiting: list[int], most: int, expected: list[int]
) -> None:
    assert next_nodes(before, waiting, most=most) == expected


def test_a_spare_node_waits_without_a_word_to_the_others(launchers: Launchers) -> None:
    members, spare = with_spare(launchers)
    assert not any(member.regroup() for member in members)
    assert spare.member.waits
    members[0].end()
    for member in members[1:]:
        member.end()
    launchers.registry.close()
    spare.thread.join(20)
    assert isinstance(spare.error, NotNeeded)


def test_a_spare_node_takes_the_place_of_a_lost_one(launchers: Launchers) -> None:
    members, spare = with_spare(launchers)
    launchers.vanish(members[1])
    until(lambda: members[0].regroup() and members[2].regroup())
    others = [Waiting(members[0]), Waiting(members[2])]
    assert [waiting.nodes() for waiting in (*others, spare)] == [(0, 3, 2)] * 3
    assert [line.split(":")[0] for line in spare.said] == ["spare", "no longer spare"]


def test_a_spare_node_takes_the_place_of_one_that_is_left(launchers: Launchers) -> None:
    members, spare = with_spare(launchers)
    assert launchers.registry.leave(1, WHY) == Leaving(host="host-1", successor=3, nodes=3)
    until(lambda: all(member.regroup() for member in members))
    assert [member.is_orderly() for member in members] == [True] * 3
    assert members[2].regroup() == f"node 1 is left: {WHY}"
    others = [Waiting(members[0]), Waiting(members[2])]
    until(lambda: members[0].waits and members[2].waits)
    assert launchers.registry.round == 1, "the node that is left may still save"
    left = Waiting(members[1])
    left.thread.join(20)
    assert isinstance(left.error, Left)
    assert str(left.error) == WHY
    members[1].end()
    assert [waiting.nodes() for waiting in (*others, spare)] == [(0, 3, 2)] * 3
    again = Waiting(launchers.join(1, instance="another"))
    again.thread.join(20)
    assert isinstance(again.error, Left)


def test_the_run_goes_on_with_fewer_nodes_where_it_may(launchers: Launchers) -> None:
    launchers.open(min_nodes=1, max_nodes=2)
    head, slow = launchers.join(0), launchers.join(1)
    launchers.rounds(head, slow)
    assert launchers.registry.leave(1, WHY) == Leaving(host="host-1", nodes=1)
    assert launchers.registry.leave(1, WHY).later
    until(lambda: slow.regroup())
    waiting = Waiting(head)
    left = Waiting(slow)
    left.thread.join(20)
    slow.end()
    assert waiting.nodes() == (0,)
    assert launchers.registry.leave(0, WHY).refusal == (
        "node 0 (host-0) leads the run, so it cannot be left"
    )


def test_no_node_is_left_that_the_run_needs(launchers: Launchers) -> None:
    launchers.open()
    launchers.rounds(launchers.join(0), launchers.join(1))
    assert launchers.registry.leave(1, WHY).refusal == (
        "node 1 (host-1) is not left: the run needs 2 nodes, and no spare one waits"
    )
    assert launchers.registry.left == {}


def test_without_checkpoints_one_node_may_go_but_not_two_at_once(launchers: Launchers) -> None:
    """Of two that are left together nobody may have the copies in memory."""
    launchers.open(min_nodes=1, max_nodes=3, expected_nodes=3)
    same = {"host": "host-1", "boot": "same"}
    launchers.rounds(launchers.join(0), launchers.join(1, **same), launchers.join(2, **same))
    assert "the run needs 3 nodes" in launchers.registry.leave(1, WHY, saves=False).refusal
    other = Launchers()
    other.open(min_nodes=1)
    other.rounds(other.join(0), other.join(1))
    assert not other.registry.leave(1, WHY, saves=False).refusal
    for member in other.members:
        member.end()
    other.listener.close()


def test_nodes_of_one_machine_are_left_together(launchers: Launchers) -> None:
    launchers.open(min_nodes=2, max_nodes=3, expected_nodes=3)
    members = launchers.join(0), launchers.join(1, host="b"), launchers.join(2, host="b")
    launchers.rounds(*members)
    assert "the run needs 2 nodes" in launchers.registry.leave(1, WHY).refusal


# -- when a node is left

ELASTIC = (
    ("cluster.nodes", 2),
    ("cluster.procs_per_node", 1),
    ("elastic.spare_nodes", 1),
    ("elastic.replace_slow", True),
    ("elastic.replace_slow_after_s", 30.0),
)


class Run:
    """Steps of a second each, of two ranks, and what `SlowNodes` does about them."""

    def __init__(self, answer: Leaving, **known: int) -> None:
        self.slow, self.fold, self.answer = SlowNodes(plan=plan(*ELASTIC), **known), Fold(), answer
        self.step, self.attempt, self.ahead_s = 0, 0, 0.0
        self.asked: list[tuple[int, str]] = []
        self.events: list[NodeLeft] = []
        self.said: list[str] = []

    def leave(self, rank: int, why: str) -> tuple[int, Leaving]:
        self.asked.append((rank, why))
        return rank, self.answer

    def make(self, num: int, *, own_s: float, data_s: float = 0.0, busy: float = 0.0) -> None:
        for _ in range(num):
            self.step += 1
            one = range(self.step, self.step + 1)
            events = [*steps(0, one, own_s=0.4), *steps(1, one, own_s=own_s, data_s=data_s)]
            for event in (*events, pressed(1, waiting_threads=busy)):
                t = event.t + self.ahead_s
                self.fold.add([replace(event, attempt=self.attempt, t=t)])
            self.slow.look(self.fold.view())
            event, texts = self.slow.decide(self.leave)
            self.events += [event] if event else []
            self.said += texts


TAKEN = Leaving(host="host-b", successor=2, nodes=2)


def test_a_rank_that_is_slow_for_long_is_left_with_its_cause() -> None:
    run = Run(TAKEN)
    run.make(29, own_s=0.9, busy=0.8)
    assert run.asked == []
    run.make(4, own_s=0.9, busy=0.8)
    (event,) = run.events
    assert run.asked == [(1, f"rank 1 holds the others up, {event.cause}")]
    assert (event.node, event.host, event.rank, event.successor, event.nodes) == (
        *(1, "host-b", 1),
        *(2, 2),
    )
    assert event.cause.startswith("2.2× the median for 3")
    assert event.cause.endswith("s, other processes have its cores")
    assert run.said == ["node 1 (host-b) is left: node 2 takes its place"]


def test_a_pause_now_and_then_does_not_hide_it_and_a_long_one_does() -> None:
    often = Run(TAKEN)
    for _ in range(5):
        often.make(12, own_s=0.9)
        often.slow.ranks[1].why = None  # as one slow save of another rank makes it
    assert often.events
    seldom = Run(TAKEN)
    for _ in range(9):
        seldom.make(12, own_s=0.9)
        seldom.make(12, own_s=0.4)
    assert not seldom.events


@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0])
def test_a_clock_that_jumps_makes_no_rank_slow_for_an_hour(jump_s: float) -> None:
    run = Run(TAKEN)
    run.make(22, own_s=0.9, busy=0.8)
    run.ahead_s = jump_s
    run.make(2, own_s=0.9, busy=0.8)
    assert run.asked == []
    run.make(9, own_s=0.9, busy=0.8)
    assert run.events


def test_late_data_and_other_attempts_do_not_count() -> None:
    run = Run(TAKEN)
    run.make(90, own_s=0.9, data_s=0.5)
    assert run.asked == []
    for _ in range(4):
        run.attempt += 1
        run.make(25, own_s=0.9)
    assert run.asked == []


def test_what_no_cause_explains_is_left_once_and_known_causes_again() -> None:
    run = Run(TAKEN)
    run.make(40, own_s=0.9)
    assert run.events[0].cause.endswith(UNKNOWN)
    run.attempt += 1
    run.make(40, own_s=0.9)
    assert len(run.events) == 1
    assert run.said[1:] == [
        "rank 1 holds the others up on its new machine, too, and no cause is known: its node is "
        "not left"
    ]
    run.make(20, own_s=0.9, busy=0.8)
    assert len(run.events) == 2


def test_the_number_of_nodes_left_in_a_runs_life_is_bounded() -> None:
    run = Run(TAKEN, num_left=2)
    run.make(40, own_s=0.9, busy=0.8)
    run.attempt += 1
    run.make(90, own_s=0.9, busy=0.8)
    assert len(run.events) == 1
    assert "elastic.max_restarts allows no more" in run.said[-1]
    assert len(run.said) == 2


def test_what_forbids_it_is_said_once() -> None:
    run = Run(Leaving(refusal="node 0 (host-a) leads the run, so it cannot be left"))
    run.make(90, own_s=0.9)
    assert len(run.said) == 1
    assert run.said[0].endswith("node 0 (host-a) leads the run, so it cannot be left")
    later = Run(Leaving(later=True))
    later.make(90, own_s=0.9)
    assert (later.said, later.events) == ([], [])


# -- settings


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"cluster.nodes": 1, "elastic.spare_nodes": 0}, "there is no other to go on with"),
        ({"elastic.spare_nodes": 0}, "needs all its 2 nodes and has no spare ones"),
        ({"elastic.max_restarts": 0}, "which bounds how many nodes are left"),
        ({"elastic.spare_nodes": -1}, "elastic.spare_nodes=-1"),
        (
            {"checkpoint.every": 0, "elastic.memory_copy": "off"},
            "all steps would be lost with a node that is left",
        ),
        ({"elastic.replace_slow_after_s": 0.0}, "elastic.replace_slow_after_s=0"),
    ],
)
def test_settings_that_could_never_leave_a_node_are_refused(
    changed: dict[str, object], expected: str
) -> None:
    assert expected in lines(with_values(*{**dict(ELASTIC), **changed}.items()))[0]


def test_spare_nodes_need_another_node_than_the_first() -> None:
    (line,) = lines(with_values(("elastic.spare_nodes", 1)))
    assert "node 0 leads the run and cannot be replaced" in line


def test_a_run_that_may_grow_says_that_its_first_node_stays() -> None:
    values = dict(ELASTIC) | {"cluster.nodes": 1, "elastic.spare_nodes": 0, "elastic.max_nodes": 2}
    (warning,) = [w for w in plan(*values.items()).warnings if "replace_slow" in w]
    assert "node 0 leads the run and is never left" in warning
