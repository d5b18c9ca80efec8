"""A run writes regular files of its own folder alone, which nobody else can read."""

from __future__ import annotations

import ast
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from colotrain.cli.main import guarded
from colotrain.errors import UsageError
from colotrain.events.heartbeats import HeartbeatWriter
from colotrain.events.kinds import Note
from colotrain.events.log import EventWriter
from colotrain.rundir import RunDir, make_folder, open_inside, write_atomically
from colotrain.runs.resolving import resolve_config
from colotrain.spec.phases import Phase
from tests.unit.test_layers import MODULES

APPEND = os.O_WRONLY | os.O_APPEND | os.O_CREAT
Trap = Callable[[Path, Path], None]


def link(path: Path, target: Path) -> None:
    path.symlink_to(target)


def dangling(path: Path, target: Path) -> None:
    path.symlink_to(target.with_name("made"))


def fifo(path: Path, target: Path) -> None:
    os.mkfifo(path)


def device(path: Path, target: Path) -> None:
    path.symlink_to("/dev/null")


TRAPS = (link, dangling, fifo, device)


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    rundir = RunDir(tmp_path / "runs" / "mine")
    rundir.create()
    return rundir


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    file = tmp_path / "precious"
    file.write_text("mine\n")
    return file


def is_untouched(precious: Path) -> bool:
    names = {path.name for path in precious.parent.iterdir()}
    return precious.read_text() == "mine\n" and "made" not in names


@pytest.mark.parametrize("trap", TRAPS)
def test_no_writer_follows_what_stands_in_its_files_place(
    rundir: RunDir, precious: Path, trap: Trap, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (rundir.launcher_events, rundir.launcher_log, rundir.heartbeat_file(0)):
        path.parent.mkdir(exist_ok=True)
        trap(path, precious)
        with pytest.raises(OSError, match=path.name):
            rundir.open(path, APPEND)
    writer = EventWriter(rundir.launcher_events, inside=rundir.path)
    writer.write(Note(text="evil"))
    assert "events cannot be written" in capsys.readouterr().err
    HeartbeatWriter(rundir.heartbeat_file(0), inside=rundir.path).beat(1, Phase.COMPUTE)
    rundir.write(rundir.stop_file, "")
    trap(rundir.cancel_file, precious)
    rundir.write(rundir.cancel_file, "evil")  # which replaces what stood there
    assert rundir.cancel_file.read_text() == "evil"
    assert stat.S_ISREG(rundir.cancel_file.lstat().st_mode)
    assert is_untouched(precious)


def test_no_writer_goes_through_a_linked_folder(
    rundir: RunDir, precious: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    for folder in (rundir.events, rundir.stop_file.parent, rundir.logs):
        folder.rmdir()
        folder.symlink_to(outside)
    EventWriter(rundir.launcher_events, inside=rundir.path).write(Note(text="evil"))
    HeartbeatWriter(rundir.heartbeat_file(0), inside=rundir.path).beat(1, Phase.COMPUTE)
    for write in (
        lambda: rundir.write(rundir.stop_file, ""),
        lambda: rundir.append(rundir.launcher_log),
        lambda: rundir.make_folder(rundir.heartbeats),
        lambda: make_folder(rundir.logs / "x", inside=rundir.path),
        lambda: rundir.open(rundir.path / "x" / ".." / ".." / "precious", APPEND),
        lambda: rundir.write(precious, "evil"),
    ):
        with pytest.raises((OSError, ValueError)):
            write()
    assert not list(outside.iterdir())
    assert is_untouched(precious)


@pytest.mark.parametrize("trap", TRAPS)
@pytest.mark.parametrize(
    "place", ["plan-1.json", "events/launcher.jsonl", "logs/a/b.log", "checkpoints/step-2.tmp"]
)
def test_a_folder_with_links_is_not_launched(
    rundir: RunDir, precious: Path, trap: Trap, place: str
) -> None:
    path = rundir.path / place
    path.parent.mkdir(parents=True, exist_ok=True)
    trap(path, precious)
    with pytest.raises(UsageError, match=f"{path.name}: expected a file or a folder"):
        rundir.create()


def test_a_run_is_not_resumed_through_links(
    tmp_path: Path, precious: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rundir = RunDir("runs/mine")
    rundir.create()
    resolved = resolve_config(["recipe=llm-tiny", "name=mine", "cluster.procs_per_node=1"])
    rundir.write_plan(resolved.plan)
    rundir.launcher_events.symlink_to(precious)
    assert guarded(["resume", "mine", "--trust-code"]) == 2
    assert is_untouched(precious)


def test_the_folder_itself_may_be_reached_through_links(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to("disk")
    (tmp_path / "disk" / "big").mkdir()
    (tmp_path / "runs" / "mine").symlink_to(tmp_path / "disk" / "big")
    rundir = RunDir(tmp_path / "runs" / "mine")
    rundir.create()
    rundir.write(rundir.stop_file, "x")
    with EventWriter(rundir.launcher_events, inside=rundir.path) as events:
        events.write(Note(text="kept"))
    assert events.dropped == 0
    assert (tmp_path / "disk" / "big" / "control" / "stop").read_text() == "x"


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o377, 0o777])
def test_what_is_made_is_the_users_alone_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        rundir = RunDir(tmp_path / "mine")
        rundir.create()
        rundir.write(rundir.stop_file, "x")
        rundir.append(rundir.launcher_log).close()
        EventWriter(rundir.launcher_events, inside=rundir.path).write(Note(text="x"))
        HeartbeatWriter(rundir.heartbeat_file(0), inside=rundir.path).beat(1, Phase.DATA)
        write_atomically(tmp_path / "other", "x")
    finally:
        os.umask(before)
    for path in (rundir.path, *tmp_path.rglob("*")):
        wanted = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path


def test_an_error_names_the_file(rundir: RunDir, precious: Path) -> None:
    rundir.launcher_events.symlink_to(precious)
    with pytest.raises(OSError, match=r"events/launcher\.jsonl"):
        open_inside(rundir.path, rundir.launcher_events, APPEND)


WRITES = ("write_text", "write_bytes", "touch", "mkdir", "mkstemp", "write_atomically")
ROOMS = ("engine", "events", "launch", "runs", "show", "schedulers", "signatures", "audit")
ELSEWHERE = {
    "signatures": "the key, in the user's home",
    "audit.start.sitecustomize": "what went wrong before the package can be imported",
    "engine.model.probes": "/proc",
    "engine.state.manifest": "the temporary folder of a checkpoint, made by make_folder",
    "engine.state.saving": "the same",
    "engine.offload.disk": "files without a name",
    "events.heartbeats": "without a run's folder",
    "launch.server.forkserver name_process": "/proc",
    "runs.fetching": "temporary folders",
    "runs.store LocalFiles": "a store's folder, and what is fetched into temporary folders",
    "runs.submit copy_tracked_files": "a copy of the working tree, which git writes",
    "runs.trust": "files that were there before, under their names",
}
"""Module, and function in it → what it writes that is no file of a run, or is where no link is."""


def writes(module: str) -> dict[str, list[str]]:
    """Return the calls in a module that make files or folders by their path, by function."""
    calls: dict[str, list[str]] = {}
    for statement in ast.parse(MODULES[f"colotrain.{module}"].read_text("utf-8")).body:
        place = f"{module} {getattr(statement, 'name', '')}".strip()
        for node in ast.walk(statement):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", "") or getattr(node.func, "id", "")
                words = [a.value for a in node.args if isinstance(a, ast.Constant)]
                opens = name == "open" and any(
                    word in ("w", "a", "x", "wb", "ab") for word in words
                )
                if (name in WRITES or opens) and "inside" not in [k.arg for k in node.keywords]:
                    calls.setdefault(place, []).append(f"{name} in line {node.lineno}")
    return calls


def test_files_of_a_run_are_written_by_its_functions_alone() -> None:
    """`RunDir.write`, `append`, `open` and `make_folder` follow no links."""
    modules = [name.removeprefix("colotrain.") for name in MODULES]
    calls = {}
    for module in modules:
        if module.partition(".")[0] in ROOMS:
            calls |= writes(module)
    assert {p: c for p, c in calls.items() if not {p, p.split()[0]} & ELSEWHERE.keys()} == {}
    assert {place for p in calls for place in (p, p.split()[0])} >= ELSEWHERE.keys()
