"""Clocks that jump, or that differ between machines: no decision of a run hangs on them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from colotrain.errors import ColotrainError, UsageError
from colotrain.events import liveness
from colotrain.events.event import Event
from colotrain.events.kinds import LaunchEnded, WorkerExit
from colotrain.events.liveness import claim
from colotrain.events.log import EventReader, EventWriter
from colotrain.launch.rendezvous import Node
from colotrain.launch.startup import end_recorded
from colotrain.launch.state import Launch
from colotrain.launch.watch import Watch
from colotrain.launch.worker_exits import newest_log
from colotrain.records import to_plain
from colotrain.rundir import RunDir
from colotrain.runs import start
from tests.unit.events.test_view import plan_of
from tests.unit.runs.test_listing import claimed_by, launched, new_run

HOUR_S = 3600.0
JUMPS = pytest.mark.parametrize("jump_s", [-HOUR_S, HOUR_S])


def jump(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + seconds)


@JUMPS
def test_a_run_of_another_machine_whose_clock_differs_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    rundir = launched(new_run(tmp_path, "one"), steps=1)
    claimed_by(rundir, host="elsewhere")
    jump(monkeypatch, jump_s)
    with pytest.raises(UsageError, match="launches this run already"):
        claim(rundir)
    assert not list(tmp_path.rglob("clock*"))


def test_a_dead_run_of_a_clock_that_was_far_ahead_is_not_taken_for_alive(tmp_path: Path) -> None:
    rundir = launched(new_run(tmp_path, "one"), steps=1)
    claimed_by(rundir, host="elsewhere")
    for path in (rundir.launcher_file, *rundir.events.iterdir()):
        os.utime(path, (time.time() + 24 * HOUR_S,) * 2)
    with claim(rundir):
        assert liveness.is_alive(rundir)


def test_the_newest_log_is_that_of_the_highest_attempt_whatever_its_time(tmp_path: Path) -> None:
    logs = [tmp_path / "run" / f"attempt_{n}" / "0" / "stderr.log" for n in (2, 9, 10)]
    for age_s, log in enumerate(logs):
        log.parent.mkdir(parents=True)
        log.touch()
        os.utime(log, (time.time() - age_s * HOUR_S,) * 2)
    assert newest_log(tmp_path, 0) == logs[-1]
    assert newest_log(tmp_path, 1) == tmp_path
    assert Watch(plan=plan_of(), rundir=RunDir(tmp_path), logs=tmp_path)._log(0) == logs[-1]


@JUMPS
def test_ranks_of_other_nodes_are_named_whatever_their_clocks_and_those_of_this_round_alone(
    tmp_path: Path, jump_s: float
) -> None:
    rundir = RunDir(tmp_path)
    rundir.create()
    events, watch = EventWriter(rundir.launcher_events), Watch(plan=plan_of(), rundir=rundir)
    launch = Launch(
        plan=plan_of(), rundir=rundir, events=events, worker="", node=Node(), watch=watch
    )
    rendezvous: Any = SimpleNamespace(round=2)
    launch.rendezvous = rendezvous
    for rank, number in ((3, 1), (2, 2)):
        exited = WorkerExit(rank=rank, exit_code=-9, log="there", round=number)
        fields = to_plain(exited)
        launch.take([Event(kind=WorkerExit.KIND, t=time.time() + jump_s, fields=fields)])
    assert launch.cause().startswith("rank 2 was killed by SIGKILL")


@JUMPS
def test_an_end_is_recorded_once_whatever_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    rundir = launched(new_run(tmp_path, "one"), steps=1, status="finished", exit_code=0)
    jump(monkeypatch, jump_s)
    with pytest.raises(ColotrainError), end_recorded(rundir):
        raise ColotrainError("the data are gone", "look for them")
    monkeypatch.undo()

    def launch() -> None:
        jump(monkeypatch, jump_s)
        with EventWriter(rundir.launcher_events) as writer:
            writer.write(LaunchEnded(status="failed", exit_code=1, cause="rank 0 fell"))
        raise ColotrainError("rank 0 fell", "look at its log")

    with pytest.raises(ColotrainError), end_recorded(rundir):
        launch()
    ends = [e.fields for e in EventReader(rundir).drain() if e.kind == LaunchEnded.KIND]
    assert [end.get("cause", "") for end in ends] == ["", "the data are gone", "rank 0 fell"]


@JUMPS
def test_settings_with_which_a_launch_made_steps_are_kept_whatever_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump_s: float
) -> None:
    rundir = launched(new_run(tmp_path, "one"), steps=2)
    own_events = EventReader(rundir)
    own_events.skip_to_end()
    jump(monkeypatch, jump_s)
    launched(rundir)
    assert start._made_no_step(own_events)
    launched(rundir, steps=1)
    assert not start._made_no_step(own_events)
