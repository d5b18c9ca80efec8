"""Decides when the run goes on without a node whose rank holds the others up.

Only node 0's launcher decides. A rank counts where the cause lies in its machine: whatever explains
its slowness but late data, which would come along to another machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from colotrain.events.machines import NodeLeft
from colotrain.events.slow_ranks import FOR_STEPS, Slowness, slow_ranks
from colotrain.events.view import RankView, RunView
from colotrain.launch.node_registry import Leaving
from colotrain.records import same_fields
from colotrain.spec.axes import node_of, ranks_on
from colotrain.spec.plan import RunPlan

RECOVERY = 4.0
"""Seconds of slowness that a second without it makes up for."""
MOST_LONGER = 4.0
"""How much longer than their steps ranks may take from one to the next, as to evaluate and save."""
UNKNOWN = "from no cause that its events show"

Leave = Callable[[int, str], tuple[int, Leaving]]
"""Asks to leave the node of a rank, for a reason; returns the node and the answer."""


@dataclass(slots=True)
class _Slow:
    """For how long a rank has held the others up."""

    since: RankView
    now: RankView
    seconds: float = 0.0
    """Seconds slow, less those made up for."""
    why: Slowness | None = None
    """None while it is not slow."""


@dataclass(slots=True, kw_only=True)
class SlowNodes:
    """Adds up how long each rank of the newest attempt has held the others up."""

    plan: RunPlan
    num_left: int = 0
    """Nodes that were left so far in the run's life."""
    ranks: dict[int, _Slow] = field(default_factory=dict)
    replaced: set[int] = field(default_factory=set)
    """Ranks whose machine was replaced in this launch."""
    said: set[str] = field(default_factory=set)

    def look(self, view: RunView) -> None:
        """Take up what the last steps show. Call it several times a second."""
        slow = slow_ranks(view.ranks)
        for rank in view.ranks:
            known = self.ranks.get(rank.rank)
            if known is None or known.since.attempt != rank.attempt:
                known = self.ranks[rank.rank] = _Slow(rank, rank)
            why = slow.get(rank.rank)
            known.why = None if why is None or why.is_data else why
            passed_s = min(max(0.0, rank.t - known.now.t), _longest_s(known.now, rank))
            known.seconds += passed_s if known.why else -RECOVERY * passed_s
            known.now = rank
            if known.seconds <= 0.0:
                known.seconds, known.since = 0.0, rank
        for gone in self.ranks.keys() - {rank.rank for rank in view.ranks}:
            del self.ranks[gone]

    def candidates(self) -> list[tuple[_Slow, Slowness]]:
        """Return the ranks that have held the others up for long enough, the slowest first."""
        wanted_s = self.plan.elastic.replace_slow_after_s
        found = [
            (slow, slow.why)
            for slow in self.ranks.values()
            if slow.why is not None
            and slow.seconds >= wanted_s
            and slow.now.step - slow.since.step >= FOR_STEPS
        ]
        return sorted(found, key=lambda pair: -pair[1].factor)

    def decide(self, leave: Leave) -> tuple[NodeLeft | None, list[str]]:
        """Leave the node of one slow rank, if any; return the event, and what to say."""
        said = []
        for slow, why in self.candidates():
            rank, known = slow.now.rank, bool(why.cause)
            if refusal := self._refusal(rank, known=known):
                said += self._once(f"rank {rank} holds the others up{refusal}")
                continue
            held = f"{why.times} for {slow.seconds:.0f} s, {why.cause or UNKNOWN}"
            node, answer = leave(rank, f"rank {rank} holds the others up, {held}")
            if answer.refusal:
                said += self._once(f"rank {rank} holds the others up, {held}; {answer.refusal}")
            elif not answer.later:
                event = _event(node, answer, slow, held)
                self._forget(rank, replaced=answer.successor is not None)
                return event, [*said, _what_follows(event)]
        return None, said

    def _refusal(self, rank: int, *, known: bool) -> str:
        most = self.plan.elastic.max_restarts
        if self.num_left >= most:
            return (
                f", but its node is not left: {most} nodes were left before, and "
                "elastic.max_restarts allows no more"
            )
        if rank in self.replaced and not known:
            return " on its new machine, too, and no cause is known: its node is not left"
        return ""

    def _forget(self, rank: int, *, replaced: bool) -> None:
        procs = self.plan.cluster.procs_per_node
        left = ranks_on(node_of(rank, procs_per_node=procs), procs_per_node=procs)
        # with fewer nodes ranks have other numbers
        self.replaced = self.replaced | set(left) if replaced else set()
        self.ranks.clear()
        self.num_left += 1

    def _once(self, text: str) -> list[str]:
        without_numbers = "".join(c for c in text if not c.isdigit())
        if without_numbers in self.said:
            return []
        self.said.add(without_numbers)
        return [text]


def _longest_s(before: RankView, now: RankView) -> float:
    """Most seconds that the steps in between may have taken: more is a clock that was set."""
    step_s = max(one.busy_s + one.data_s + (one.wait_s or 0.0) for one in (before, now))
    return MOST_LONGER * (now.step - before.step) * step_s


def _event(node: int, answer: Leaving, slow: _Slow, cause: str) -> NodeLeft:
    return NodeLeft(
        node=node,
        rank=slow.now.rank,
        cause=cause,
        seconds=slow.seconds,
        step=slow.now.step,
        **same_fields(answer, NodeLeft),  # host, successor, and the nodes that are left
    )


def _what_follows(event: NodeLeft) -> str:
    follows = f"the run goes on without it, on {event.nodes} node{'s' * (event.nodes > 1)}"
    if event.successor is not None:
        follows = f"node {event.successor} takes its place"
    return f"node {event.node} ({event.host}) is left: {follows}"
