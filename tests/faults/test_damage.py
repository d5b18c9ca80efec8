"""Every kind of damage to a checkpoint is found and named before anything is loaded from it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from colotrain.engine.state.choosing import choose
from colotrain.engine.state.manifest import prune, tidy
from colotrain.errors import ColotrainError
from colotrain.events.log import EventReader, EventWriter
from colotrain.rundir import RunDir
from colotrain.runs.checkpoints import list_checkpoints
from tests.running import SMALL, Colotrain

pytestmark = [
    pytest.mark.timeout(1800),  # seconds, of a busy machine
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Colotrain:
    """A run with checkpoints of the steps 1, 2 and 3, written by two ranks."""
    colotrain = Colotrain(tmp_path_factory.mktemp("saved"))
    settings = ("train.max_steps=3", "checkpoint.minutes=1e-6", "checkpoint.keep=3", "name=saved")
    colotrain.run(*SMALL, "plugin=zero2", *settings)
    return colotrain


@pytest.fixture
def rundir(saved: Colotrain, tmp_path: Path) -> RunDir:
    shutil.copytree(saved.cwd / "runs", tmp_path / "runs")
    return RunDir(tmp_path / "runs" / "saved")


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def flip_first(file: Path) -> None:
    flip(file, 0)


def flip_middle(file: Path) -> None:
    flip(file, file.stat().st_size // 2)


def flip_last(file: Path) -> None:
    flip(file, file.stat().st_size - 1)


def flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 4
    file.write_bytes(content)


def delete(file: Path) -> None:
    file.unlink()


def lengthen(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")


def take_from_before(file: Path) -> None:
    """The file of the same name from the checkpoint before."""
    shutil.copy(file.parent.with_name("step-00000002") / file.name, file)


FILES = ("__0_0.distcp", "__1_0.distcp", "index.json", "manifest.json")
DAMAGES = (
    truncate,
    empty,
    flip_first,
    flip_middle,
    flip_last,
    delete,
    lengthen,
    take_from_before,
)


CASES = [(damage, file) for damage in DAMAGES for file in FILES]
CASES.remove((take_from_before, "index.json"))  # which has the same bytes in each of them


def falls_back(rundir: RunDir, tmp_path: Path) -> str:
    """What is said of the checkpoint of step 3, after that of step 2 was chosen instead."""
    events = EventWriter(rundir.event_file(rank=0, attempt=9))
    chosen = choose(rundir.checkpoints, events)
    assert chosen is not None
    assert chosen.name == "step-00000002"
    notes = [e.fields["text"] for e in EventReader(rundir).drain() if e.kind == "note"]
    return notes[-1] if notes else ""


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("damage", "file"), CASES)
def test_damage_to_a_file_is_found_and_named(
    rundir: RunDir,
    tmp_path: Path,
    damage: Callable[[Path], None],
    file: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    damage(rundir.checkpoint(3) / file)
    said = falls_back(rundir, tmp_path)
    is_listed = (damage, file) != (delete, "manifest.json")  # then it was never complete
    assert (file in said) == is_listed
    assert list_checkpoints("saved", as_json=True, verify=True, root=rundir.path.parent) == 1
    rows = json.loads(capsys.readouterr().out)
    assert [row["state"] for row in rows] == ["damaged", "intact", "intact"]
    assert file in rows[0]["problem"]


def swap(folder: Path, first: str, second: str) -> None:
    content = (folder / first).read_bytes()
    (folder / first).write_bytes((folder / second).read_bytes())
    (folder / second).write_bytes(content)


@pytest.mark.usefixtures("alone")
def test_two_swapped_shards_are_found(rundir: RunDir, tmp_path: Path) -> None:
    swap(rundir.checkpoint(3), "__0_0.distcp", "__1_0.distcp")
    assert "__0_0.distcp" in falls_back(rundir, tmp_path)


@pytest.mark.usefixtures("alone")
def test_a_file_too_many_is_found(rundir: RunDir, tmp_path: Path) -> None:
    folder = rundir.checkpoint(3)
    shutil.copy(folder / "__1_0.distcp", folder / "__2_0.distcp")
    assert "__2_0.distcp: not part of it" in falls_back(rundir, tmp_path)


@pytest.mark.usefixtures("alone")
def test_an_older_checkpoint_under_a_newer_name_is_found(rundir: RunDir, tmp_path: Path) -> None:
    shutil.rmtree(rundir.checkpoint(3))
    shutil.copytree(rundir.checkpoint(1), rundir.checkpoint(3))
    assert "is that of step 1" in falls_back(rundir, tmp_path)


@pytest.mark.usefixtures("alone")
def test_where_none_is_intact_the_damage_is_named(rundir: RunDir) -> None:
    for step in (1, 2, 3):
        truncate(rundir.checkpoint(step) / "index.json")
    with pytest.raises(ColotrainError, match=r"none of 3 checkpoints is intact .*index\.json"):
        choose(rundir.checkpoints, EventWriter(rundir.event_file(rank=0, attempt=9)))


def test_a_quick_look_finds_what_sizes_tell(
    rundir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    flip_middle(rundir.checkpoint(3) / "__0_0.distcp")
    truncate(rundir.checkpoint(2) / "__0_0.distcp")
    list_checkpoints("saved", as_json=True, verify=False, root=rundir.path.parent)
    rows = json.loads(capsys.readouterr().out)
    assert [row["state"] for row in rows] == ["complete", "damaged", "complete"]
    assert [row["step"] for row in rows] == [3, 2, 1]
    assert {row["plugin"] for row in rows} == {"zero2"}
    assert {row["world_size"] for row in rows} == {2}
    list_checkpoints("saved", as_json=False, verify=False, root=rundir.path.parent)
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_a_snapshot_takes_the_memory_that_was_planned(saved: Colotrain) -> None:
    memory = saved.rundir("saved").plan().memory
    planned = memory.parameters + memory.optimizer
    taken = [e.fields["bytes"] for e in saved.events("saved") if e.kind == "checkpoint_started"]
    assert len(taken) == 3
    generators = 16 << 10
    assert planned <= max(taken) <= planned + generators


def test_the_newest_one_is_always_kept(rundir: RunDir) -> None:
    prune(rundir.checkpoints, keep=0, newest=rundir.checkpoint(2))
    assert [path.name for path in rundir.checkpoints.iterdir()] == ["step-00000002"]


def test_a_replacement_that_was_cut_off_is_undone(rundir: RunDir) -> None:
    rundir.checkpoint(3).rename(rundir.checkpoints / ".step-00000003.old")
    (rundir.checkpoints / ".step-00000003.0-7.tmp").mkdir()
    (rundir.checkpoints / ".step-00000001.gone").mkdir()
    tidy(rundir.checkpoints)
    left = sorted(path.name for path in rundir.checkpoints.iterdir())
    assert left == ["step-00000001", "step-00000002", "step-00000003"]
