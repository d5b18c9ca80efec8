"""Files that others wrote, changed at random: an answer or one clear error, never a traceback."""

from __future__ import annotations

import copy
import json
import random
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from colotrain.config.compose import gather
from colotrain.data.read.loader import BatchLoader, SampleOrder, open_samples
from colotrain.engine.parts.part_map import PartMap
from colotrain.engine.state.index import describe, join, read_index
from colotrain.engine.state.manifest import (
    MANIFEST,
    SEAL,
    FileEntry,
    Manifest,
    checksum,
    damage,
    read_manifest,
    seal,
    write_manifest,
)
from colotrain.engine.state.shard_file import Layout, Piece, write_pieces
from colotrain.errors import ColotrainError
from colotrain.events.fold import Fold
from colotrain.events.heartbeats import HeartbeatWriter, read_heartbeats
from colotrain.events.log import EventReader
from colotrain.events.view import summary
from colotrain.rundir import RunDir
from colotrain.show.dashboard import render
from colotrain.show.frame import FrameState
from colotrain.spec.axes import DP_SHARD, Ranks
from colotrain.spec.phases import Phase
from colotrain.spec.plan import BatchPlan, DataPlan, RunPlan
from tests.checkpoints import read_whole
from tests.unit.data.test_tokens import plan_of
from tests.unit.events.test_view import plan_of as run_plan
from tests.unit.events.test_view import restarted_run, write_files
from tests.unit.generated import rich_run

JUNK = (
    *(b"", b"null", b"[", b"]", b"{", b'"', b"-1", b"1e999", b"\\", b",", b"true", b"\0", b"\xff"),
    *(b"9" * 30, b"[" * 2000, b'"' + b"x" * 5000, b"\n", b"NaN", b"../../etc/passwd"),
)
VALUES = (
    *(None, True, -1, 0, 1 << 70, 1.5, float("nan"), float("inf"), "", "x", "../x", "\0", [], {}),
    *([1, -2], {"a": 1}, ["x"], [[[]]], "float32", "load", 10**400, -0.0, "nan"),
)


def damaged(chance: random.Random, content: bytes) -> bytes:
    """One to four random changes."""
    out = bytearray(content)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(out) + 1)
        match chance.randrange(5):
            case 0 if at < len(out):
                out[at] ^= 1 << chance.randrange(8)
            case 1:
                out[at:at] = chance.choice(JUNK)
            case 2:
                out[at : at + chance.randrange(1, 30)] = chance.choice(JUNK)
            case 3:
                del out[at : at + chance.choice((1, 10, 1 << 30))]
            case _:
                other = chance.randrange(len(out) + 1)
                out[at:at] = out[other : other + 40]
    return bytes(out)


def altered(chance: random.Random, document: Any) -> Any:
    """A document of the same kind with one to three values replaced, removed or renamed."""
    document = json.loads(json.dumps(document))
    for _ in range(chance.randint(1, 3)):
        places = list(_places(document))
        holder, key = chance.choice(places)
        if isinstance(holder, dict) and key in holder and chance.random() < 0.2:
            holder[chance.choice(("", "x", "schema", "a.b"))] = holder.pop(key)
        elif (isinstance(holder, dict) and key in holder) or (
            isinstance(holder, list) and key < len(holder)
        ):
            holder[key] = copy.deepcopy(chance.choice(VALUES))
    return document


def _places(document: Any) -> Iterator[tuple[Any, Any]]:
    items = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in items:
        yield document, key
        if isinstance(value, dict | list):
            yield from _places(value)


def answers(read: Callable[..., Any], *arguments: Any) -> Any:
    """What `read` returns for `arguments`; None where it says, in one line each, what is wrong."""
    try:
        return read(*arguments)
    except ColotrainError as error:
        for line in error.lines():
            assert line.startswith("error: ")
            assert len(line.splitlines()) == 1, line
        return None


def test_a_damaged_plan(tmp_path: Path) -> None:
    for seed in range(300):
        folder = tmp_path / str(seed)
        folder.mkdir()
        chance, text = random.Random(seed), run_plan().to_json()
        path = folder / "plan.json"
        if seed % 2:
            path.write_bytes(damaged(chance, text.encode()))
        else:
            path.write_text(json.dumps(altered(chance, json.loads(text))))
        found = answers(RunDir(folder).plan)
        assert found is None or isinstance(found, RunPlan)


def test_damaged_events(tmp_path: Path) -> None:
    for seed in range(150):
        folder = tmp_path / str(seed)
        folder.mkdir()
        chance, rundir = random.Random(seed), RunDir(folder / "run")
        rundir.create()
        write_files(rundir, restarted_run())
        for path in rundir.events.iterdir():
            if seed % 2:
                path.write_bytes(damaged(chance, path.read_bytes()))
            else:
                lines = [json.loads(line) for line in path.read_text().splitlines()]
                path.write_text("".join(json.dumps(altered(chance, x)) + "\n" for x in lines))
        view = Fold(max_steps=8).add(EventReader(rundir).drain()).view()
        json.dumps(summary(view, run_plan(), rundir), allow_nan=False)


def test_events_with_values_nobody_writes_are_shown() -> None:
    for seed in range(60):
        chance = random.Random(seed)
        events = rich_run(num_steps=6)
        for event in chance.sample(events, 8):
            if event.fields:
                event.fields.update(altered(chance, dict.fromkeys(event.fields)))
        view = Fold(max_steps=8).add(events).view()
        render(
            FrameState(
                view=view, plan=run_plan(), now=view.last_event_at or 0.0, state=view.status
            ),
            width=100,
            height=30,
        )


def checkpoint(folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """One that two ranks wrote, step 3."""
    path = folder / "step-00000003"
    path.mkdir()
    state = {
        "model.weight": torch.arange(40.0).view(8, 5),
        "model.bias": torch.arange(3),
        "optim.step": torch.tensor(3.0),
    }
    parts, files = [], {}
    for rank in (0, 1):
        rows = state["model.weight"][4 * rank : 4 * rank + 4]
        part_of = PartMap(ranks=Ranks({DP_SHARD: 2}), rank=rank).part_of
        part = part_of("model.weight", (8, 5), "weight", is_sharded=True)
        pieces = [Piece(part=part, local=rows)]
        if rank == 0:
            whole = [(n, t) for n, t in state.items() if n != "model.weight"]
            parts_of_whole = [(part_of(n, t.shape, n, is_sharded=False), t) for n, t in whole]
            pieces += [Piece(part=part, local=t) for part, t in parts_of_whole]
        layout, name = Layout.of(pieces), f"__{rank}_0.distcp"
        written = write_pieces(path / name, pieces, layout)
        parts.append(describe(pieces, layout.starts, name))
        files[name] = FileEntry(bytes=layout.num_bytes, xxh128=written)
    index = path / "index.json"
    index.write_text(json.dumps(join(parts)))
    files["index.json"] = FileEntry(bytes=index.stat().st_size, xxh128=checksum(index))
    manifest = Manifest(
        step=3,
        optimizer_steps=3,
        micro_batches=6,
        loss_scale=None,
        clean_steps=0,
        world_size=2,
        plugin="zero2",
        global_batch=8,
        written_at=1e9,
        files=files,
    )
    write_manifest(path, manifest)
    return path, state


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path, state = checkpoint(tmp_path)
    assert damage(path) is None
    found = read_whole(path)
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_a_damaged_manifest_is_never_taken_for_another(tmp_path: Path) -> None:
    for seed in range(300):
        folder = tmp_path / str(seed)
        folder.mkdir()
        chance, (path, _) = random.Random(seed), checkpoint(folder)
        file, before = path / MANIFEST, read_manifest(path)
        file.write_bytes(damaged(chance, file.read_bytes()))
        found = answers(read_manifest, path)
        assert found in (None, before)
        assert (damage(path) is None) == (found is not None)


def test_a_checkpoint_is_not_damaged_where_no_file_can_be_opened(tmp_path: Path) -> None:
    path, _ = checkpoint(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            damage(path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_forged_manifest(tmp_path: Path) -> None:
    for seed in range(300):
        folder = tmp_path / str(seed)
        folder.mkdir()
        chance, (path, _) = random.Random(seed), checkpoint(folder)
        plain = json.loads((path / MANIFEST).read_text())
        del plain[SEAL]
        plain = altered(chance, plain)
        (path / MANIFEST).write_text(json.dumps({**plain, SEAL: seal(plain)}))
        found = answers(read_manifest, path)
        assert found is None or isinstance(found, Manifest)
        damage(path)


def test_a_forged_index(tmp_path: Path) -> None:
    for seed in range(300):
        folder = tmp_path / str(seed)
        folder.mkdir()
        chance, (path, state) = random.Random(seed), checkpoint(folder)
        index = path / "index.json"
        if seed % 2:
            index.write_bytes(damaged(chance, index.read_bytes()))
        else:
            index.write_text(json.dumps(altered(chance, json.loads(index.read_text()))))
        if answers(read_index, path) is not None:
            found = answers(read_whole, path)
            assert found is None or all(isinstance(t, torch.Tensor) for t in found.values())
        assert damage(path) is not None or answers(read_whole, path).keys() == state.keys()


def first_batch(plan: DataPlan, batch: BatchPlan, cache: Path) -> dict[str, torch.Tensor]:
    samples = open_samples(plan, "train", cache=cache)
    order = SampleOrder(len(samples), seed=0, shuffle=True)
    return BatchLoader(samples, order, batch, rank=0).micro_batch(0, 0)


def test_damaged_token_files(tmp_path: Path) -> None:
    for seed in range(100):
        folder = tmp_path / str(seed)
        folder.mkdir()
        chance = random.Random(seed)
        path = folder / chance.choice(("tokens.bin", "tokens.u32.bin"))
        path.write_bytes(damaged(chance, chance.randbytes(chance.choice((0, 1, 2, 64, 1000)))))
        plan = plan_of(path, validation_fraction=chance.choice((0.0, 0.25, 0.9)))
        batch = BatchPlan(global_batch=4, micro_batch=2, accumulation_steps=1, data_parallel=2)

        found = answers(first_batch, plan, batch, folder / "cache")
        assert found is None or found["input_ids"].shape == (2, 8)


RECIPE = Path(__file__).parents[2] / "recipes" / "llm-tiny.yaml"


def test_damaged_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(100):
        folder = tmp_path / str(seed)
        folder.mkdir()
        chance = random.Random(seed)
        monkeypatch.chdir(folder)
        (folder / "recipes").mkdir()
        (folder / "recipes" / "mine.yaml").write_bytes(damaged(chance, RECIPE.read_bytes()))
        found = answers(gather, ["recipe=mine"])
        assert found is None or isinstance(found[0], dict)


def test_damaged_signs_of_life(tmp_path: Path) -> None:
    for seed in range(50):
        folder = tmp_path / str(seed)
        folder.mkdir()
        chance, path = random.Random(seed), folder / "rank00000.json"
        HeartbeatWriter(path, rank=0, patience_s=6.0).beat(7, Phase.COMPUTE)
        path.write_bytes(damaged(chance, path.read_bytes()))
        assert len(read_heartbeats(folder)) <= 1


def test_names_cannot_leave_their_folder(tmp_path: Path) -> None:
    from colotrain.rundir import run_name

    chance = random.Random(0)
    for _ in range(500):
        text = "".join(chance.choice("ab./\\ \0\n~$`;&|*\"'é-") for _ in range(12))
        name = run_name(text)
        assert (tmp_path / name).resolve().parent == tmp_path.resolve()
        assert name
        assert not set(name) & set("/\\\0\n $`;&|*\"'")
    rundir = RunDir(tmp_path / "private")
    rundir.create()
    for folder in (rundir.path, rundir.events, rundir.checkpoints, rundir.logs):
        assert folder.stat().st_mode & 0o777 == 0o700
