"""What restarts cost: steps made again, seconds, and the useful share of a run's whole life."""

from __future__ import annotations

from typing import Any

import pytest

from colotrain.events.event import Event
from colotrain.events.fold import fold
from colotrain.events.view import RunView


def said(kind: str, t: float, attempt: int | None = None, **fields: Any) -> Event:
    rank = None if attempt is None else 0
    return Event(kind=kind, t=t, rank=rank, attempt=attempt, fields=fields)


def launch(t: float, began_at: float) -> Event:
    return said("launch", t, pid=1, host="h", world_size=1, began_at=began_at)


def attempt(number: int, *, base: int, begins: float, steps: int) -> list[Event]:
    """Steps of one second each, after `base` ones."""
    started = {"rank": 0, "world_size": 1, "pid": 1, "step": base}
    done = [
        said("step", begins + n, number, step=base + n, step_s=1.0, loss=1.0)
        for n in range(1, steps + 1)
    ]
    return [said("started", begins, number, **started), *done]


def view(*parts: Event | list[Event]) -> RunView:
    return fold([e for part in parts for e in (part if isinstance(part, list) else [part])])


def test_a_restart_costs_the_steps_that_are_made_again_and_the_time_between() -> None:
    found = view(
        launch(100, 98),
        attempt(0, base=0, begins=100, steps=6),  # until 106
        said("restart", 107.5, cause="rank 1 was killed"),
        attempt(1, base=4, begins=110, steps=4),  # from 110 to 114
        said("done", 115, status="finished", exit_code=0, cause=""),
    ).goodput
    [recovery] = found.recoveries
    assert recovery.lost_steps == 2
    assert recovery.restart_s == pytest.approx(111 - 107.5)
    assert recovery.lost_s == pytest.approx(110 - 104)  # step 4 was over at 104
    assert (found.useful_s, found.wall_s) == (8.0, 17.0)  # 8 steps count; from 98 to 115
    assert found.goodput == pytest.approx(8 / 17)
    assert found.cost == "2 steps lost, 3.5 s to the next step, 47% of the time useful"


def test_a_restart_that_led_to_no_step_is_part_of_the_next() -> None:
    found = view(
        launch(100, 100),
        attempt(0, base=0, begins=100, steps=3),
        said("restart", 104, cause="once"),
        attempt(1, base=3, begins=105, steps=0),
        said("restart", 106, cause="twice"),
        attempt(2, base=3, begins=107, steps=1),
    ).goodput
    [recovery] = found.recoveries
    assert (recovery.lost_steps, recovery.restart_s) == (0, 4.0)


@pytest.mark.parametrize("saved", [4, 5])
def test_what_a_killed_launcher_lost_counts_but_not_the_time_between_launches(saved: int) -> None:
    found = view(
        launch(100, 100),
        attempt(0, base=0, begins=101, steps=5),  # until 106, then the launcher was killed
        launch(500, 500),
        attempt(1, base=saved, begins=501, steps=6 - saved),
        said("done", 504, status="finished", exit_code=0, cause=""),
    ).goodput
    lost = [(r.lost_steps, r.lost_s, r.restart_s) for r in found.recoveries]
    assert lost == ([(1, 1 + 1, 2)] if saved == 4 else [])  # step 5 again, and a start of 1 s
    assert found.wall_s == pytest.approx(6 + 4)
    assert found.useful_s == 6.0


def test_what_a_rollback_makes_again_is_lost_though_nothing_was_restarted() -> None:
    found = view(
        launch(100, 98),
        attempt(0, base=0, begins=100, steps=6),
        said("rollback", 106.5, 0, step=4, left_at=7, text="rollback 1 of at most 3"),
        attempt(0, base=4, begins=107, steps=4)[1:],
        said("done", 112, status="finished", exit_code=0, cause=""),
    )
    assert (found.restarts, found.goodput.recoveries) == (0, ())
    assert (found.goodput.lost_steps, found.goodput.useful_s) == (2, 8.0)
    assert [back.route for back in found.rollbacks] == ["from step 7 back to step 4"]


def test_before_anything_is_known_there_is_no_share() -> None:
    assert view().goodput.goodput is None
