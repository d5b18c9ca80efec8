"""Who hangs: told from signs of life and stacks, before any process is harmed."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from colotrain.engine.state.saving import Saver
from colotrain.errors import ColotrainError
from colotrain.events.event import Event
from colotrain.events.heartbeats import Heartbeat, HeartbeatWriter, read_heartbeats
from colotrain.events.kinds import WorkerExit
from colotrain.events.log import EventReader, EventWriter
from colotrain.launch.causes import describe
from colotrain.launch.rendezvous import Node
from colotrain.launch.state import Launch
from colotrain.launch.watch import SilentRank, Watch, _stack
from colotrain.launch.worker_exits import worker_exits
from colotrain.parent_process import has_ended
from colotrain.records import to_plain
from colotrain.rundir import RunDir
from colotrain.spec.phases import Phase
from colotrain.timeouts import AwakeTimeout
from tests.unit.events.test_view import plan_of

DUMP = """Thread 0x01 (most recent call first):
  File "/lib/threading.py", line 5 in wait
  File "/colotrain/launch/server/forkserver.py", line 60 in _end_with

Current thread 0x02 (most recent call first):
{frames}
  File "/site/colotrain/engine/step/train.py", line 100 in train
  File "/site/colotrain/engine/worker.py", line 50 in main
"""
WAITS = '  File "/torch/distributed/distributed_c10d.py", line 9 in all_reduce'
SHARED = '  File "/x/colotrain/engine/comms/shared_memory.py", line 9 in _sleep'
WORKS = '  File "/home/user/model.py", line 12 in forward'


def silent(tmp_path: Path, frames: str, state: str = "S") -> SilentRank:
    log = tmp_path / "stderr.log"
    log.write_text("said before\n" + DUMP.format(frames=frames))
    beat = Heartbeat(
        rank=3, pid=77, step=5, phase=Phase.DATA, stage=1, t=time.monotonic() - 9, patience_s=6
    )
    return SilentRank(beat=beat, state=state, stack=_stack(log, 12), log=log)


def test_the_rank_that_does_not_wait_in_a_collective_is_the_one(tmp_path: Path) -> None:
    assert silent(tmp_path, WAITS).waits_for_others
    assert silent(tmp_path, SHARED).waits_for_others
    hangs = silent(tmp_path, WORKS)
    assert not hangs.waits_for_others
    assert "rank 3 (process 77) hung in data (stage 1) of step 5, silent for 9 s at " in str(hangs)
    assert "/home/user/model.py:12 in forward" in str(hangs)


def test_a_rank_that_waits_for_a_disk_says_so(tmp_path: Path) -> None:
    waits = silent(tmp_path, WORKS, state="D")
    assert not waits.waits_for_others
    what = "waits for a disk or file system that does not answer in data (stage 1) of step 5"
    assert what in str(waits)


def test_a_stopped_rank_is_the_one_wherever_it_is(tmp_path: Path) -> None:
    stopped = silent(tmp_path, WAITS, state="T")
    assert not stopped.waits_for_others
    assert "was stopped (SIGSTOP)" in str(stopped)


@pytest.fixture
def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])


def test_only_a_rank_that_overstays_its_own_patience_is_ended(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    rundir = RunDir(tmp_path)
    watch = Watch(
        plan=plan_of(),
        rundir=rundir,
        pids=lambda: {0: sleeper.pid},
        checked_at=time.monotonic() - 1,
    )
    heart = HeartbeatWriter(rundir.heartbeat_file(0), rank=0, patience_s=600)
    heart.beat(1, Phase.START)
    line = (
        rundir.heartbeat_file(0)
        .read_text()
        .replace(f'"pid": {os.getpid()}', f'"pid": {sleeper.pid}')
    )
    rundir.heartbeat_file(0).write_text(line)
    watch.check(asked_to_stop=False)
    assert sleeper.poll() is None
    [beat] = read_heartbeats(rundir.heartbeats)
    old = line.replace(f'"t": {beat.t}', f'"t": {beat.t - 700}')
    rundir.heartbeat_file(0).write_text(old)
    watch.checked_at -= 1
    watch.check(asked_to_stop=False)
    assert sleeper.wait(timeout=10) != 0
    assert watch.verdict is not None
    assert "rank 0" in watch.verdict
    watch.close()
    assert not list(rundir.heartbeats.iterdir())


def test_the_silent_workers_of_an_ended_attempt_are_not_those_of_the_next(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    rundir = RunDir(tmp_path)
    workers = {0: sleeper.pid}
    watch = Watch(
        plan=plan_of(), rundir=rundir, pids=lambda: workers, checked_at=time.monotonic() - 1
    )
    silent_since = time.monotonic() - 700
    beat = {"rank": 0, "pid": sleeper.pid, "step": 1, "phase": "data", "t": silent_since}
    rundir.heartbeats.mkdir(parents=True, exist_ok=True)
    rundir.heartbeat_file(0).write_text(json.dumps({**beat, "patience_s": 600}))
    watch.check(asked_to_stop=False)
    assert sleeper.wait(timeout=10) != 0
    assert watch.verdict is not None
    watch.begin()
    watch.checked_at -= 1
    watch.check(asked_to_stop=False)  # the next workers are not there yet
    assert watch.verdict is None


def test_ranks_that_were_stopped_with_their_launcher_are_not_silent(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    rundir = RunDir(tmp_path)
    told = list[str]()
    watch = Watch(plan=plan_of(), rundir=rundir, pids=lambda: {0: sleeper.pid}, say=told.append)
    watch.checked_at -= 700  # it was stopped meanwhile
    beat = {"rank": 0, "pid": sleeper.pid, "step": 1, "phase": "data", "t": watch.checked_at}
    rundir.heartbeats.mkdir(parents=True, exist_ok=True)
    rundir.heartbeat_file(0).write_text(json.dumps({**beat, "patience_s": 600}))
    for asked in (True, False):
        watch.stop_asked_at = watch.checked_at
        watch.check(asked_to_stop=asked)
        watch.checked_at -= 1
    assert (watch.verdict, sleeper.poll()) == (None, None)
    assert told == ["this machine's ranks were stopped for 700 s; they go on"]
    watch.woke_at -= 601  # and still says nothing
    watch.check(asked_to_stop=False)
    assert sleeper.wait(timeout=10) != 0
    assert "rank 0" in (watch.verdict or "")


def test_a_heart_without_a_file_is_silent_and_harmless(tmp_path: Path) -> None:
    HeartbeatWriter().beat(1, Phase.START)
    HeartbeatWriter(tmp_path / "file" / "x", rank=0).beat(1, Phase.START)
    (tmp_path / "plain").write_text("")
    HeartbeatWriter(tmp_path / "plain" / "x", rank=0).beat(1, Phase.START)


def last_events(kind: str, rank: int, **fields: object) -> Event:
    return Event(kind=kind, t=1.0 + rank, rank=rank, attempt=0, fields=dict(fields))


def test_a_rank_that_left_early_is_named_before_those_that_lost_it() -> None:
    exits = [WorkerExit(rank=0, exit_code=1, log="a"), WorkerExit(rank=1, exit_code=0, log="b")]
    lost = last_events("failed", 0, phase="reduce", step=4, error="Connection closed by peer")
    assert describe(exits, [lost]) == (
        "rank 1 ended with exit code 0 before the run was over; its log: b"
    )
    done = last_events("finished", 1, step=9)
    assert "rank 0 failed in reduce" in describe(exits, [lost, done])


def test_hunger_is_named() -> None:
    worker_exit = WorkerExit(rank=2, exit_code=-9, log="c", out_of_memory=True)
    assert "the kernel ended it for want of memory" in describe([worker_exit], [])


@pytest.mark.parametrize(("node", "notes"), [(0, 1), (1, 0)])
def test_the_first_node_says_once_what_a_wish_to_stop_leads_to(
    tmp_path: Path, node: int, notes: int
) -> None:
    rundir = RunDir(tmp_path)
    rundir.create()
    events, watch = EventWriter(rundir.node_events(1)), Watch(plan=plan_of(), rundir=rundir)
    launch = Launch(
        plan=plan_of(), rundir=rundir, events=events, worker="", node=Node(rank=node), watch=watch
    )
    launch.acknowledge_stop()
    launch.signals.append("SIGINT")
    launch.acknowledge_stop()
    launch.acknowledge_stop()
    told = [event.fields["text"] for event in EventReader(rundir).drain()]
    assert len(told) == notes
    assert all(text.startswith("SIGINT: stopping; a step that takes long") for text in told)


@pytest.mark.parametrize("kind", ["step", "checkpoint", "resumed"])
def test_a_restart_says_where_nothing_was_saved(tmp_path: Path, kind: str) -> None:
    rundir = RunDir(tmp_path)
    rundir.create()
    events, watch = EventWriter(rundir.launcher_events), Watch(plan=plan_of(), rundir=rundir)
    launch = Launch(
        plan=plan_of(), rundir=rundir, events=events, worker="", node=Node(), watch=watch
    )
    launch.take([Event(kind=kind, t=1.0, rank=0, attempt=0, fields={"step": 60})])
    launch.record_restart()
    told = [event.fields.get("text", "") for event in EventReader(rundir).drain()]
    begins_anew = any("training begins again with the first step" in text for text in told)
    assert begins_anew == (kind == "step")


@pytest.mark.parametrize(
    ("number", "named"), [(errno.EROFS, True), (errno.EIO, True), (errno.EMFILE, False)]
)
def test_ranks_that_can_write_no_heartbeat_are_not_said_to_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, named: bool
) -> None:
    rundir = RunDir(tmp_path)
    rundir.create()
    waits = "trap '' USR2; echo ready; exec cat"
    pipe = subprocess.PIPE
    with subprocess.Popen(["sh", "-c", waits], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        writer = HeartbeatWriter(rundir.heartbeat_file(0), rank=0, patience_s=0.0)
        monkeypatch.setattr(os, "getpid", lambda: process.pid)
        writer.beat(5, Phase.DATA)
        monkeypatch.undo()
        watch = Watch(plan=plan_of(), rundir=rundir, pids=lambda: {0: process.pid})
        watch.checked_at -= 1.0

        def refuse(folder: Path, path: Path, flags: int) -> int:
            raise OSError(number, os.strerror(number), str(path))

        monkeypatch.setattr("colotrain.launch.folder_watch.open_inside", refuse)
        watch.check(asked_to_stop=False)
    assert process.returncode == -signal.SIGKILL
    told = f"{tmp_path} cannot be written ({os.strerror(number)}): nothing is saved"
    assert (watch.is_final, told in str(watch.verdict)) == (named, named)
    assert ("hung in data of step 5" in str(watch.verdict)) != named


@pytest.mark.parametrize(("silent_s", "is_ended"), [(40.0, False), (60.0, True)])
def test_ranks_that_hang_when_the_run_is_to_stop_are_restarted_before_its_grace_is_over(
    tmp_path: Path, silent_s: float, is_ended: bool
) -> None:
    """So they save the newest copy or checkpoint, where a step is too short to be left."""
    rundir = RunDir(tmp_path)
    waits, pipe = "trap '' USR2; echo ready; exec cat", subprocess.PIPE
    with subprocess.Popen(["sh", "-c", waits], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        beat = Heartbeat(
            rank=0,
            pid=process.pid,
            step=5,
            phase=Phase.COMPUTE,
            t=time.monotonic() - silent_s,
            patience_s=600,
        )
        rundir.heartbeat_file(0).parent.mkdir(parents=True)
        rundir.heartbeat_file(0).write_text(json.dumps(to_plain(beat)))
        elastic = replace(plan_of().elastic, grace_s=100.0)
        plan = replace(plan_of(), elastic=elastic)
        watch = Watch(plan=plan, rundir=rundir, pids=lambda: {0: process.pid})
        watch.stop_asked_at = time.monotonic() - 70
        watch.checked_at -= 1.0
        watch.check(asked_to_stop=True)
        assert (watch.verdict is not None, watch.is_final) == (is_ended, False)
        process.kill()
    assert not is_ended or "hung in forward or backward of step 5" in str(watch.verdict)


def test_a_save_for_which_there_is_no_thread_is_written_before_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    rundir, written = RunDir(tmp_path), list[object]()
    rundir.create()
    events = EventWriter(rundir.launcher_events)
    saver = Saver(plan=plan_of(), rundir=rundir, events=events, token="")
    save: Any = SimpleNamespace(
        manifest=SimpleNamespace(step=7), write=lambda _, beat: written.append(beat), error=None
    )
    saver.current = save
    saver._start(save)
    assert written == [saver.beat]
    assert saver.wait() is None
    saver.before_update()
    (told,) = [event.fields["text"] for event in EventReader(rundir).drain()]
    assert told.startswith("warning: checkpoint of step 7: can't start new thread; training waits")


def test_a_save_that_was_stopped_with_its_rank_is_waited_for(tmp_path: Path) -> None:
    events, beats = EventWriter(tmp_path / "x"), list[float]()
    saver = Saver(plan=plan_of(), rundir=RunDir(tmp_path), events=events, token="")
    saver.beat = lambda: beats.append(time.monotonic())
    timeout = AwakeTimeout(75.0)
    save: Any = SimpleNamespace(manifest=SimpleNamespace(step=7), timeout=timeout, awaits=1)
    timeout.checked_at -= 700  # both were stopped
    saver._waiting(save)
    timeout.waited_s += 75
    with pytest.raises(ColotrainError, match="not written within 75 s, without a report of rank 1"):
        saver._waiting(save)
    assert len(beats) == 2


def test_a_checkpoint_is_due_by_time(tmp_path: Path) -> None:
    rundir, plan = RunDir(tmp_path), plan_of()
    by_time = replace(plan, checkpoint=replace(plan.checkpoint, every_s=60.0))
    savers = [
        Saver(plan=p, rundir=rundir, events=EventWriter(tmp_path / "x"), token="")
        for p in (plan, by_time)
    ]
    for long_ago, due in ((59, False), (61, True)):
        for saver in savers:
            saver.began_at = time.monotonic() - long_ago
        assert [saver.is_due_by_time() for saver in savers] == [False, due]


def test_a_stop_file_of_an_earlier_launch_asks_for_nothing(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path)
    rundir.stop_file.parent.mkdir(parents=True)
    rundir.stop_file.write_text("SIGTERM")
    events, watch = EventWriter(rundir.node_events(1)), Watch(plan=plan_of(), rundir=rundir)
    launch = Launch(
        plan=plan_of(), rundir=rundir, events=events, worker="", node=Node(rank=1), watch=watch
    )
    assert not launch.asked_to_stop()
    rundir.stop_file.unlink()  # as node 0 does when it begins
    assert not launch.asked_to_stop()
    time.sleep(0.05)  # file systems tell times apart by a few milliseconds
    rundir.stop_file.write_text("SIGTERM")
    assert launch.asked_to_stop()


def test_time_in_which_a_process_was_stopped_is_no_waiting() -> None:
    timeout = AwakeTimeout(5.0)
    timeout.checked_at -= 700  # it was stopped meanwhile
    assert not timeout.is_over()
    timeout.waited_s += 5
    assert timeout.is_over()


def test_the_killed_rank_that_ended_the_others_is_named_not_one_that_was_killed_for_it(
    tmp_path: Path,
) -> None:
    ended = SimpleNamespace(_pc=SimpleNamespace(processes=[SimpleNamespace(exitcode=-9)] * 3))
    exits = worker_exits(tmp_path, ended, {2: SimpleNamespace(local_rank=2, exitcode=-9)})
    assert describe(exits, []).startswith("rank 2 was killed by SIGKILL")


@pytest.mark.parametrize(
    ("exit_code", "starved", "earlier", "progressed", "again"),
    [
        (-9, False, [], False, True),
        (-9, True, [], False, False),
        (-9, False, ["rank 0 was killed by SIGKILL"], False, False),
        (1, False, [], False, False),
        (1, False, ["rank 0 was killed by SIGKILL"], True, True),
    ],
)
def test_before_the_first_step_only_a_kill_from_outside_is_tried_again_once(
    exit_code: int, starved: bool, earlier: list[str], progressed: bool, again: bool
) -> None:
    worker_exit = WorkerExit(rank=0, exit_code=exit_code, log="", out_of_memory=starved)
    launch = SimpleNamespace(
        exits=[worker_exit],
        causes=earlier,
        progressed=progressed,
        raised_errors=set(),
        last_events=list,
    )
    assert Launch.may_restart(launch) is again  # type: ignore[arg-type]


def test_a_rank_that_nccls_watchdog_ended_is_not_the_cause(tmp_path: Path) -> None:
    log = tmp_path / "run" / "attempt_0" / "0" / "stderr.log"
    log.parent.mkdir(parents=True)
    log.write_text("[rank0]:[E] Watchdog caught collective operation timeout: WorkNCCL\nframe #0\n")
    processes = SimpleNamespace(
        _pc=SimpleNamespace(processes=[SimpleNamespace(exitcode=-6), SimpleNamespace(exitcode=3)])
    )
    failures = {0: SimpleNamespace(local_rank=0, exitcode=-6)}
    exits = worker_exits(tmp_path, processes, failures)
    assert [x.gave_up for x in exits] == [True, False]
    assert describe(exits, []).startswith("rank 1 ended with exit code 3")
    assert describe(exits[:1], []).startswith("rank 0 waited in vain for another rank")


def test_the_end_of_a_process_is_seen_by_one_with_many_open_files() -> None:
    """`select` refuses handles from 1024 on, so that the launcher ended with an error."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] < 2048:
        pytest.skip(f"a process may open {limits[1]} files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(2048, limits[0]), limits[1]))
    handles = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert not has_ended(os.getpid())
        process = subprocess.Popen(["true"])
        assert has_ended(process.pid, within_s=10)
        process.wait()
    finally:
        for handle in handles:
            os.close(handle)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
