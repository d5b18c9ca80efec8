"""Which ranks are told to hold the others up, and why."""

from __future__ import annotations

import os
import random
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from colotrain.engine.comms.waiting import waited_s, waiting
from colotrain.engine.step import pressure
from colotrain.engine.step.pressure import PressureMeter
from colotrain.events.event import Event
from colotrain.events.fold import Fold
from colotrain.events.kinds import Step
from colotrain.events.machines import Pressure
from colotrain.events.slow_ranks import FOR_S, FOR_STEPS, SlowRankWatch, slow_ranks
from colotrain.events.view import RunView
from tests.unit.generated import staged_run

STEP_S = 1.0
BUSY = "other processes have its cores"


def steps(rank: int, numbers: range, *, own_s: float, data_s: float = 0.0) -> list[Event]:
    """Steps of `STEP_S` in which the rank works for `own_s` and waits for others else."""
    return [
        Event(
            kind=Step.KIND,
            t=100.0 + n * STEP_S,
            rank=rank,
            attempt=0,
            fields={
                "step": n,
                "step_s": STEP_S,
                "data_s": data_s,
                "compute_s": STEP_S - data_s,
                "wait_s": STEP_S - own_s,
            },
        )
        for n in numbers
    ]


def test_a_rank_is_compared_with_those_of_its_own_stage() -> None:
    """The stage with the head takes longer than the others without holding them up."""
    view = Fold().add(staged_run()).view()
    assert [rank.stage for rank in view.ranks] == [0, 0, 1, 1]
    assert [rank.wait_share for rank in view.ranks] == [0.4, 0.4, 0.2, 0.1]  # not of the first step
    assert not slow_ranks(view.ranks)
    longer = [replace(rank, busy_s=rank.busy_s + (rank.rank == 0)) for rank in view.ranks]
    assert [*slow_ranks(longer)] == [0]


def pressed(rank: int, **fields: float) -> Event:
    values = {"step": 1, "waiting_threads": 0.0, "major_faults_per_s": 0.0, "nice": 0, **fields}
    return Event(kind=Pressure.KIND, t=100.0, rank=rank, attempt=0, fields=values)


def told(*events: Event) -> dict[int, str]:
    ranks = Fold().add(sorted(events, key=lambda event: event.t)).view().ranks
    return {rank: str(slowness) for rank, slowness in slow_ranks(ranks).items()}


@pytest.mark.parametrize("world", [2, 3, 8])
def test_the_rank_that_the_others_wait_for_is_slow(world: int) -> None:
    slow = random.randrange(world)
    found = told(
        *(e for r in range(world) for e in steps(r, range(9), own_s=0.8 if r == slow else 0.4))
    )
    assert found == {slow: "2.0× the median"}


def test_ranks_that_are_alike_or_differ_little_are_not() -> None:
    events = [e for r in range(4) for e in steps(r, range(9), own_s=0.80 + 0.04 * r)]
    assert told(*events) == {}
    assert told(*steps(0, range(9), own_s=0.9)) == {}


@pytest.mark.parametrize(
    ("lacking", "data_s", "cause"),
    [
        ({}, 0.0, ""),
        ({}, 0.35, "its data comes late"),
        ({"waiting_threads": 0.4}, 0.0, BUSY),
        ({"waiting_threads": 0.4, "nice": 5}, 0.0, f"{BUSY} (it has nice 5)"),
        ({"waiting_threads": 0.1, "nice": 5}, 0.0, ""),
        (
            {"held_back": 0.4, "waiting_threads": 0.4},
            0.0,
            "its container has used up its CPU quota",
        ),
        ({"held_back": 0.1}, 0.0, ""),
        ({"clock_mhz": 1800.0}, 0.0, "its clock is low (1.8 GHz, others have 3.2)"),
        ({"clock_mhz": 2900.0}, 0.0, ""),
        ({"major_faults_per_s": 500.0}, 0.0, "its memory is read back from swap or disk"),
    ],
)
def test_the_cause_is_what_explains_most_of_it(
    lacking: dict[str, float], data_s: float, cause: str
) -> None:
    usual = steps(0, range(9), own_s=0.4)
    slow = steps(1, range(9), own_s=0.8, data_s=data_s)
    found = told(*usual, *slow, pressed(0, clock_mhz=3200.0), pressed(1, **lacking))
    assert found == {1: f"2.0× the median{', ' if cause else ''}{cause}"}


def test_without_the_kernels_counts_no_cause_is_made_up() -> None:
    events = [e for r in (0, 1) for e in steps(r, range(9), own_s=0.4 + 0.4 * r)]
    unknown = pressed(1)
    unknown.fields["waiting_threads"] = None
    assert told(*events, unknown) == {1: "2.0× the median"}


def looks(watch: SlowRankWatch, fold: Fold, numbers: range, *, own_s: float) -> list[str]:
    said = []
    for n in numbers:
        fold.add([*steps(0, range(n, n + 1), own_s=0.4), *steps(1, range(n, n + 1), own_s=own_s)])
        said += watch.look(fold.view())
    return said


def test_it_is_told_once_when_it_lasts_and_once_when_it_is_over() -> None:
    watch, fold = SlowRankWatch(), Fold()
    assert watch.look(RunView()) == []
    assert looks(watch, fold, range(1, 11), own_s=0.4) == []
    assert looks(watch, fold, range(11, 16), own_s=0.9) == []  # a moment is not enough
    assert looks(watch, fold, range(16, 40), own_s=0.4) == []
    lasting = looks(watch, fold, range(40, 40 + 2 * FOR_STEPS), own_s=0.9)
    assert len(lasting) == 1
    assert lasting[0].startswith("rank 1 holds the others up: 2.")
    assert looks(watch, fold, range(80, 120), own_s=0.4) == ["rank 1 no longer holds the others up"]


def test_many_short_steps_in_a_moment_are_not_lasting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.STEP_S", FOR_S / FOR_STEPS / 4)
    watch, fold = SlowRankWatch(), Fold()
    assert looks(watch, fold, range(1, 3 * FOR_STEPS), own_s=0.9) == []


def test_time_spent_waiting_is_counted() -> None:
    before = waited_s()
    with waiting():
        time.sleep(0.05)
    assert 0.05 <= waited_s() - before < 5.0


def test_pressure_is_read_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter([(1.0, 10), (3.0, 30), (None, 30)])
    now = iter([0.0, 1.0, 10.0, 10.0, 20.0, 20.0])
    monkeypatch.setattr(pressure, "_counts", lambda: next(counts))
    clock = SimpleNamespace(monotonic=lambda: next(now))  # other threads keep theirs
    monkeypatch.setattr(pressure, "time", clock)
    meter = PressureMeter()
    assert meter.read(1) is None
    found = meter.read(2)
    assert found is not None
    assert (found.step, found.waiting_threads, found.major_faults_per_s) == (2, 0.2, 2.0)
    found = meter.read(3)
    assert found is not None
    assert found.waiting_threads is None


def test_the_kernels_counts_can_be_read() -> None:
    queued, faults = pressure._counts()
    assert queued is None or queued >= 0.0
    assert faults >= 0


def test_a_quota_and_a_clock_are_read_where_the_kernel_tells(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(pressure.host, "cgroups", lambda _: [tmp_path / "own", tmp_path])
    assert pressure._held_back_s() is None
    (tmp_path / "cpu.stat").write_text("usage_usec 9\nnr_periods 0\nthrottled_usec 5000000\n")
    assert pressure._held_back_s() is None, "the root has no quota"
    (tmp_path / "cpu.stat").write_text("nr_periods 40\nnr_throttled 3\nthrottled_usec 2500000\n")
    assert pressure._held_back_s() == 2.5
    (tmp_path / "cpu.stat").write_text("nr_periods 40\nthrottled_time 1500000000\n")
    assert pressure._held_back_s() == 1.5
    monkeypatch.setattr(pressure, "CPUS", tmp_path)
    assert pressure._clock_mhz() is None
    for cpu in range(os.cpu_count() or 1):
        folder = tmp_path / f"cpu{cpu}" / "cpufreq"
        folder.mkdir(parents=True)
        (folder / "scaling_cur_freq").write_text("2345678\n")
    assert pressure._clock_mhz() == 2345.678
