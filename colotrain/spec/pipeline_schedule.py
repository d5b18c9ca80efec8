"""The order in which pipeline stages run a step's micro-batches. Standard library only.

A rank of stage r of N holds `chunks` chunks of consecutive blocks: the chunks r, N + r, 2N + r … of
the model. A micro-batch goes through the ranks once per chunk, and back as often.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

DEFAULT_CHUNKS = 2
"""Chunks of a rank under the interleaved schedule, unless `mesh.pp_chunks` says otherwise."""
FORWARD_SHARE = 1 / 3
"""Part of a micro-batch's time that its forward takes: backward has two products for its one."""


@dataclass(frozen=True, slots=True)
class Action:
    """A forward or a backward of one micro-batch through one of a rank's chunks."""

    is_forward: bool
    chunk: int
    """Position among the rank's own chunks."""
    micro_batch: int


def order_of(stage: int, *, stages: int, chunks: int, micro_batches: int) -> list[Action]:
    """Return what a rank runs in a step: 1F1B with one chunk, interleaved 1F1B with several.

    First come forwards alone, as many as `forwards_ahead` says; then a forward and a backward in
    turn, and at the end backwards alone. With several chunks, micro-batches go through each chunk
    in rounds. Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU
    Clusters", for rounds of `stages` micro-batches; here the rounds of a step may be longer, so
    that the number of micro-batches need not be a multiple of the stages.
    """
    rounds = _rounds(stages, micro_batches)
    runs = [(chunk, index) for each in rounds for chunk in range(chunks) for index in each]
    backs = [
        (chunk, index) for each in rounds for chunk in reversed(range(chunks)) for index in each
    ]
    ahead = forwards_ahead(stage, stages=stages, chunks=chunks, micro_batches=micro_batches)
    order = []
    for position in range(len(runs) + ahead):
        if position < len(runs):
            order.append(Action(True, *runs[position]))
        if position >= ahead:
            order.append(Action(False, *backs[position - ahead]))
    return order


def in_turn(*, chunks: int, micro_batches: int) -> list[Action]:
    """Return an order in which each micro-batch is done before the next one begins."""
    order = []
    for index in range(micro_batches):
        order += [Action(True, chunk, index) for chunk in range(chunks)]
        order += [Action(False, chunk, index) for chunk in reversed(range(chunks))]
    return order


def forwards_ahead(stage: int, *, stages: int, chunks: int, micro_batches: int) -> int:
    """Return the forwards of a rank that precede the forward before its first backward."""
    later = stages - 1 - stage
    if chunks > 1:  # the last chunk's first backward needs a whole round of the chunks before
        longest = max(len(each) for each in _rounds(stages, micro_batches))
        later = 2 * later + (chunks - 1) * longest
    return min(later, chunks * micro_batches)


def in_flight(stage: int, *, stages: int, chunks: int, micro_batches: int) -> int:
    """Return the micro-batches whose activations a rank keeps at a time, counted in whole ones."""
    ahead = forwards_ahead(stage, stages=stages, chunks=chunks, micro_batches=micro_batches)
    return -(-min(ahead + 1, chunks * micro_batches) // chunks)


def _rounds(stages: int, micro_batches: int) -> list[range]:
    """Divide the micro-batches into rounds of at least `stages`, if there are as many."""
    num = max(1, micro_batches // stages)
    ends = [micro_batches * index // num for index in range(num + 1)]
    return [range(begin, end) for begin, end in itertools.pairwise(ends)]


def slots_around(stages: int) -> int:
    """Return how many tensors may be on the way from the last stage to the first one, or back.

    Between other neighbours `NUM_SLOTS` are enough, so that no rank waits to send. What goes around
    waits for the rest of its round.
    """
    return stages


def needs(action: Action, stage: int, *, stages: int, chunks: int) -> tuple[int, Action] | None:
    """Return the stage and action that must be over before; None where it is the rank's own."""
    step = 1 if action.is_forward else -1
    before, chunk = stage - step, action.chunk
    if not 0 <= before < stages:
        before, chunk = before % stages, chunk - step
    if not 0 <= chunk < chunks:
        return None
    return before, Action(action.is_forward, chunk, action.micro_batch)


def bubble(stages: int, micro_batches: int, chunks: int = 1) -> float:
    """Return the part of a step for which a rank waits, with chunks that take equally long.

    Source: as for `order_of`.
    """
    return (stages - 1) / (chunks * micro_batches + stages - 1)


def pipeline_time(costs: Sequence[Sequence[float]], micro_batches: int) -> float:
    """Return the seconds in which stages run a step's micro-batches. The schedule is played.

    `costs` are the seconds of each stage's chunks per micro-batch, forward and backward.
    """
    stages, chunks = len(costs), len(costs[0])
    played = min(micro_batches, 4 * stages + micro_batches % stages)
    orders = [
        deque(order_of(stage, stages=stages, chunks=chunks, micro_batches=played))
        for stage in range(stages)
    ]
    ended: dict[tuple[int, Action], float] = {}
    """Stage and action → second at which it ends."""
    now, left = [0.0] * stages, [*range(stages)]
    while left:
        for stage in [*left]:
            while orders[stage]:
                action = orders[stage][0]
                needed = needs(action, stage, stages=stages, chunks=chunks)
                if needed is not None and needed not in ended:
                    break
                orders[stage].popleft()
                share = FORWARD_SHARE if action.is_forward else 1 - FORWARD_SHARE
                begins = max(now[stage], ended[needed] if needed is not None else 0.0)
                now[stage] = begins + costs[stage][action.chunk] * share
                ended[stage, action] = now[stage]
            if not orders[stage]:
                left.remove(stage)
    # more micro-batches take as long each as the slowest stage
    return max(now) + (micro_batches - played) * max(map(sum, costs))
