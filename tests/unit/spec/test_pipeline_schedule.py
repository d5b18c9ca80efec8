"""The order in which stages run forwards and backwards: complete, in order, and never stuck."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from colotrain.spec import pipeline_schedule
from colotrain.spec.cpu_memory import NUM_SLOTS
from colotrain.spec.pipeline_schedule import (
    Action,
    bubble,
    forwards_ahead,
    in_flight,
    in_turn,
    order_of,
    pipeline_time,
    slots_around,
)

SIZES = [
    (stages, chunks, num)
    for stages, chunks in itertools.product((2, 3, 4), (1, 2, 3))
    for num in (*range(1, 14), 16, 17, 23, 32)
]


class Stuck(Exception):
    """Every rank that is not done waits."""


def simulate(
    orders: Sequence[Sequence[Action]],
    chunks: int,
    window: float = math.inf,
    around: float = math.inf,
) -> float:
    """Return the time in which ranks run their orders; a forward takes 1 and a backward 2.

    A rank sends after each action, and waits while the receiver has not taken what it sent
    `window` tensors before, or `around` between the last and the first stage. Each rank takes what
    arrives on a way in its order, and checks that it is what the action needs.
    """
    stages = len(orders)
    ways: dict[tuple[int, bool], list[tuple[Action, int, float]]] = defaultdict(list)
    """(stage that sends, whether activations) → what it sent, to which chunk, and when."""
    taken: dict[tuple[int, bool], list[float]] = defaultdict(list)

    def program(stage: int) -> Iterator[float]:
        now = 0.0
        for action in orders[stage]:
            step = 1 if action.is_forward else -1
            source, at_end = (stage - step) % stages, not 0 <= stage - step < stages
            if 0 <= (chunk := action.chunk - step * at_end) < chunks:
                way = source, action.is_forward
                while len(ways[way]) == len(taken[way]):
                    yield now
                sent, to, when = ways[way][len(taken[way])]
                wanted = Action(action.is_forward, chunk, action.micro_batch)
                assert (sent, to) == (wanted, action.chunk)
                now = max(now, when)
                taken[way].append(now)
            now += 1 if action.is_forward else 2
            at_end = not 0 <= stage + step < stages
            if 0 <= (to := action.chunk + step * at_end) < chunks:
                way, most = (stage, action.is_forward), around if at_end else window
                while len(ways[way]) - len(taken[way]) >= most:
                    yield now
                if len(ways[way]) >= most:
                    now = max(now, taken[way][len(ways[way]) - int(most)])
                ways[way].append((action, to, now))
        finished[stage] = now

    finished: dict[int, float] = {}
    running = [program(stage) for stage in range(stages)]
    while len(finished) < stages:
        before = sum(map(len, ways.values())), sum(map(len, taken.values())), len(finished)
        for each in running:
            next(each, None)
        if before == (sum(map(len, ways.values())), sum(map(len, taken.values())), len(finished)):
            raise Stuck
    assert all(len(ways[way]) == len(taken[way]) for way in ways)
    return max(finished.values())


def orders_of(stages: int, chunks: int, num: int) -> list[list[Action]]:
    return [
        order_of(stage, stages=stages, chunks=chunks, micro_batches=num) for stage in range(stages)
    ]


@pytest.mark.parametrize(("stages", "chunks", "num"), SIZES)
def test_each_micro_batch_goes_through_each_chunk_once_and_no_rank_gets_stuck(
    stages: int, chunks: int, num: int
) -> None:
    orders = orders_of(stages, chunks, num)
    every = itertools.product((True, False), range(chunks), range(num))
    wanted = Counter(Action(*each) for each in every)
    for stage, order in enumerate(orders):
        assert Counter(order) == wanted
        begun, most = 0, 0
        for position, action in enumerate(order):
            begun += 1 if action.is_forward else -1
            most = max(most, begun)
            if not action.is_forward:  # its own forward was before
                assert Action(True, action.chunk, action.micro_batch) in order[:position]
        sizes = {"stages": stages, "chunks": chunks, "micro_batches": num}
        assert most == min(forwards_ahead(stage, **sizes) + 1, chunks * num)
        assert most <= chunks * in_flight(stage, **sizes) < most + chunks
    unbounded = simulate(orders, chunks)
    assert simulate(orders, chunks, NUM_SLOTS, slots_around(stages)) == unbounded
    simulate([in_turn(chunks=chunks, micro_batches=num)] * stages, chunks, 1, 1)
    unit = [[1.0] * chunks] * stages
    assert pipeline_time(unit, num) == pytest.approx(unbounded / 3, rel=0.02)
    if num % stages == 0:
        assert 1 - 3 * chunks * num / unbounded == pytest.approx(bubble(stages, num, chunks))


def test_two_slots_from_the_last_stage_to_the_first_are_too_few() -> None:
    with pytest.raises(Stuck):
        simulate(orders_of(4, 2, 11), 2, NUM_SLOTS, NUM_SLOTS)


def faulty(stages: int, chunks: int, num: int, fault: str) -> list[list[Action]]:
    orders = orders_of(stages, chunks, num)
    if fault == "backwards begin with the first chunk":
        return [
            [a if a.is_forward else replace(a, chunk=chunks - 1 - a.chunk) for a in order]
            for order in orders
        ]
    if fault == "one stage has two micro-batches in each other's place":
        swapped = [replace(a, micro_batch=a.micro_batch ^ 1) if a.chunk else a for a in orders[0]]
        return [swapped, *orders[1:]]
    assert fault == "no forward is ahead"
    return [in_turn(chunks=chunks, micro_batches=num), *orders[1:]]


@pytest.mark.parametrize(
    "fault",
    [
        "backwards begin with the first chunk",
        "one stage has two micro-batches in each other's place",
        "no forward is ahead",
    ],
)
def test_the_simulation_finds_a_wrong_order(fault: str) -> None:
    with pytest.raises((Stuck, AssertionError)):
        simulate(faulty(2, 2, 8, fault), 2, NUM_SLOTS, slots_around(2))


def test_rounds_shorter_than_the_number_of_stages_would_get_stuck(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rounds(stages: int, micro_batches: int) -> list[range]:
        begins = range(0, micro_batches, stages)
        return [range(begin, min(begin + stages, micro_batches)) for begin in begins]

    monkeypatch.setattr(pipeline_schedule, "_rounds", rounds)
    with pytest.raises(Stuck):
        simulate(orders_of(4, 3, 13), 3)
