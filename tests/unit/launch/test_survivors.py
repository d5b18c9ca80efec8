"""Which ranks are ended when another one has failed, and which may still do something useful."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from colotrain.events.heartbeats import Heartbeat, HeartbeatWriter
from colotrain.launch import survivors
from colotrain.launch.survivors import end_survivors, failed, is_in_vain
from colotrain.rundir import RunDir
from colotrain.spec.phases import Phase


@dataclass
class Process:
    """What multiprocessing shows of a worker."""

    process: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def exitcode(self) -> int | None:
        return self.process.poll()


@dataclass
class Workers:
    rundir: RunDir
    processes: list[Process]
    said: list[str] = field(default_factory=list)

    def in_phase(self, phase: Phase, *, local: int = 1, first_rank: int = 4) -> None:
        rank = first_rank + local
        writer = HeartbeatWriter(self.rundir.heartbeat_file(rank), rank=rank, patience_s=60)
        pid = self.processes[local].pid
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("os.getpid", lambda: pid)
            writer.beat(3, phase)

    def die(self, code: int = -signal.SIGKILL, *, local: int = 0) -> None:
        process = self.processes[local].process
        if code < 0:
            process.send_signal(-code)
        else:
            process.kill()
            process.wait()
            process.returncode = code
        process.wait()

    def end(self, *, has_copies: bool = False, first_rank: int = 4) -> tuple[set[int], float]:
        began = time.monotonic()
        ended = end_survivors(
            self.processes,
            self.rundir,
            first_rank=first_rank,
            has_copies=has_copies,
            say=self.said.append,
        )
        return ended, time.monotonic() - began


@pytest.fixture
def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workers]:
    """Two processes, ranks 4 and 5, that would take very long."""
    monkeypatch.setattr(survivors, "FINISH_S", 1.5)
    monkeypatch.setattr(survivors, "RAISE_S", 0.4)
    monkeypatch.setattr(survivors, "SILENT_S", 0.7)
    command = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
    made = [Process(subprocess.Popen(command)) for _ in range(2)]
    yield Workers(RunDir(tmp_path), made)
    for process in made:
        process.process.kill()
        process.process.wait()


@pytest.mark.parametrize(
    "phase", [Phase.START, Phase.DATA, Phase.COMPUTE, Phase.EVALUATION, Phase.TEACHER, None]
)
def test_what_computes_or_begins_in_vain_is_ended_at_once(
    workers: Workers, phase: Phase | None
) -> None:
    if phase:
        workers.in_phase(phase)
    workers.die()
    ended, took_s = workers.end()
    assert ended == {1}
    assert took_s < 1.0
    assert workers.processes[1].process.wait(5) == -signal.SIGKILL


@pytest.mark.parametrize("phase", [Phase.CHECKPOINT, Phase.ROLLBACK])
def test_a_rank_that_saves_is_left_alone(workers: Workers, phase: Phase) -> None:
    workers.in_phase(phase)
    workers.die()
    assert workers.end()[0] == set()
    assert workers.processes[1].exitcode is None


@pytest.mark.parametrize("phase", [Phase.OPTIMIZER, Phase.RECORD, Phase.MEMORY_COPY, Phase.ENDING])
def test_a_rank_that_finishes_has_time_for_it(workers: Workers, phase: Phase) -> None:
    workers.in_phase(phase)
    workers.die()
    threading.Timer(0.5, workers.in_phase, [Phase.COMPUTE]).start()
    ended, took_s = workers.end(has_copies=True)
    assert ended == {1}
    assert took_s >= 0.4


@pytest.mark.parametrize("phase", [Phase.OPTIMIZER, Phase.RECORD, Phase.ENDING])
def test_a_rank_that_does_not_finish_is_ended_when_its_time_is_over(
    workers: Workers, phase: Phase
) -> None:
    workers.in_phase(phase)
    workers.die()
    ended, took_s = workers.end()
    assert ended == {1}
    assert 1.4 <= took_s < 4.0
    assert workers.processes[1].process.wait(5) == -signal.SIGKILL
    [note] = workers.said
    assert note == f"rank 4 has failed; waiting up to 2 s for rank 5 ({phase} of step 3) to finish"


def test_a_copy_of_a_large_state_may_take_longer(workers: Workers) -> None:
    workers.in_phase(Phase.MEMORY_COPY)
    workers.die()
    assert workers.end(has_copies=True)[0] == set()
    assert workers.processes[1].exitcode is None


def test_only_what_needs_no_failed_rank_is_not_in_vain() -> None:
    beats = {
        phase: Heartbeat(rank=0, pid=1, step=3, phase=phase, stage=1, t=began, patience_s=6)
        for phase in Phase
        for began in [time.monotonic()]
    }
    assert {phase.value for phase, beat in beats.items() if not is_in_vain(beat)} == {
        *("reduce", "optimizer", "record", "memory copy", "ending"),
        *("checkpoint", "rollback"),
    }
    late = replace(beats[Phase.REDUCE], t=time.monotonic() - 2 * survivors.REDUCE_S)
    assert is_in_vain(late)


def test_after_an_error_the_others_have_a_moment_to_raise_theirs(workers: Workers) -> None:
    workers.in_phase(Phase.COMPUTE)
    workers.die(1)
    threading.Timer(0.2, workers.die, [1], {"local": 1}).start()
    assert workers.end()[0] == set()
    assert failed(workers.processes) == [0, 1]


def test_after_an_error_what_goes_on_is_ended(workers: Workers) -> None:
    workers.in_phase(Phase.COMPUTE)
    workers.die(1)
    ended, took_s = workers.end()
    assert ended == {1}
    assert 0.4 <= took_s < 1.4


@pytest.mark.parametrize("has_part", [True, False])
@pytest.mark.parametrize("has_copies", [True, False])
def test_a_save_that_needs_the_failed_rank_no_more_may_end(
    workers: Workers, has_part: bool, has_copies: bool
) -> None:
    folder = workers.rundir.checkpoints / ".step-00000002.x-0.tmp"
    folder.mkdir(parents=True)
    (folder / f"__{4 if has_part else 5}.json").touch()
    workers.in_phase(Phase.COMPUTE)
    workers.die()
    threading.Timer(0.6, lambda: folder.rename(folder.with_name("step-00000002"))).start()
    ended, took_s = workers.end(has_copies=has_copies)
    assert ended == {1}
    waits = has_part and not has_copies
    assert (took_s >= 0.5) == waits
    time.sleep(0 if waits else 0.7)  # until the timer has run


def test_a_save_that_does_not_end_is_waited_for_no_longer_than_said(workers: Workers) -> None:
    folder = workers.rundir.checkpoints / ".step-00000002.x-0.tmp"
    folder.mkdir(parents=True)
    (folder / "__4.json").touch()
    workers.in_phase(Phase.COMPUTE)
    workers.die()
    ended, took_s = workers.end()
    assert ended == {1}
    assert 1.4 <= took_s < 4.0
    [note] = workers.said
    assert note.endswith("(forward or backward of step 3) to finish a checkpoint")


@pytest.mark.parametrize("has_part", [True, False])
@pytest.mark.parametrize("has_copies", [True, False])
def test_a_rank_that_waits_for_a_save_is_ended_where_it_needs_the_failed_rank(
    workers: Workers, has_part: bool, has_copies: bool
) -> None:
    folder = workers.rundir.checkpoints / ".step-00000002.x-0.tmp"
    folder.mkdir(parents=True)
    (folder / f"__{4 if has_part else 5}.json").touch()
    workers.in_phase(Phase.CHECKPOINT)
    workers.die()
    if has_part:
        threading.Timer(0.6, lambda: folder.rename(folder.with_name("step-00000002"))).start()
    ended, took_s = workers.end(has_copies=has_copies)
    assert ended == (set() if has_part else {1})
    assert (took_s >= 0.5) == has_part


def test_no_save_ends_without_rank_0(workers: Workers) -> None:
    folder = workers.rundir.checkpoints / ".step-00000002.x-0.tmp"
    folder.mkdir(parents=True)
    (folder / "__0.json").touch()
    workers.in_phase(Phase.COMPUTE, first_rank=0)
    workers.die()
    ended, took_s = workers.end(first_rank=0)
    assert ended == {1}
    assert took_s < 1.0


def test_who_has_failed() -> None:
    class Ended:
        def __init__(self, exitcode: int | None) -> None:
            self.exitcode = exitcode

    codes = [Ended(code) for code in (None, 0, 1, 3, -9, -6)]
    assert failed(codes) == [2, 3, 4, 5]
    assert failed(codes, "cuda") == [2, 3, 4]
