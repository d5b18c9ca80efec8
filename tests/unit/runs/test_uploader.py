"""A run is copied to a store so that no checkpoint there is damaged, and is read from there."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import os
import subprocess
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from colotrain.cli.main import guarded
from colotrain.config.stores import check_address
from colotrain.engine.state.manifest import (
    MANIFEST,
    FileEntry,
    Manifest,
    checksum,
    checksum_of,
    complete,
    damage,
    prune,
    publish,
    write_manifest,
)
from colotrain.errors import ColotrainError, UsageError
from colotrain.events.liveness import claim, find, launcher_of
from colotrain.events.log import read
from colotrain.rundir import RunDir
from colotrain.runs import fetching, store, uploader, uploader_process
from colotrain.runs.fetching import fetch_if_address, fetch_to_resume, outlines
from colotrain.runs.store import Store, StoreError
from colotrain.runs.sync_state import SyncState, committed
from colotrain.runs.uploader import Uploader, next_checkpoint
from tests.unit.events.test_view import plan_of

SECRET = "s3cret-of-the-store"


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(store, "PAUSE_S", 0.0)
    monkeypatch.setattr(uploader, "PAUSES_S", (0.0,))
    monkeypatch.setattr(uploader, "POLL_S", 0.01)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def runs_dir(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store"


def made(place: str, runs_dir: str | None, name: str = "one") -> RunDir:
    """A run as it is while it trains, in a folder of runs."""
    rundir = RunDir(Path(place) / name)
    rundir.create()
    plan = dataclasses.replace(plan_of(), name=name, runs_dir=runs_dir)
    rundir.write_plan(plan)
    rundir.launcher_events.write_text('{"t":1.0,"kind":"launch","world_size":2}\n')
    rundir.event_file(rank=0, attempt=0).write_text('{"t":2.0,"kind":"step","step":1}\n')
    return rundir


def save(rundir: RunDir, step: int, *, best: int | None = None, filling: str = "") -> Path:
    """Publish a checkpoint of two files, as the ranks do."""
    folder = rundir.checkpoints / f".step-{step}.new" / f"step-{step:08d}"
    folder.mkdir(parents=True)
    for name in ("a.distcp", "b.distcp"):
        (folder / name).write_text(f"{name} of step {step} {filling}" * 100)
    files = {
        path.name: FileEntry(bytes=path.stat().st_size, xxh128=checksum(path))
        for path in folder.iterdir()
    }
    how: dict[str, Any] = {"loss_scale": None, "clean_steps": 0, "world_size": 2, "files": files}
    done = {"step": step, "optimizer_steps": step, "micro_batches": step, "global_batch": 8}
    manifest = Manifest(written_at=1e9, plugin="zero2", best_step=best, **how, **done)
    write_manifest(folder, manifest)
    publish(folder, rundir.checkpoint(step))
    folder.parent.rmdir()
    return rundir.checkpoint(step)


def sender(rundir: RunDir, runs_dir: str, keep: int = 2) -> Uploader:
    return Uploader(rundir, Store(f"{runs_dir}/{rundir.name}", attempts=2), keep=keep)


def send(rundir: RunDir, runs_dir: str, keep: int = 2) -> Uploader:
    """Send all of a run, as its end does."""
    upload = sender(rundir, runs_dir, keep)
    upload.ending.set()
    upload.work()
    return upload


def steps(runs_dir: str, name: str = "one") -> list[int]:
    names = committed(Store(f"{runs_dir}/{name}").objects())
    return [int(name.removeprefix("step-")) for name in names]


def warnings(rundir: RunDir) -> list[str]:
    file = rundir.upload_events
    return [event.fields["text"] for event in read(file)] if file.exists() else []


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_a_run_goes_on_from_the_store_where_nothing_else_of_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    runs_dir = f"{scheme}://{tmp_path}/store"
    first = made("here", runs_dir)
    folder = save(first, 4)
    send(first, runs_dir)
    monkeypatch.chdir(tmp_path.joinpath("elsewhere").mkdir() or tmp_path / "elsewhere")
    second = RunDir("runs/one")
    fetch_to_resume(second, runs_dir)
    assert damage(second.checkpoint(4)) is None
    for file in (*folder.iterdir(), first.launcher_events, first.plan_file):
        assert (second.path / file.relative_to(first.path)).read_bytes() == file.read_bytes()
    assert next_checkpoint(second, SyncState(second, f"{runs_dir}/one"), set()) is None
    with claim(second):
        save(second, 8)
        send(second, runs_dir)
    assert steps(runs_dir) == [8, 4]


def test_only_the_manifest_makes_a_checkpoint_and_what_was_sent_is_not_sent_again(
    runs_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rundir, sent, write = made("runs", runs_dir), list[str](), Store.write
    save(rundir, 4)

    def fails_at_b(self: Store, name: str, content: bytes) -> store.Stored:
        sent.append(name)
        if name.endswith("b.distcp"):
            raise StoreError("no more")
        return write(self, name, content)

    monkeypatch.setattr(Store, "write", fails_at_b)
    with pytest.raises(StoreError):
        sender(rundir, runs_dir).send_checkpoints()
    assert steps(runs_dir) == []
    assert "checkpoints/step-00000004/a.distcp" in sent
    sent.clear()
    monkeypatch.setattr(
        Store,
        "write",
        lambda *args: sent.append(args[1]) or write(*args),  # type: ignore[func-returns-value]
    )
    send(rundir, runs_dir)
    inside = [name for name in sent if name.startswith("checkpoints")]
    assert inside == [f"checkpoints/step-00000004/{name}" for name in ("b.distcp", MANIFEST)]
    assert steps(runs_dir) == [4]
    sent.clear()
    send(rundir, runs_dir)
    assert sent == []


def test_a_file_that_is_damaged_here_is_not_sent_and_that_is_told(runs_dir: str) -> None:
    rundir = made("runs", runs_dir)
    save(rundir, 4)
    send(rundir, runs_dir)
    bad = save(rundir, 8) / "a.distcp"
    bad.write_bytes(bad.read_bytes()[:-1] + b"?")
    send(rundir, runs_dir)
    assert steps(runs_dir) == [4]
    assert any("step-00000008 is not sent: " in text for text in warnings(rundir))


@pytest.mark.parametrize("keep", [1, 2])
def test_the_store_keeps_the_checkpoints_that_the_run_keeps(runs_dir: str, keep: int) -> None:
    rundir = made("runs", runs_dir)
    for step in (2, 4, 6, 8, 10):
        prune(rundir.checkpoints, keep=keep, newest=save(rundir, step, best=4), best=4)
        send(rundir, runs_dir, keep)
        here = [int(path.name.removeprefix("step-")) for path in complete(rundir.checkpoints)]
        assert steps(runs_dir) == here
    left = {name.split("/")[1] for name in Store(f"{runs_dir}/one").objects("checkpoints")}
    assert left == {path.name for path in complete(rundir.checkpoints)}
    folders = Path(f"{runs_dir}/one/checkpoints".removeprefix("file://"))
    assert left == {path.name for path in folders.iterdir()}  # no empty ones


def test_a_checkpoint_that_the_run_deletes_meanwhile_is_sent_to_its_end(
    runs_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rundir = made("runs", runs_dir)
    save(rundir, 4)
    lock = threading.Lock()

    def delete_first(source: BinaryIO) -> str:
        with lock:
            if rundir.checkpoint(4).exists():
                prune(rundir.checkpoints, keep=1, newest=save(rundir, 6))
        return checksum_of(source)

    monkeypatch.setattr(uploader, "checksum_of", delete_first)
    upload = sender(rundir, runs_dir)
    upload._send_checkpoint(rundir.checkpoint(4))
    assert not rundir.checkpoint(4).exists()
    assert steps(runs_dir) == [4]
    assert "events/rank00000-attempt0000.jsonl" in upload.store.objects()  # before the manifest
    upload.send_checkpoints()
    assert steps(runs_dir) == [6, 4]
    assert not rundir.sending.exists()


def test_checkpoints_that_a_run_has_set_aside_are_deleted_before_it_saves_again(
    runs_dir: str,
) -> None:
    rundir = made("runs", runs_dir)
    for step in (4, 8):
        save(rundir, step)
        send(rundir, runs_dir)
    rundir.checkpoint(8).rename(rundir.checkpoints / "superseded-8")
    sender(rundir, runs_dir).send_checkpoints()
    assert steps(runs_dir) == [4]


def test_another_state_of_a_step_replaces_the_one_there_and_later_steps_are_deleted(
    runs_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rundir, changes = made("runs", runs_dir), list[tuple[str, str]]()
    for step in (4, 8):
        save(rundir, step)
        send(rundir, runs_dir)
    for path in complete(rundir.checkpoints):  # the run went back to its beginning
        path.rename(path.with_name(f"superseded-{path.name}"))
    again = save(rundir, 4, filling="other values")
    write, delete = Store.write, Store.delete
    monkeypatch.setattr(
        Store,
        "write",
        lambda s, n, c: changes.append(("write", n)) or write(s, n, c),  # type: ignore[func-returns-value]
    )
    monkeypatch.setattr(
        Store,
        "delete",
        lambda s, names: changes.extend(("delete", n) for n in names) or delete(s, names),  # type: ignore[func-returns-value]
    )
    send(rundir, runs_dir)
    assert steps(runs_dir) == [4]
    inside = [(what, name.rpartition("/")[2]) for what, name in changes if "step-00000004" in name]
    assert inside[0] == ("delete", MANIFEST)
    assert inside[-1] == ("write", MANIFEST)
    content = Store(f"{runs_dir}/one").read("checkpoints/step-00000004/a.distcp")
    assert content == (again / "a.distcp").read_bytes()


def test_a_failing_store_is_tried_again_and_its_error_holds_no_secret(
    runs_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rundir, failures = made("runs", runs_dir), 5
    save(rundir, 4)
    upload = sender(rundir, runs_dir)
    pipe = upload.store._files.pipe_file

    def unreliable(path: str, content: bytes) -> None:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise ConnectionError(f"refused {SECRET}")
        pipe(path, content)

    monkeypatch.setattr(upload.store._files, "pipe_file", unreliable)
    upload.ending.set()
    upload.work()
    assert steps(runs_dir) == [4]
    assert any("ConnectionError; it is tried again" in text for text in warnings(rundir))
    assert all(
        SECRET not in f.read_text() for f in rundir.path.rglob("*") if f.is_file() and f.suffix
    )


def test_a_damaged_checkpoint_in_the_store_is_passed_over(
    runs_dir: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rundir = made("here", runs_dir)
    for step in (4, 8):
        save(rundir, step)
        send(rundir, runs_dir)
    bad = tmp_path / "store/one/checkpoints/step-00000008/b.distcp"
    bad.write_bytes(bad.read_bytes()[:-1] + b"?")
    fetch_to_resume(RunDir("runs/one"), runs_dir)
    assert [path.name for path in complete(RunDir("runs/one").checkpoints)] == ["step-00000004"]
    assert "warning: step-00000008 is passed over: " in capsys.readouterr().err


def test_checkpoints_in_a_store_are_listed(
    runs_dir: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rundir, (address, there) = made("here", runs_dir), (f"{runs_dir}/one", tmp_path / "store/one")
    for step in (4, 8, 12):
        save(rundir, step, best=8)
        send(rundir, runs_dir, 3)

    def listed(*words: str, code: int) -> list[tuple[str, str, bool]]:
        assert guarded(["checkpoints", address, "--json", *words]) == code
        rows = json.loads(capsys.readouterr().out)
        assert all(row["path"] == f"{address}/checkpoints/{row['name']}" for row in rows)
        return [(row["name"], row["state"], row["best"]) for row in rows]

    names = [f"step-{step:08d}" for step in (12, 8, 4)]
    assert listed(code=0) == [(name, "complete", name == names[1]) for name in names]
    assert {state for _, state, _ in listed("--verify", code=0)} == {"intact"}
    changed = there / "checkpoints" / names[0] / "b.distcp"
    changed.write_bytes(changed.read_bytes()[:-1] + b"?")
    assert listed(code=0)[0][1] == "complete"
    assert listed("--verify", code=1)[0][1] == "damaged"
    (there / "checkpoints" / names[2] / "a.distcp").unlink()
    assert [state for _, state, _ in listed(code=1)] == ["complete", "complete", "damaged"]
    assert not (tmp_path / "runs").exists()  # nothing is kept here
    assert guarded(["checkpoints", f"{runs_dir}/two"]) == 2
    assert "no run 'two'" in capsys.readouterr().err


def test_a_bucket_that_is_not_there_is_no_empty_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "WITH_FOLDERS", ())
    with pytest.raises(UsageError, match="the bucket nowhere is not there"):
        Store("memory://nowhere/runs").folders()
    Store("memory://somewhere").write("other/file", b"")
    assert Store("memory://somewhere/runs").folders() == []


def test_events_here_that_the_store_does_not_have_yet_are_kept(runs_dir: str) -> None:
    rundir = made("runs", runs_dir)
    send(rundir, runs_dir)
    events = rundir.event_file(rank=0, attempt=0)
    with events.open("a") as file:
        file.write('{"t":3.0,"kind":"step","step":2}\n')
    longer = events.read_text()
    rundir.store_file.unlink()  # killed before it was written
    fetch_to_resume(rundir, runs_dir)
    assert events.read_text() == longer
    send(rundir, runs_dir)
    near_by = made("elsewhere", runs_dir)
    near_by.event_file(rank=0, attempt=0).write_text('{"t":9.0,"kind":"step","step":7}\n')
    fetch_to_resume(near_by, runs_dir)  # another course of the run, which the store does not have
    assert near_by.event_file(rank=0, attempt=0).read_text() == longer


def test_a_run_that_another_launcher_took_over_sends_nothing_more(runs_dir: str) -> None:
    rundir = made("runs", runs_dir)
    with claim(rundir):
        upload = sender(rundir, runs_dir)
        upload.send_small()
        other = made("elsewhere", runs_dir)
        with claim(other):
            text = other.launcher_file.read_text().replace('"pid": ', '"pid": 9')
            Store(f"{runs_dir}/one").write("launcher.json", text.encode())
        save(rundir, 4)
        upload.ending.set()
        upload.work()
    assert steps(runs_dir) == []
    assert any("another launcher has " in text for text in warnings(rundir))


def test_a_lost_answer_is_not_taken_for_another_launcher(runs_dir: str) -> None:
    rundir = made("runs", runs_dir)
    with claim(rundir):
        upload = sender(rundir, runs_dir)
        upload.send_small()
        time.sleep(0.01)
        with rundir.launcher_file.open("rb") as source:
            again = upload.store.send(source, "launcher.json")
        assert not upload.synced.is_current("launcher.json", again)
        upload.check_owner()


def test_a_launcher_elsewhere_is_seen_until_it_has_ended(runs_dir: str) -> None:
    rundir = made("here", runs_dir)
    with claim(rundir):
        sender(rundir, runs_dir).send_small()
        known = RunDir("runs/one")
        fetch_to_resume(known, runs_dir)
        assert launcher_of(known) == launcher_of(rundir)
        seen_at = known.launcher_file.stat().st_mtime
        os.utime(known.launcher_file, (1.0, 1.0))
        fetch_to_resume(known, runs_dir)  # the same launcher is still there
        assert known.launcher_file.stat().st_mtime == seen_at
    send(rundir, runs_dir)
    fetch_to_resume(known, runs_dir)
    assert launcher_of(known) is None


def test_a_folder_from_which_a_run_is_sent_is_left_as_it_is(
    runs_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "REFRESH_S", 0.01)
    rundir = made("runs", runs_dir)
    send(rundir, runs_dir)
    rundir.store_lock.touch()
    rundir.summary_file.write_text("{}")
    Store(f"{runs_dir}/one").write("summary.json", b'{"of": "another"}')
    with rundir.store_lock.open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        fetch_to_resume(rundir, runs_dir)
        assert fetch_if_address(f"{runs_dir}/one") == "one"
        with fetching.followed(f"{runs_dir}/one"):
            time.sleep(0.2)
    assert rundir.summary_file.read_text() == "{}"
    fetch_to_resume(rundir, runs_dir)
    assert rundir.summary_file.read_text() == '{"of": "another"}'


def test_a_checkpoint_that_takes_long_is_told_while_a_newer_one_waits(
    runs_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploader, "LATE_S", 0.0)
    rundir = made("runs", runs_dir)
    save(rundir, 4)
    upload = sender(rundir, runs_dir)
    go_on, began = threading.Event(), threading.Event()
    monkeypatch.setattr(uploader, "checksum_of", lambda _: began.set() or go_on.wait(5))
    thread = threading.Thread(target=upload.send_checkpoints)
    thread.start()
    assert began.wait(5)
    upload.tell_if_late()
    assert warnings(rundir) == []
    save(rundir, 6)
    upload.tell_if_late()
    upload.tell_if_late()
    go_on.set()
    thread.join(5)
    late = [text for text in warnings(rundir) if "step-00000006 waits" in text]
    assert len(late) == 1


def test_the_end_of_a_run_waits_for_the_store_only_so_long(
    runs_dir: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rundir = made("runs", runs_dir)
    save(rundir, 4)
    plan = rundir.plan()
    plan = dataclasses.replace(plan, elastic=dataclasses.replace(plan.elastic, grace_s=0.5))
    monkeypatch.setattr(uploader_process, "MODULE", "this")  # ends at once, and sends nothing
    began = time.monotonic()
    with uploader_process.UploaderProcess(plan, rundir) as sending:
        pass
    left = sending.close()
    assert time.monotonic() - began < 10
    assert "step-00000004" in left
    assert "plan.json" in left
    with pytest.raises(ColotrainError, match="one has finished, but is not all in file://"):
        uploader_process.report_unsent(left, plan, rundir, finished=True)
    uploader_process.report_unsent(left, plan, rundir, finished=False)
    assert "`colotrain resume one` sends the rest" in capsys.readouterr().err


def test_a_killed_uploader_is_told_and_begins_again_once_there_is_a_process_for_it(
    runs_dir: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rundir, start, failures = made("runs", runs_dir), subprocess.Popen, [0]
    (tmp_path / "idle.py").write_text("import sys\nsys.stdin.read()\n")
    monkeypatch.setattr(uploader_process, "MODULE", "idle")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(uploader_process, "RESTART_S", 0.01)

    def scarce(*args: Any, **kwargs: Any) -> Any:
        failures[0] += 1
        if failures[0] == 2:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))  # RLIMIT_NPROC
        return start(*args, **kwargs)

    monkeypatch.setattr(subprocess, "Popen", scarce)
    with uploader_process.UploaderProcess(rundir.plan(), rundir) as sending:
        first = sending._process
        assert first is not None
        first.kill()
        deadline = time.monotonic() + 60
        while sending._process is first and time.monotonic() < deadline:
            time.sleep(0.01)
        assert sending._process is not first
        assert failures[0] == 3
    sending.close()
    (told,) = warnings(rundir)
    assert told.startswith(f"warning: what sends the run to {runs_dir}/one was killed by SIGKILL;")


def test_a_read_only_store_is_refused_at_once_by_name(
    runs_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = list[str]()

    def refuse(path: str, content: bytes) -> None:
        tries.append(path)
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    there = Store(f"{runs_dir}/one")
    monkeypatch.setattr(there._files, "pipe_file", refuse)
    with pytest.raises(UsageError, match=r"\(Read-only file system\); make the folder writable"):
        there.check_writable()
    assert len(tries) == 1


def test_another_process_sends_the_run_and_its_end_finds_all_there(runs_dir: str) -> None:
    rundir = made("runs", runs_dir)
    save(rundir, 4)
    with claim(rundir), uploader_process.UploaderProcess(rundir.plan(), rundir) as sending:
        pass
    assert sending.close() == ""
    assert steps(runs_dir) == [4]
    assert Store(f"{runs_dir}/one").about("launcher.json") is None


def test_a_run_of_the_same_name_that_is_not_that_of_the_store_is_left_alone(runs_dir: str) -> None:
    send(made("here", runs_dir), runs_dir)
    other = made("runs", None)
    before = other.plan_file.read_text()
    for read_it in (
        lambda: fetch_to_resume(other, runs_dir),
        lambda: fetch_if_address(f"{runs_dir}/one"),
    ):
        with pytest.raises(UsageError, match="is another run than the one in"):
            read_it()
    assert other.plan_file.read_text() == before
    with pytest.raises(UsageError, match="--overwrite"):
        fetch_to_resume(RunDir("runs/one"), runs_dir, overwrite=True)


def test_an_address_is_read_as_a_run(runs_dir: str, capsys: pytest.CaptureFixture[str]) -> None:
    rundir = made("here", runs_dir)
    save(rundir, 4)
    send(rundir, runs_dir)
    found = find(fetch_if_address(f"{runs_dir}/one", checkpoint=True, step=4))
    assert found.checkpoint(4).is_dir()
    with pytest.raises(UsageError, match="no checkpoint of step 5; there are 4"):
        fetch_if_address(f"{runs_dir}/one", checkpoint=True, step=5)
    with pytest.raises(UsageError, match="there are: one"):
        fetch_if_address(f"{runs_dir}/two")
    with outlines(runs_dir) as folder:
        assert {path.name for path in folder.iterdir()} == {"one"}
    assert guarded(["runs", runs_dir, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["run_dir"] == f"{runs_dir}/one"
    assert guarded(["runs", runs_dir, "--sweep", "x"]) == 2


def test_what_is_new_is_fetched_while_a_run_is_followed(
    runs_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "REFRESH_S", 0.01)
    rundir = made("here", runs_dir)
    send(rundir, runs_dir)
    with fetching.followed(f"{runs_dir}/one") as name:
        events = find(name).event_file(rank=0, attempt=0)
        own = rundir.event_file(rank=0, attempt=0)
        with own.open("a") as file:
            file.write('{"t":3.0,"kind":"step","step":2}\n')
        send(rundir, runs_dir)
        deadline = time.monotonic() + 10
        while events.read_text() != own.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_names_in_a_store_lead_nowhere_else(runs_dir: str) -> None:
    for name in ("events/../../../x.jsonl", "../plan.json", "events/a/b.jsonl", "control/stop"):
        assert not fetching._is_wanted(name, fetching.ALL)
    assert fetching._is_wanted("events/launcher.jsonl", fetching.ALL)


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("/scratch/runs", "runs_dir=/scratch/runs: expected an address such as s3://bucket/path"),
        ("s3:bucket", "runs_dir=s3:bucket: expected an address"),
        (f"s3://key:{SECRET}@bucket/x", "credentials are read from the environment"),
        (f"az://bucket/x?sig={SECRET}", "credentials are read from the environment"),
        ("simplecache::s3://bucket/x", "runs_dir=simplecache::s3://bucket/x: expected"),
    ],
)
def test_an_address_without_a_store_or_with_a_secret_is_refused(
    address: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (problem,) = check_address(address)
    assert shown in str(problem)
    assert guarded(["plan", "recipe=llm-tiny", f"runs_dir='{address}'"]) == 2
    said = capsys.readouterr().err
    assert "runs_dir" in said
    assert SECRET not in said


def test_a_driver_that_is_not_installed_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(*_: object, **__: object) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr("fsspec.core.url_to_fs", missing)
    assert guarded(["runs", "s3://bucket/path"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "error: s3://bucket/path: the driver for s3 is not installed; "
        "pip install 'colotrain[store]'"
    ]
