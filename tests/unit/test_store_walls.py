"""Only a run's own files go to its store, to an address that this user named, and no other goes."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
from test_stores import at_once, made, runs_dir, save, send, sender, steps, warnings  # noqa: F401

from colotrain.cli.main import guarded
from colotrain.engine.state.manifest import (
    MANIFEST,
    FileEntry,
    checksum,
    read_manifest,
    write_manifest,
)
from colotrain.rundir import RunDir
from colotrain.runs.store import Store
from colotrain.runs.sync_state import SyncState, small_files

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
