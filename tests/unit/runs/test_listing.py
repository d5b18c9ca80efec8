"""Which runs there are, whether they live, and how one of them is stopped."""

from __future__ import annotations

import dataclasses
import errno
import io
import json
import multiprocessing
import os
import random
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from colotrain.cli.main import guarded
from colotrain.errors import ColotrainError, UsageError
from colotrain.events import liveness
from colotrain.events.fold import follow
from colotrain.events.liveness import claim, is_alive, launcher_of, release, state
from colotrain.events.log import EventWriter
from colotrain.events.view import summary
from colotrain.rundir import RunDir
from colotrain.runs import start
from colotrain.runs.listing import list_runs, row_of, stop
from colotrain.runs.sweep import Element, table, write_sweep
from colotrain.show.plots import _per, _rate, read_curves
from tests.running import SMALL
from tests.unit.events.test_view import plan_of, restarted_run, write_files

LONG_AGO = time.time() - 1000


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def rundir(root: Path) -> RunDir:
    return new_run(root, "one")


def new_run(root: Path, name: str, *, written_at: float | None = None) -> RunDir:
    rundir = RunDir(root / name)
    rundir.create()
    rundir.write_plan(plan_of())
    if written_at is not None:
        os.utime(rundir.plan_file, (written_at, written_at))
    return rundir


def launched(rundir: RunDir, *, steps: int = 0, **done: Any) -> RunDir:
    """Write the events of a launch that has done some steps, and perhaps ended."""
    with EventWriter(rundir.launcher_events) as writer:
        writer.write_record("launch", world_size=2, t=time.time() - 60)
        with EventWriter(rundir.event_file(rank=0, attempt=rundir.next_attempt())) as worker:
            worker.write_record("started", world_size=2, step=0)
            for step in range(1, steps + 1):
                worker.write_record("step", step=step, loss=1 / step, tokens_per_s=100.0 * step)
        if done:
            writer.write_record("done", **done)
    return rundir


@pytest.fixture
def dead_process() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def claimed_by(rundir: RunDir, **changes: Any) -> None:
    """Make the identity file name somebody else."""
    with claim(rundir):
        holder = json.loads(rundir.launcher_file.read_text())
    rundir.launcher_file.write_text(json.dumps(holder | changes))


def age_files(rundir: RunDir) -> None:
    for path in (rundir.launcher_file, *rundir.events.iterdir()):
        os.utime(path, (LONG_AGO, LONG_AGO))


# Claims


def test_a_claim_lasts_until_it_is_released(rundir: RunDir) -> None:
    assert is_alive(rundir) is False
    claim(rundir)
    assert is_alive(rundir) is True
    assert launcher_of(rundir) is not None
    release(rundir)
    assert is_alive(rundir) is False
    assert not rundir.launcher_file.exists()


def test_a_claim_lasts_as_long_as_its_with(rundir: RunDir) -> None:
    with claim(rundir):
        assert is_alive(rundir) is True
    with pytest.raises(KeyError), claim(rundir):
        raise KeyError
    assert not rundir.launcher_file.exists()


def test_a_run_that_another_live_process_launches_is_refused(rundir: RunDir) -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        start_time = liveness._start_time(other.pid)
        claimed_by(rundir, pid=other.pid, start_time=start_time)
        with pytest.raises(UsageError, match=f"process {other.pid} on .*colotrain stop [^ ]*one`"):
            claim(rundir)
        release(rundir)
        assert rundir.launcher_file.exists()  # it is not ours to remove
        other.kill()
        other.wait()
        claim(rundir)
        assert is_alive(rundir) is True


def test_the_run_of_a_dead_process_may_be_claimed(rundir: RunDir, dead_process: int) -> None:
    claimed_by(rundir, pid=dead_process)
    assert is_alive(rundir) is False
    claim(rundir)
    assert is_alive(rundir) is True


def test_a_process_id_that_was_given_out_again_is_not_the_launcher(rundir: RunDir) -> None:
    claimed_by(rundir, pid=os.getpid(), start_time="1")
    assert is_alive(rundir) is False


def test_a_zombie_is_not_alive(rundir: RunDir) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    start_time = liveness._start_time(process.pid)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    claimed_by(rundir, pid=process.pid, start_time=start_time)
    assert is_alive(rundir) is False
    process.wait()


@pytest.mark.parametrize("pid", [0, -1, 2**62, 1 << 22])
def test_process_ids_that_cannot_be_are_dead(rundir: RunDir, pid: int) -> None:
    claimed_by(rundir, pid=pid)
    assert is_alive(rundir) is False


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"pid": "x"}', "\x00", "[" * 100_000])
def test_an_identity_file_that_cannot_be_read_claims_nothing(rundir: RunDir, text: str) -> None:
    rundir.launcher_file.write_text(text)
    assert is_alive(rundir) is False
    with claim(rundir):
        assert is_alive(rundir) is True


@pytest.mark.parametrize("place", ["host", "boot_id", "pid_namespace"])
def test_a_launcher_elsewhere_is_judged_by_how_long_it_is_silent(
    rundir: RunDir, place: str
) -> None:
    launched(rundir, steps=1)
    claimed_by(rundir, **{place: "elsewhere"})
    assert is_alive(rundir) is None
    assert state(rundir, follow(rundir)) == "running"
    with pytest.raises(UsageError, match="silent for 120 s"):
        claim(rundir)
    age_files(rundir)
    assert state(rundir, follow(rundir)) == "dead"
    with claim(rundir):
        assert is_alive(rundir) is True


def try_to_claim(path: Path, barrier: Any, won: Any) -> None:
    barrier.wait()
    try:
        claim(RunDir(path))
        won.put(os.getpid())
        barrier.wait(timeout=30)  # stay alive until all have tried
    except UsageError:
        barrier.wait(timeout=30)


def test_of_launchers_that_start_at_once_exactly_one_wins(
    rundir: RunDir, dead_process: int
) -> None:
    claimed_by(rundir, pid=dead_process)
    context, count = multiprocessing.get_context("fork"), 8
    barrier, won = context.Barrier(count), context.Queue()
    arguments = (rundir.path, barrier, won)
    processes = [context.Process(target=try_to_claim, args=arguments) for _ in range(count)]
    for process in processes:
        process.start()
    winner = won.get(timeout=30)
    for process in processes:
        process.join(30)
    assert won.empty()
    holder = launcher_of(rundir)
    assert holder is not None
    assert holder.pid == winner


def test_a_command_that_is_advised_finds_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("runs/one", "two", "runs/a $(b)/it's", "-x/y z", "../other runs/;three"):
        folder = tmp_path / path
        folder.mkdir(parents=True)
        (folder / "plan.json").write_text("{}")
        (word,) = shlex.split(RunDir(path).argument)
        assert RunDir.find(word).path.resolve() == folder.resolve()
        assert not word.startswith("-")
    assert RunDir("runs/one").argument == "one"


# States


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC])
def test_why_a_run_failed_is_told_also_where_its_folder_cannot_be_written_any_more(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    def fail(*_: Any, **__: Any) -> tuple[int, str]:
        held = claim(rundir)
        monkeypatch.setattr(Path, "unlink", refuse)
        held.close()
        return 1, "the folder cannot be written"

    monkeypatch.setattr(start, "execute", fail)
    monkeypatch.setattr(RunDir, "write_summary", refuse)
    with pytest.raises(ColotrainError, match=r"^the folder cannot be written; "):
        start.train(plan_of(), rundir, None, as_json=False)


@pytest.mark.parametrize("status", ["finished", "failed", "preempted", "interrupted"])
def test_a_run_that_said_how_it_ended_is_that(rundir: RunDir, status: str) -> None:
    launched(rundir, steps=1, status=status)
    assert state(rundir, follow(rundir)) == status


def test_a_run_whose_launcher_lives_is_what_its_events_say(rundir: RunDir) -> None:
    with claim(rundir):
        assert state(rundir, follow(rundir)) == "starting"
        launched(rundir, steps=1)
        assert state(rundir, follow(rundir)) == "running"


def test_a_run_that_ended_without_a_word_is_dead(rundir: RunDir, dead_process: int) -> None:
    launched(rundir, steps=1)
    assert state(rundir, follow(rundir)) == "dead"
    claimed_by(rundir, pid=dead_process)
    assert state(rundir, follow(rundir)) == "dead"


def test_a_run_that_waits_in_a_queue_is_starting(rundir: RunDir) -> None:
    assert state(rundir, follow(rundir)) == "starting"


def test_a_run_that_ends_while_it_is_looked_at_is_not_dead(rundir: RunDir) -> None:
    before = follow(launched(rundir, steps=1))
    EventWriter(rundir.launcher_events).write_record("done", status="finished")
    assert state(rundir, before) == "finished"


# The list


def listed(root: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    assert list_runs(as_json=True, root=root) == 0
    rows = json.loads(capsys.readouterr().out)
    assert isinstance(rows, list)
    return rows


def test_runs_are_listed_newest_first(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, age in (("b", 20), ("a", 30), ("c", 10)):
        new_run(root, name, written_at=time.time() - age)
    assert [row["name"] for row in listed(root, capsys)] == ["c", "b", "a"]


def test_a_row_of_the_list(rundir: RunDir, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    launched(rundir, steps=4)
    with claim(rundir):
        (row,) = listed(root, capsys)
    assert row.pop("age_s") == pytest.approx(60, abs=20)
    cost = [row.pop(name) for name in ("restarts", "nodes_left", "lost_steps", "goodput")]
    assert cost == [0, 0, 0, 0.0]
    assert row == {
        "name": "one",
        "state": "running",
        "plugin": "zero2",
        "world_size": 2,
        "steps": 4,
        "max_steps": 10,
        "loss": 0.25,
        "validation_loss": None,
        "tokens_per_s": 300.0,
        "unit": "tokens",
        "settings": {},
        "run_dir": str(rundir.path),
        "problem": None,
        "job": None,
        "job_state": None,
        "job_reason": None,
    }


def test_a_run_that_has_ended_is_listed_from_its_summary(rundir: RunDir) -> None:
    launched(rundir, steps=4, status="finished")
    from_events = row_of(rundir)
    rundir.write_summary(summary(follow(rundir), rundir.plan(), rundir))
    rundir.event_file(rank=0, attempt=0).unlink()
    from_summary = row_of(rundir)
    assert (from_summary.steps, from_summary.loss) == (from_events.steps, from_events.loss)
    assert (from_summary.tokens_per_s, from_summary.state) == (300.0, "finished")


def test_a_run_without_a_step_has_no_speed(rundir: RunDir) -> None:
    launched(rundir, status="failed")
    assert row_of(rundir).tokens_per_s is None
    rundir.write_summary(summary(follow(rundir), rundir.plan(), rundir))
    assert row_of(rundir).tokens_per_s is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\x00",
        "{}",
        "[]",
        "null",
        "[" * 100_000,
        '{"steps": 1, "loss": 7}',
        '{"steps": 1e999, "loss": {"last": 1}, "tokens_per_s": 1}',
    ],
)
def test_a_summary_that_cannot_be_used_is_passed_over(rundir: RunDir, text: str) -> None:
    launched(rundir, steps=4, status="finished")
    rundir.summary_file.write_text(text)
    assert (row_of(rundir).steps, row_of(rundir).loss) == (4, 0.25)


def test_the_summary_of_an_earlier_launch_is_passed_over(rundir: RunDir) -> None:
    launched(rundir, steps=1, status="preempted")
    rundir.write_summary(summary(follow(rundir), rundir.plan(), rundir))
    os.utime(rundir.summary_file, (LONG_AGO, LONG_AGO))
    launched(rundir, steps=4, status="finished")
    assert row_of(rundir).steps == 4


def test_the_folder_of_a_sweep_is_no_run(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_sweep(RunDir(root / "sweep"), [])
    assert listed(root, capsys) == []


def test_files_of_attempts_that_are_not_read_have_no_number(rundir: RunDir) -> None:
    for number in ("0003", "9999999", "1" * 232):
        (rundir.events / f"rank00000-attempt{number}.jsonl").write_text("")
    assert rundir.next_attempt() == 4


def test_damaged_runs_are_listed_as_damaged(
    root: Path, rundir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in (("torn", '{"schema": 1, "na'), ("empty", ""), ("other", "[1]")):
        new_run(root, name).plan_file.write_text(text)
    new_run(root, "binary").plan_file.write_bytes(b"\xff\x00")
    new_run(root, "gone").plan_file.unlink()
    folder = new_run(root, "folder").plan_file
    folder.unlink()
    folder.mkdir()
    (root / "not-a-run").mkdir()
    (root / "a-file").write_text("")
    rows = {row["name"]: row for row in listed(root, capsys)}
    damaged = {"torn", "empty", "other", "binary", "gone", "folder"}
    assert {name for name, row in rows.items() if row["state"] == "damaged"} == damaged
    assert all(rows[name]["problem"] for name in damaged)
    assert rows.keys() == damaged | {"one"}
    assert list_runs(as_json=False, root=root) == 0
    printed = capsys.readouterr()
    assert printed.out.count("damaged") == len(damaged)
    assert printed.err.count("warning:") == len(damaged)


@pytest.mark.parametrize("seed", range(20))
def test_no_damage_to_a_plan_is_a_traceback(rundir: RunDir, seed: int) -> None:
    chance, text = random.Random(seed), rundir.plan_file.read_text()
    for _ in range(20):
        at = chance.randrange(len(text))
        junk = chance.choice(["", "null", "[", "]", "{", '"', "-1", "1e999", "\\", ",", "true"])
        rundir.plan_file.write_text(text[:at] + junk + text[at + chance.randrange(8) :])
        assert row_of(rundir).name == "one"


def test_a_run_with_garbage_among_its_events_is_listed(rundir: RunDir) -> None:
    write_files(rundir, restarted_run())
    for path in rundir.events.iterdir():
        path.write_bytes(b"\xff\n{}\n" + path.read_bytes() + b'{"t":')
    assert (row_of(rundir).steps, row_of(rundir).state) == (8, "finished")


def test_a_list_without_runs_says_so(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert list_runs(as_json=False, root=root) == 0
    printed = capsys.readouterr()
    assert (printed.out, printed.err.strip()) == ("", f"no runs under {root}")
    assert listed(root, capsys) == []


def test_the_table_off_a_terminal_has_a_line_per_run(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launched(new_run(root, "n" * 120, written_at=LONG_AGO), steps=4, status="finished")
    new_run(root, "[red]x\x1b[31m")
    list_runs(as_json=False, root=root)
    header, queued, finished = capsys.readouterr().out.splitlines()
    titles = ["NAME", "STATE", "PLUGIN", "WORLD", "STEP", "LOSS", "VAL", "SPEED", "AGE"]
    assert header.split() == titles
    assert queued.split()[:7] == ["[red]x", "[31m", "starting", "zero2", "2", "0/10", "-"]
    expected = ["n" * 120, "finished", "zero2", "2", "4/10", "0.2500", "-", "300"]
    assert finished.split()[:7] == expected[:7]


@pytest.mark.parametrize(("ci", "coloured"), [("", True), ("1", False)])
def test_the_table_has_colours_on_a_terminal_only(
    rundir: RunDir, root: Path, monkeypatch: pytest.MonkeyPatch, ci: str, coloured: bool
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("CI", ci)
    list_runs(as_json=False, root=root)
    assert ("\x1b[" in terminal.getvalue()) == coloured


def test_a_loss_that_is_not_a_number_is_listed(
    rundir: RunDir, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launched(rundir)
    with EventWriter(rundir.event_file(rank=0, attempt=0)) as writer:
        writer.write_record("step", step=1, loss=float("nan"))
    assert row_of(rundir).loss != row_of(rundir).loss
    assert listed(root, capsys)[0]["loss"] is None


# Stopping


def in_background(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


@pytest.fixture
def running(rundir: RunDir) -> Iterator[RunDir]:
    launched(rundir, steps=3)
    with claim(rundir):
        yield rundir


def wait_for_stop(rundir: RunDir) -> dict[str, Any]:
    while not rundir.stop_file.exists():
        time.sleep(0.01)
    found = json.loads(rundir.stop_file.read_text())
    assert isinstance(found, dict)
    return found


def end(rundir: RunDir, status: str, **fields: Any) -> None:
    EventWriter(rundir.launcher_events).write_record("done", status=status, **fields)


def test_stop_asks_the_ranks_and_waits_until_the_run_has_ended(
    running: RunDir, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {}

    def ranks() -> None:
        asked.update(wait_for_stop(running))
        with EventWriter(running.event_file(rank=0, attempt=0)) as writer:
            writer.write_record("checkpoint", step=3, path="/c/3", seconds=0.1)
        end(running, "preempted", exit_code=75, cause="")

    thread = in_background(ranks)
    assert stop("one", root=root, timeout_s=30) == 0
    thread.join()
    assert asked["reason"] == "colotrain stop"
    assert asked["t"] == pytest.approx(time.time(), abs=30)
    printed = capsys.readouterr()
    assert printed.out == (
        "one: preempted after step 3; saved at step 3; "
        f"`colotrain resume {running.argument}` continues\n"
    )
    assert "waiting for one to save and stop" in printed.err
    assert not running.stop_file.exists()


def test_a_run_that_does_not_stop_is_said_plainly(
    running: RunDir, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert stop("one", root=root, timeout_s=0.3) == 1
    message = capsys.readouterr().err
    assert "error: one: not stopped after 0.3s" in message
    assert f"process {os.getpid()} on " in message
    assert running.stop_file.exists()  # it may still heed it


@pytest.mark.parametrize("ends", [True, False])
def test_what_became_of_a_stop_is_a_document(
    running: RunDir, root: Path, capsys: pytest.CaptureFixture[str], ends: bool
) -> None:
    def ranks() -> None:
        wait_for_stop(running)
        if ends:
            end(running, "preempted", exit_code=75, cause="")

    thread = in_background(ranks)
    code = stop("one", as_json=True, root=root, timeout_s=30 if ends else 0.3)
    thread.join()
    state = "preempted" if ends else "running"
    about = {"run": "one", "state": state, "steps": 3, "saved_step": None, "job": None}
    assert json.loads(capsys.readouterr().out) == about
    assert code == (0 if ends else 1)


def test_a_run_that_fails_while_it_is_stopped_is_not_stopped(
    running: RunDir, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def ranks() -> None:
        wait_for_stop(running)
        end(running, "failed", exit_code=1, cause="disk full")

    thread = in_background(ranks)
    assert stop("one", root=root, timeout_s=30) == 1
    thread.join()
    assert "one: failed (disk full) after step 3; nothing was saved" in capsys.readouterr().out


def test_a_request_that_a_beginning_launch_removed_is_made_again(
    rundir: RunDir, root: Path
) -> None:
    def launch() -> None:
        wait_for_stop(rundir)
        rundir.stop_file.unlink()
        launched(rundir)
        wait_for_stop(rundir)
        end(rundir, "preempted")

    with claim(rundir):
        thread = in_background(launch)
        assert stop("one", root=root, timeout_s=30) == 0
        thread.join()


@pytest.mark.parametrize("status", ["finished", "failed", None])
def test_a_run_that_is_not_running_cannot_be_stopped(
    rundir: RunDir, root: Path, status: str | None
) -> None:
    launched(rundir, steps=1, **({"status": status} if status else {}))
    with pytest.raises(UsageError, match=f"not running \\({status or 'dead'}\\)"):
        stop("one", root=root)
    assert not rundir.stop_file.exists()


def test_a_run_that_was_never_launched_cannot_be_stopped(rundir: RunDir, root: Path) -> None:
    with pytest.raises(UsageError, match="not started yet"):
        stop(None, root=root)


@pytest.mark.parametrize("words", [["profile"], ["inspect-grads", "--live"]])
@pytest.mark.parametrize("is_lost", [False, True])
def test_no_step_is_waited_for_that_nobody_makes(
    rundir: RunDir, words: list[str], is_lost: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run was never launched, or has no record of its launch."""
    if is_lost:
        launched(rundir, steps=1).launcher_events.unlink()
    began = time.monotonic()
    assert guarded([*words, str(rundir.path)]) == 2
    assert time.monotonic() - began < 30
    assert ("(dead)" if is_lost else "(starting)") in capsys.readouterr().err


def test_a_run_that_is_unknown_cannot_be_stopped(rundir: RunDir, root: Path) -> None:
    with pytest.raises(UsageError, match=r"no run 'onne'.*did you mean one"):
        stop("onne", root=root)


@pytest.mark.parametrize(
    ("ending", "state", "code"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGINT), "interrupted", 130),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), "preempted", 75),
        (lambda: Path("missing.txt").read_text(), "failed", 2),
    ],
)
def test_a_run_that_ends_while_its_data_is_prepared_has_ended(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ending: Callable[[], object],
    state: str,
    code: int,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("colotrain.runs.start.prepare_data", lambda *_: ending())
    before = signal.getsignal(signal.SIGTERM)
    assert guarded(["run", *SMALL, "name=x"]) == code
    assert signal.getsignal(signal.SIGTERM) is before
    said = capsys.readouterr().err
    begins = "interrupted: nothing was saved: `colotrain resume x` begins"
    assert (state != "interrupted") or begins in said
    row = row_of(RunDir("runs/x"))
    assert (row.state, row.steps) == (state, 0)
    for verb in (["stop"], ["inspect-grads"]):
        assert guarded(verb) == 2
        said = capsys.readouterr().err
        assert f"({state})" in said
        assert "wait" not in said


def test_the_newest_run_is_the_newest_that_trained_starts_or_is_queued(root: Path) -> None:
    now = time.time()
    trained = launched(new_run(root, "trained", written_at=now - 40), steps=1, status="finished")
    queued = new_run(root, "queued", written_at=now - 30)
    failed = launched(new_run(root, "failed", written_at=now - 20), status="failed")
    new = new_run(root, "new", written_at=now - 10)
    assert liveness.find(None, root=root).name == trained.name
    queued.job_file.write_text("{}")
    assert liveness.find(None, root=root).name == queued.name
    begun = liveness.find(None, root=root, counts=lambda run: any(run.events.glob("rank*")))
    assert begun.name == failed.name
    with claim(new):
        assert liveness.find(None, root=root).name == new.name


def test_logs_show_what_a_detached_launcher_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rundir = launched(new_run(tmp_path / "runs", "away"), steps=1)
    folder = rundir.logs / "0"
    folder.mkdir(parents=True)
    (folder / "stdout.log").write_text("hello\n")
    with EventWriter(rundir.event_file(rank=0, attempt=rundir.next_attempt())) as worker:
        worker.write_record("started", world_size=1, step=1, log=str(folder / "stdout.log"))
    rundir.launcher_log.write_text("step=1 loss=1\nfailed: rank 0\n")
    assert guarded(["logs", "away"]) == 0
    launchers = ["launcher: step=1 loss=1", "launcher: failed: rank 0"]
    assert capsys.readouterr().out.splitlines() == ["rank 0 stdout: hello", *launchers]
    assert guarded(["logs", "away", "--rank", "0"]) == 0
    assert capsys.readouterr().out == "rank 0 stdout: hello\n"
    os.utime(rundir.launcher_log, (1, 1))  # the newest launch is another, on a terminal
    assert guarded(["logs", "away"]) == 0
    assert capsys.readouterr().out == "rank 0 stdout: hello\n"


def test_logs_of_a_detached_run_that_never_began_are_its_launchers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rundir = new_run(tmp_path / "runs", "refused")
    rundir.launcher_log.parent.mkdir(exist_ok=True)
    rundir.launcher_log.write_text("error: data.path: expected a file\n")
    assert guarded(["logs"]) == 0
    assert capsys.readouterr().out == "launcher: error: data.path: expected a file\n"


def test_samples_are_nowhere_called_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rundir = new_run(tmp_path / "runs", "seen")
    plan = plan_of()
    plan = dataclasses.replace(plan, data=dataclasses.replace(plan.data, source="target"))
    rundir.write_plan(plan)
    with EventWriter(rundir.launcher_events) as launcher_events:
        launcher_events.write_record("launch", world_size=2, t=time.time() - 60)
        with EventWriter(rundir.event_file(rank=0, attempt=0)) as worker:
            worker.write_record("started", world_size=2, step=0)
            for step in range(1, 4):
                count = plan.batch.global_batch
                counts = {"tokens": count, "tokens_per_s": 7.0, "peak": 9}
                worker.write_record("step", step=step, loss=1.0, **counts)
            worker.write_record("eval", step=3, loss=2.0, tokens=8)
        launcher_events.write_record("done", status="finished", exit_code=0)
    rundir.write_summary(summary(follow(rundir), plan, rundir))
    for words in (["runs"], ["dashboard", "--once"], ["dashboard", "--once", "--view", "ranks"]):
        assert guarded(words) == 0
        shown = capsys.readouterr().out
        assert "token" not in shown
        assert "samples/s" in shown or "ranks" in words
    assert guarded(["plan", "seen"]) == 0
    assert "token" not in capsys.readouterr().out
    assert json.loads(rundir.summary_file.read_text())["unit"] == "samples"
    (row,) = table([Element(sweep="s", run="seen", overrides=[], chosen={})])
    assert row["unit"] == "samples"
    drawn = [read_curves(rundir)]
    assert (_per(drawn), _rate(drawn)) == ("loss per sample", "samples per second")


def test_a_sweep_is_ranked_by_validation_loss_where_there_is_one(root: Path) -> None:
    """Training losses are 1/2 and 1/4: by them the second run would be the first."""
    for name, steps, validation_loss in (("one", 2, 0.3), ("two", 4, 0.9)):
        rundir = launched(new_run(root, name), steps=steps)
        with EventWriter(rundir.event_file(rank=0, attempt=rundir.next_attempt())) as worker:
            worker.write_record("eval", step=steps, loss=validation_loss, tokens=8)
    launched(new_run(root, "three"), steps=3)  # without an evaluation
    elements = [
        Element(sweep="s", run=name, overrides=[], chosen={}) for name in ("two", "three", "one")
    ]
    rows = [(row["run"], row["validation_loss"]) for row in table(elements, root=root)]
    assert rows == [("one", 0.3), ("three", None), ("two", 0.9)]


@pytest.mark.parametrize("option", ["--advise", "--trace", "--measure", "--svg x.svg"])
def test_a_plan_beside_a_run_or_a_comparison_refuses_what_it_would_ignore(
    rundir: RunDir,
    option: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(rundir.path.parents[1])
    launched(rundir, steps=4, status="finished")
    assert guarded(["plan", "one", *option.split()]) == 2
    told = capsys.readouterr().err
    assert f"{option.split()[0]}: cannot be had beside a run" in told
    assert guarded(["plan", "one", "--compare", "plugin=zero1", "plugin=zero2"]) == 2
    assert "--compare: cannot be had beside a run" in capsys.readouterr().err
    if option != "--measure":
        both = ["--compare", "plugin=zero1", "plugin=zero2", *option.split()]
        assert guarded(["plan", "recipe=llm-tiny", *both]) == 2
        assert "cannot be had beside --compare" in capsys.readouterr().err
