"""The launcher tells that a run's folder takes nothing: nothing that ranks write arrives there."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from colotrain.launch.elastic import _signals
from colotrain.launch.folder_watch import PROBE_S
from colotrain.launch.watch import Watch
from colotrain.rundir import RunDir
from tests.unit.events.test_view import plan_of


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "run")
    made.create()
    return made


@pytest.fixture
def rank() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def check(watch: Watch, *, later_s: float = 0.0) -> None:
    """Check as if this long had passed since the folder failed."""
    watch.checked_at -= 1.0
    watch.folder.looked_at -= PROBE_S
    watch.folder.since -= later_s
    watch.check(asked_to_stop=False)


def test_a_folder_that_was_renamed_is_told_and_ends_the_run_unless_it_comes_back(
    rundir: RunDir, rank: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    watch = Watch(plan=plan_of(), rundir=rundir, pids=lambda: {0: rank.pid})
    check(watch)
    assert capsys.readouterr().err == ""
    elsewhere = rundir.path.rename(rundir.path.with_name("other"))
    check(watch)
    why = f"{rundir.path} cannot be written (it was renamed or deleted)"
    assert capsys.readouterr().err.startswith(f"warning: {why}: training goes on")
    check(watch)
    assert (capsys.readouterr().err, watch.verdict) == ("", None)
    elsewhere.rename(rundir.path)
    check(watch)
    assert "can be written again" in capsys.readouterr().err
    rundir.path.rename(elsewhere)
    check(watch)
    assert watch.verdict is None
    check(watch, later_s=watch.plan.elastic.hang_timeout_s + 1)
    assert str(watch.verdict).startswith(why)
    assert watch.is_final
    assert rank.wait(5) == -signal.SIGKILL


def test_a_run_waits_for_room_on_a_full_disk(
    rundir: RunDir,
    rank: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    watch, whole = Watch(plan=plan_of(), rundir=rundir, pids=lambda: {0: rank.pid}), os.write

    def full(handle: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    check(watch)
    check(watch, later_s=1e6)
    assert watch.verdict is None
    assert capsys.readouterr().err.count("(No space left on device): training goes on") == 1
    monkeypatch.setattr(os, "write", whole)
    check(watch)
    assert "can be written again" in capsys.readouterr().err
    assert list(rundir.stop_file.parent.iterdir()) == []


def test_ranks_are_told_themselves_to_stop_where_the_folder_takes_no_request(
    rundir: RunDir, rank: subprocess.Popen[bytes]
) -> None:
    watch = Watch(plan=plan_of(), rundir=rundir, pids=lambda: {0: rank.pid})
    current: Any = SimpleNamespace(signals=[], rundir=rundir, watch=watch)
    rundir.path.rename(rundir.path.with_name("other"))
    with _signals(current):
        os.kill(os.getpid(), signal.SIGTERM)
    assert current.signals == ["SIGTERM"]
    assert rank.wait(5) == -signal.SIGUSR1
