"""`logs -f` shows a run to its end, and ends."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from colotrain.cli import logs
from colotrain.cli.main import guarded
from colotrain.events.fold import follow
from colotrain.events.kinds import WorkerStarted
from colotrain.events.log import EventWriter
from colotrain.rundir import RunDir

LAUNCHER = """
import sys, time
from colotrain.events.liveness import claim
from colotrain.events.log import EventWriter
from colotrain.rundir import RunDir

rundir, trackers_s, lives_s = RunDir(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
with claim(rundir), EventWriter(rundir.launcher_events) as events:
    events.write_record("launch", world_size=1)
    if sys.argv[4] == "detached":
        rundir.launcher_log.write_text("step=1 loss=1\\n")
    events.write_record("done", status="finished", exit_code=0)
    time.sleep(trackers_s)
time.sleep(0.2)
if sys.argv[4] == "detached":
    with rundir.launcher_log.open("a") as log:
        log.write("finished: late\\n")
time.sleep(lives_s)
"""


@contextmanager
def launcher(*, trackers_s: float, lives_s: float, detached: bool = True) -> Iterator[None]:
    """A launcher that has just recorded its run's end, and has more to do."""
    rundir = RunDir("runs/late")
    rundir.create()
    rundir.plan_file.write_text("{}")
    words = [str(trackers_s), str(lives_s), "detached" if detached else "shown"]
    process = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(rundir.path), *words])
    try:
        while not rundir.launcher_events.exists() or follow(rundir).status != "finished":
            assert process.poll() is None
            time.sleep(0.02)
        yield
    finally:
        process.kill()
        process.wait()


@pytest.fixture(autouse=True)
def cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_the_last_lines_of_a_launcher_are_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    with launcher(trackers_s=3.0, lives_s=0.0):
        assert guarded(["logs", "late", "-f"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said == ["launcher: step=1 loss=1", "launcher: finished: late"]


def test_a_launcher_that_never_exits_is_waited_for_as_long_as_trackers_may_take(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "LAST_LINES_S", 2.0)
    with launcher(trackers_s=0.0, lives_s=600.0):
        assert guarded(["logs", "late", "-f"]) == 0
    assert "launcher: finished: late" in capsys.readouterr().out


def test_a_program_that_trained_and_goes_on_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logs, "LAST_LINES_S", 60.0)
    began = time.monotonic()
    with launcher(trackers_s=30.0, lives_s=600.0, detached=False):  # known when `logs` begins
        assert guarded(["logs", "late", "-f"]) == 0
    assert time.monotonic() - began < 40


def test_what_a_scheduler_s_command_prints_is_shown_without_control_characters(
    capfd: pytest.CaptureFixture[str],
) -> None:
    code = "import sys; print('a\\x1b[2Jb\\x07'); print('c\\x9bd', file=sys.stderr); sys.exit(3)"
    assert logs._follow([sys.executable, "-c", code]) == 1
    said = capfd.readouterr()
    assert said.out.splitlines() == ["a [2Jb", "c d"]
    assert said.err == ""


def test_a_log_that_an_event_names_is_that_of_the_runs_own_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rundir, elsewhere = RunDir("runs/moved"), tmp_path / "elsewhere"
    rundir.create()
    rundir.plan_file.write_text("{}")
    for number, folder in enumerate((elsewhere, rundir.logs / "0" / "0", rundir.logs / "0" / "1")):
        folder.mkdir(parents=True)
        (folder / "stdout.log").write_text(f"line of {number}\n")
    (rundir.logs / "0" / "1" / "stdout.log").unlink()
    (rundir.logs / "0" / "1" / "stdout.log").symlink_to(elsewhere / "stdout.log")
    written = (elsewhere, Path("/where/it/was/logs/0/0"), rundir.logs / "0" / "1")
    for rank, folder in enumerate((*written, rundir.logs / ".." / ".." / ".." / "elsewhere")):
        with EventWriter(rundir.event_file(rank=rank, attempt=0)) as events:
            started = {"rank": rank, "world_size": 4, "attempt": 0, "pid": 1, "host": "h"}
            events.write_record(WorkerStarted.KIND, **started, log=f"{folder}/stderr.log", step=0)
    assert guarded(["logs", "moved"]) == 0
    said = capsys.readouterr()
    assert said.out == "rank 1 stdout: line of 1\n"
    assert "rank" not in said.err
    assert "1/stdout.log: is a link, which is not followed" in said.err
