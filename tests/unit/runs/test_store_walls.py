"""Only a run's own files go to its store, to an address that this user named, and no other goes."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from pathlib import Path

import pytest

from colotrain.cli.main import guarded
from colotrain.engine.state.manifest import (
    MANIFEST,
    FileEntry,
    checksum,
    read_manifest,
    write_manifest,
)
from colotrain.errors import ColotrainError
from colotrain.rundir import RunDir
from colotrain.runs.fetching import (
    fetch_if_address,
    fetch_to_resume,
    is_sent_from_here,
    outlines,
)
from colotrain.runs.store import Store, StoreError
from colotrain.runs.sync_state import SyncState, small_files
from colotrain.runs.uploader import Uploader
from colotrain.runs.uploader_process import address_of
from tests.unit.runs.test_uploader import (  # noqa: F401
    at_once,
    made,
    runs_dir,
    save,
    send,
    sender,
    steps,
    warnings,
)

SECRET = "the user's own secret\n"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    file = tmp_path / "home" / "id_ed25519"
    file.parent.mkdir()
    file.write_text(SECRET)
    return file


def sent(runs_dir: str) -> dict[str, bytes]:  # noqa: F811
    store = Store(f"{runs_dir}/one")
    return {name: store.read(name) for name in store.objects()}


@pytest.mark.parametrize(
    "place",
    ["logs/a.log", "events/rank00001-attempt0000.jsonl", "samples.jsonl", "plan-1.json"],
)
def test_nothing_is_sent_through_a_link_or_from_a_fifo(
    runs_dir: str,  # noqa: F811
    secret: Path,
    place: str,
) -> None:
    for trap in (lambda path: path.symlink_to(secret), os.mkfifo):
        rundir = made("runs", runs_dir)
        path = rundir.path / place
        trap(path)
        send(rundir, runs_dir)
        assert place not in sent(runs_dir)
        path.unlink()
    assert SECRET.encode() not in b"".join(sent(runs_dir).values())


def test_nothing_is_sent_from_a_linked_folder(runs_dir: str, secret: Path) -> None:  # noqa: F811
    rundir = made("runs", runs_dir)
    (secret.parent / "a.log").write_text(SECRET)
    rundir.logs.rmdir()
    rundir.logs.symlink_to(secret.parent)
    assert not [name for name in small_files(rundir) if name.startswith("logs")]
    rundir.path.joinpath("logs2").mkdir()
    send(rundir, runs_dir)
    assert SECRET.encode() not in b"".join(sent(runs_dir).values())


@pytest.mark.parametrize("how", ["link", "path"])
def test_a_checkpoint_names_its_own_files_alone(
    runs_dir: str,  # noqa: F811
    secret: Path,
    how: str,
) -> None:
    rundir = made("runs", runs_dir)
    folder = save(rundir, 4)
    manifest = read_manifest(folder)
    if how == "link":
        (folder / "a.distcp").unlink()
        (folder / "a.distcp").symlink_to(secret)
        name = "a.distcp"
    else:
        name = os.path.relpath(secret, rundir.sending / folder.name)
    files = {**manifest.files, name: FileEntry(bytes=len(SECRET), xxh128=checksum(secret))}
    write_manifest(folder, dataclasses.replace(manifest, files=files))  # as one who knows it may
    upload = sender(rundir, runs_dir)
    upload.send_checkpoints()
    assert steps(runs_dir) == []
    assert SECRET.encode() not in b"".join(sent(runs_dir).values())
    assert "is not sent" in warnings(rundir)[0]


def test_a_checkpoint_larger_than_the_disk_or_than_its_manifest_says_is_not_fetched(
    runs_dir: str,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rundir = made("here", runs_dir)
    for step in (4, 8):
        save(rundir, step)
        send(rundir, runs_dir)
    fetched, fetch = list[str](), Store.fetch
    noted = lambda self, name, to: fetched.append(name) or fetch(self, name, to)  # noqa: E731
    monkeypatch.setattr(Store, "fetch", noted)
    file = tmp_path / "store/one/checkpoints/step-00000008/b.distcp"
    os.truncate(file, 1 << 43)
    with pytest.raises(ColotrainError, match=r"runs/one: 8,796,.* bytes are needed and"):
        fetch_to_resume(RunDir("runs/one"), runs_dir)
    assert not fetched
    os.truncate(file, 1 << 20)
    fetch_to_resume(RunDir("runs/one"), runs_dir)
    told = capsys.readouterr().err
    assert "step-00000008/b.distcp: is not there with its" in told
    assert {name.split("/")[1] for name in fetched} == {"step-00000004"}


def test_a_plan_of_somebody_else_names_no_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = f"file://{tmp_path}/elsewhere"
    made("runs", elsewhere)
    assert guarded(["resume", "one"]) == 2
    assert f"runs_dir={elsewhere}" in capsys.readouterr().err
    assert guarded(["resume", "one", "train.max_steps=3"]) == 2
    assert not (tmp_path / "elsewhere").exists()


def test_what_was_not_sent_from_here_is_not_deleted(runs_dir: str, tmp_path: Path) -> None:  # noqa: F811
    first = made("first", runs_dir)
    for step in (2, 4):
        save(first, step)
        send(first, runs_dir)
    store = Store(f"{runs_dir}/one")
    store.write(".check", b"mine")
    store.write("checkpoints/notes.txt", b"mine")
    before = {n: c for n, c in sent(runs_dir).items() if n.startswith(("checkpoints", ".check"))}

    second = made("second", runs_dir)  # the same name, with a record that it made up
    forged = SyncState(second, store.address)
    for name, stored in store.objects().items():
        forged.set(name, stored, "1")
    plain = json.loads(second.store_file.read_text())
    second.store_file.write_text(json.dumps(plain | {"signature": "0" * 64, "error": "x"}))
    for step in (6, 8):
        save(second, step)
        send(second, runs_dir, keep=1)
    store.check_writable()
    after = sent(runs_dir)
    assert {n: after.get(n) for n in before} == before
    assert steps(runs_dir)[0] == 8


def test_another_state_of_a_step_that_was_not_sent_from_here_stays(runs_dir: str) -> None:  # noqa: F811
    first, second = made("first", runs_dir), made("second", runs_dir)
    save(first, 4)
    send(first, runs_dir)
    before = Store(f"{runs_dir}/one").read(f"checkpoints/step-00000004/{MANIFEST}")
    save(second, 4, filling="other values")
    sender(second, runs_dir).send_checkpoints()
    assert "was not sent from here" in warnings(second)[0]
    assert Store(f"{runs_dir}/one").read(f"checkpoints/step-00000004/{MANIFEST}") == before


def test_a_file_is_sent_as_it_was_opened(runs_dir: str, secret: Path) -> None:  # noqa: F811
    """A link that takes the place of a long file while it is sent is not followed."""
    rundir = RunDir("runs/one")
    rundir.create()
    log = rundir.logs / "long.log"
    log.write_bytes(b"own " * (5 << 20))
    store = Store(f"{runs_dir}/one")
    with os.fdopen(rundir.open(log, os.O_RDONLY), "rb") as source:
        log.unlink()
        log.symlink_to(secret)
        store.send(source, "logs/long.log")
    assert store.read("logs/long.log")[:8] == b"own own "


@pytest.mark.parametrize("place", ["summary.json", "events/launcher.jsonl", "plan.json"])
def test_a_link_in_a_local_store_is_replaced_and_not_written_through(
    runs_dir: str,  # noqa: F811
    tmp_path: Path,
    secret: Path,
    place: str,
) -> None:
    rundir = made("runs", runs_dir)
    rundir.summary_file.write_text("{}")
    there = tmp_path / "store/one" / place
    there.parent.mkdir(parents=True)
    there.symlink_to(secret)
    send(rundir, runs_dir)
    assert secret.read_text() == SECRET
    assert not there.is_symlink()
    assert there.read_bytes() == (rundir.path / place).read_bytes()


@pytest.mark.parametrize("place", ["store/one", "store/one/events", "store/one/checkpoints"])
def test_a_linked_folder_in_a_local_store_is_not_written_into(
    runs_dir: str,  # noqa: F811
    tmp_path: Path,
    secret: Path,
    place: str,
) -> None:
    rundir = made("runs", runs_dir)
    save(rundir, 4)
    (tmp_path / place).parent.mkdir(parents=True)
    (tmp_path / place).symlink_to(secret.parent)
    upload = Uploader(rundir, Store(runs_dir, "one", attempts=1))
    with pytest.raises(StoreError, match="links, FIFOs and devices in a store"):
        upload.send_checkpoints()
    assert [path.name for path in secret.parent.iterdir()] == [secret.name]


@pytest.mark.parametrize("trap", ["link", "link to a device", "FIFO", "linked folder"])
def test_what_is_no_file_of_a_local_store_is_not_fetched(
    runs_dir: str,  # noqa: F811
    tmp_path: Path,
    secret: Path,
    trap: str,
) -> None:
    send(made("here", runs_dir), runs_dir)
    there = tmp_path / "store/one/events/rank00000-attempt0000.jsonl"
    there.unlink()
    if trap == "linked folder":
        (secret.parent / "launcher.jsonl").write_text(SECRET)
        (there.parent / "launcher.jsonl").unlink()
        there.parent.rmdir()
        there.parent.symlink_to(secret.parent)
    elif trap == "FIFO":
        os.mkfifo(there)
    else:
        there.symlink_to(secret if trap == "link" else "/dev/zero")
    fetch_to_resume(rundir := RunDir("runs/one"), runs_dir)
    assert not rundir.event_file(rank=0, attempt=0).exists()
    assert not any(SECRET in path.read_text() for path in rundir.events.iterdir())
    with outlines(runs_dir) as folder:
        assert (folder / "one/plan.json").is_file()


def test_a_file_that_becomes_a_link_after_it_was_listed_is_not_read(
    runs_dir: str,  # noqa: F811
    tmp_path: Path,
    secret: Path,
) -> None:
    send(made("here", runs_dir), runs_dir)
    store = Store(runs_dir, "one", attempts=1)
    there = tmp_path / "store/one/plan.json"
    there.unlink()
    there.symlink_to(secret)
    for act in (
        lambda: store.read("plan.json"),
        lambda: store.fetch("plan.json", tmp_path / "fetched"),
    ):
        with pytest.raises(StoreError, match="links, FIFOs and devices in a store"):
            act()
    assert store.about("plan.json") is None


def test_the_folder_of_a_local_store_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "store").symlink_to("disk")
    send(made("here", f"file://{tmp_path}/store"), f"file://{tmp_path}/store")
    assert (tmp_path / "disk/one/plan.json").is_file()


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_others_may_read_a_local_store_as_the_umask_permits(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        Store(f"file://{tmp_path}/store", "one").write("events/launcher.jsonl", b"")
    finally:
        os.umask(before)
    file = tmp_path / "store/one/events/launcher.jsonl"
    assert file.stat().st_mode & 0o777 == 0o666 & ~umask
    assert file.parent.stat().st_mode & 0o777 == 0o777 & ~umask


def test_a_torn_upload_is_deleted_with_its_checkpoint(runs_dir: str, tmp_path: Path) -> None:  # noqa: F811
    rundir = made("runs", runs_dir)
    save(rundir, 4)
    upload = sender(rundir, runs_dir)
    upload.synced.begin(["checkpoints/step-00000004/a.distcp"])
    torn = tmp_path / "store/one/checkpoints/step-00000004" / f".a.distcp-{'0' * 16}"
    torn.parent.mkdir(parents=True)
    torn.write_bytes(b"a half")
    assert upload.store.objects() == {}
    for step in (6, 8):
        save(rundir, step)
        send(rundir, runs_dir)
    assert steps(runs_dir) == [8, 6]
    assert not torn.parent.exists()


@pytest.mark.parametrize("num_bytes", [10, 20 << 20])
def test_what_a_killed_sender_left_goes_once_the_file_is_sent(
    runs_dir: str,  # noqa: F811
    tmp_path: Path,
    num_bytes: int,
) -> None:
    store, folder = Store(runs_dir, "one"), tmp_path / "store/one/logs"
    folder.mkdir(parents=True)
    (folder / f".a.log-{'0' * 16}").write_bytes(b"a half")
    (folder / f".b.log-{'0' * 16}").write_bytes(b"another file's")
    source = tmp_path / "a.log"
    source.write_bytes(b"x" * num_bytes)
    with source.open("rb") as content:
        store.send(content, "logs/a.log")
    assert {path.name for path in folder.iterdir()} == {"a.log", f".b.log-{'0' * 16}"}


def test_a_foreign_plan_does_not_name_the_run_that_is_written_over(
    runs_dir: str,  # noqa: F811
    tmp_path: Path,
) -> None:
    send(made("own", runs_dir, "prod"), runs_dir)
    send(made("theirs", runs_dir, "ev"), runs_dir)
    plan = tmp_path / "store/ev/plan.json"
    plan.write_text(plan.read_text().replace('"name": "ev"', '"name": "prod"'))
    before = (tmp_path / "store/prod/plan.json").read_bytes()
    fetched = RunDir(f"runs/{fetch_if_address(f'{runs_dir}/ev')}")
    assert fetched.plan().name == "prod"
    fetch_to_resume(fetched, runs_dir)
    save(fetched, 4)
    send(fetched, runs_dir)
    assert (tmp_path / "store/prod/plan.json").read_bytes() == before
    assert not (tmp_path / "store/prod/checkpoints/step-00000004").exists()
    assert (tmp_path / "store/ev/checkpoints/step-00000004").is_dir()
    assert address_of(fetched.plan(), fetched) == f"{runs_dir}/ev"


def test_a_renamed_run_is_sent_under_its_new_name(runs_dir: str, tmp_path: Path) -> None:  # noqa: F811
    former = made("own", runs_dir, "former")
    send(former, runs_dir)
    before = (tmp_path / "store/former/plan.json").stat()
    renamed = RunDir(former.path.rename(former.path.with_name("renamed")))
    fetch_to_resume(renamed, runs_dir)
    send(renamed, runs_dir)
    assert (tmp_path / "store/renamed/plan.json").is_file()
    assert (tmp_path / "store/former/plan.json").stat() == before


def test_nothing_is_sent_over_a_plan_that_was_neither_sent_nor_fetched(runs_dir: str) -> None:  # noqa: F811
    send(made("first", runs_dir), runs_dir)
    other = made("second", runs_dir)
    other.write_plan(dataclasses.replace(other.plan(), recipe="another"))
    save(other, 4)
    before = sent(runs_dir)
    send(other, runs_dir)
    assert sent(runs_dir) == before
    (told,) = warnings(other)
    assert told.endswith(
        "one/plan.json: was neither sent nor fetched from here; nothing is sent to it"
    )


def test_a_file_that_is_read_whole_has_a_bound_and_other_runs_are_listed(
    runs_dir: str,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("one", "two"):
        send(made("here", runs_dir, name), runs_dir)
    os.truncate(tmp_path / "store/two/plan.json", 1 << 31)
    with outlines(runs_dir) as folder:
        assert (folder / "one/plan.json").is_file()
        assert not (folder / "two/plan.json").exists()
    assert "two/plan.json: has 2048 MiB: expected at most 64 MiB" in capsys.readouterr().err
    with pytest.raises(StoreError, match="has 2048 MiB"):
        fetch_if_address(f"{runs_dir}/two")
    with pytest.raises(StoreError, match="File too large"):
        Store(runs_dir, "two").read("plan.json")
    os.truncate(tmp_path / "store/one/events/launcher.jsonl", 30 << 30)
    with pytest.raises(StoreError, match="has 30720 MiB: expected at most 4096 MiB"):
        fetch_if_address(f"{runs_dir}/one")


def test_events_are_fetched_in_parts(runs_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    rundir = made("here", runs_dir)
    events = rundir.event_file(rank=0, attempt=0)
    events.write_text('{"t":2.0,"kind":"step","step":1}\n' * 100)
    send(rundir, runs_dir)
    lengths, read = list[int](), Store.read

    def noted(self: Store, name: str, **part: int) -> bytes:
        content = read(self, name, **part)
        lengths.extend([len(content)] * name.endswith(".jsonl"))
        return content

    monkeypatch.setattr(Store, "read", noted)
    monkeypatch.setattr("colotrain.runs.store.PART_BYTES", 1000)
    fetch_to_resume(here := RunDir("runs/one"), runs_dir)
    copy = here.event_file(rank=0, attempt=0)
    assert copy.read_bytes() == events.read_bytes()
    with events.open("a") as file:
        file.write('{"t":3.0,"kind":"step","step":2}\n' * 100)
    send(rundir, runs_dir)
    fetch_to_resume(here, runs_dir)
    assert copy.read_bytes() == events.read_bytes()
    assert max(lengths) == 1000
    assert sum(lengths) < 1.5 * events.stat().st_size  # only what is new was fetched again


def test_a_fifo_for_the_lock_of_a_run_does_not_block(runs_dir: str) -> None:  # noqa: F811
    rundir = made("runs", runs_dir)
    os.mkfifo(rundir.store_lock)
    answers = list[bool]()
    thread = threading.Thread(target=lambda: answers.append(is_sent_from_here(rundir)), daemon=True)
    thread.start()
    thread.join(10)
    assert answers == [False]
