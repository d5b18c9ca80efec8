"""Copies of a rank's state in memory: whole or not read, and used only where every rank has one."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from colotrain.addresses import LOOPBACK, listen
from colotrain.engine.state import memory_file
from colotrain.engine.state.index import FileSource, index_of
from colotrain.engine.state.memory_copy import MemoryCopies
from colotrain.engine.state.memory_file import MemoryFile
from colotrain.engine.state.shard_file import Piece
from colotrain.launch.copy_keeper import CopyKeeper
from colotrain.records import to_plain
from colotrain.spec.elastic import COPY_PLACES, CopyPlaces, MemoryCopyPlan
from tests.copies import SECRET, Launcher, Ranks, opened, piece_of, take
from tests.following import free_port


@pytest.fixture
def path() -> Iterator[str]:
    handle = os.memfd_create("test")
    yield f"/proc/{os.getpid()}/fd/{handle}"
    os.close(handle)


def state() -> dict[str, Tensor]:
    """Of many sizes: some are written together, some in several parts, one has no bytes."""
    sizes = (0, 1, 7, 300, 1 << 18, (1 << 18) - 3, 5, 3 << 17, 64)
    found = {f"t{n}": torch.randn(size, dtype=torch.float32) for n, size in enumerate(sizes)}
    halves = torch.randn(9, 5).bfloat16()
    counts = torch.tensor(7, dtype=torch.int64)
    return found | {"half": halves, "count": counts, "columns": torch.randn(6, 8)[:, ::2]}


def pieces(tensors: dict[str, Tensor]) -> list[Piece]:
    return [piece_of(name, tensor) for name, tensor in tensors.items()]


def test_what_is_read_is_what_was_written(path: str) -> None:
    file, other = MemoryFile(path), MemoryFile(path)
    for _ in range(2):  # the second one replaces the first
        expected = state()
        file.write(pieces(expected), {"number": 1})
        about = other.read()
        assert about is not None
        assert about["number"] == 1
        assert other.is_intact()
        index = index_of(about["tensors"], lambda _: FileSource(other.path))
        assert index.keys() == expected.keys()
        wide = torch.zeros(6, 8)
        found = {n: torch.full_like(t, 1) for n, t in expected.items()} | {"columns": wide[:, ::2]}
        for name, tensor in found.items():
            index[name].read_into(tensor, [0] * tensor.ndim)
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_a_copy_that_was_not_finished_is_not_read(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, write_all = MemoryFile(path), memory_file._write_all
    file.write(pieces(state()), {"number": 1})
    for most in range(6):
        written = 0

        def until(handle: int, data: memoryview, at: int, most: int = most) -> None:
            nonlocal written
            written += 1
            if written > most:
                raise KeyboardInterrupt
            write_all(handle, data, at)

        monkeypatch.setattr(memory_file, "_write_all", until)
        with pytest.raises(KeyboardInterrupt):
            file.write(pieces(state()), {"number": 2})
        assert file.read() is None
        assert not file.is_intact()


def test_a_changed_byte_is_found(path: str) -> None:
    file = MemoryFile(path)
    file.write(pieces({"t": torch.zeros(1000)}), {})
    os.pwrite(file.handle, b"\1", 5000)
    assert [*(file.read() or {})] == ["tensors"]
    assert not file.is_intact()


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(monkeypatch)


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    made = Launcher(2)
    yield made
    made.end()


def begin(ranks: Ranks, launcher: Launcher, *steps: Sequence[int]) -> list[int]:
    """Begin an attempt of two ranks, each of which copies after its `steps`; where they began."""

    def one(rank: int) -> int:
        copies = opened([launcher], rank)
        found = copies.choose()
        begun = found.step if found is not None else 0
        copies.begin(found, begun)
        dist.all_reduce(torch.zeros(1))
        for step in steps[rank] if steps else ():
            take(copies, step)
        return begun

    return ranks.run(2, one)


def test_the_newest_copy_that_all_ranks_have_is_taken(ranks: Ranks, launcher: Launcher) -> None:
    assert begin(ranks, launcher, (1, 2, 3), (1, 2, 3)) == [0, 0]
    assert begin(ranks, launcher, (4, 5), (4,)) == [3, 3]
    assert begin(ranks, launcher, (5,), ()) == [4, 4]  # one died within its fifth
    # the new fifth has not replaced the copy that it went on from
    assert begin(ranks, launcher) == [4, 4]


@pytest.mark.parametrize("other", [(), (1,)], ids=["none", "older"])
def test_a_rank_without_the_copy_sends_all_to_the_checkpoint(
    ranks: Ranks, launcher: Launcher, other: Sequence[int]
) -> None:
    begin(ranks, launcher, (1, 2, 3), other)
    assert begin(ranks, launcher) == [0, 0]


def test_copies_of_two_steps_are_not_taken_for_one(ranks: Ranks, launcher: Launcher) -> None:
    begin(ranks, launcher, (11, 12, 13), (1, 2, 3))
    assert begin(ranks, launcher) == [0, 0]


def test_void_copies_do_not_count(ranks: Ranks, launcher: Launcher) -> None:
    begin(ranks, launcher, (1,), (1,))

    def void(rank: int) -> bool:
        copies = opened([launcher], rank)
        copies.clear()
        return copies.is_due(1)

    assert ranks.run(2, void) == [True, True]
    assert begin(ranks, launcher) == [0, 0]


@pytest.fixture
def copies(ranks: Ranks, launcher: Launcher) -> MemoryCopies:
    ranks.here.rank = 0
    return opened([launcher], 0)


def test_copies_become_rarer_until_they_cost_what_the_plan_allows(copies: MemoryCopies) -> None:
    copies.plan.elastic.memory_copy = MemoryCopyPlan(enabled=True, share=0.05)  # type: ignore[misc]
    copies.begin(None, 0)
    assert copies.is_due(1)
    for _ in range(50):
        copies.note_durations(1.0, 0.2)
    assert copies.every == 4  # of 5 %
    copies.step = 8
    assert [step for step in range(9, 14) if copies.is_due(step)] == [12, 13]
    for _ in range(50):
        copies.note_durations(1.0, 0.01)
    assert copies.every == 1


def test_locking_memory_for_the_first_copy_does_not_count(copies: MemoryCopies) -> None:
    def begin(*_: object) -> float:
        time.sleep(0.5)
        return 0.5

    copies.beside = SimpleNamespace(begin=begin, finish=lambda: None)  # type: ignore[assignment]
    began = time.perf_counter()
    take(copies, 1, began)
    assert copies.seconds < time.perf_counter() - began - 0.4


def test_no_rank_makes_copies_where_one_cannot_reach_its_launcher(
    copies: MemoryCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(COPY_PLACES, json.dumps(to_plain(copies.places)))
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr(dist, "all_reduce", lambda missing: missing.add_(1))
    assert MemoryCopies.open(copies.plan, copies.events) is None


def test_another_node_that_was_out_of_reach_keeps_later_copies(
    ranks: Ranks, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flood of connections at the start lost it for the whole attempt."""
    there, said = f"{LOOPBACK}:{(port := free_port())}", list[str]()
    places = CopyPlaces(
        launcher=os.getpid(),
        files=tuple(launcher.handles),
        own=launcher.address,
        buddy=there,
        secret=SECRET,
    )
    monkeypatch.setenv(COPY_PLACES, json.dumps(to_plain(places)))
    monkeypatch.setenv("LOCAL_RANK", "0")
    plan: Any = SimpleNamespace(
        elastic=SimpleNamespace(memory_copy=MemoryCopyPlan(enabled=True)),
        cluster=SimpleNamespace(procs_per_node=1),
    )
    events: Any = SimpleNamespace(write=lambda event: said.append(getattr(event, "text", "")))

    def one(_: int) -> list[int]:
        copies = MemoryCopies.open(plan, events)
        assert copies is not None
        assert COPY_PLACES not in os.environ, "children inherit the secret"
        copies.begin(copies.choose(), 0)
        take(copies, 1)  # too early to ask again
        files: Any = SimpleNamespace(handles=[])
        late = CopyKeeper(listen(LOOPBACK, port), secret=lambda: SECRET, files=files)
        assert copies.buddy is not None
        copies.buddy.retry_from = 0.0
        for step in (2, 3):
            take(copies, step)
        assert len(late.senders) == 1
        copies.end("the test is over")
        assert copies.buddy.link is None
        late.close()
        return sorted(late.kept[0].numbers)

    assert ranks.run(1, one) == [[2, 3]]
    first, again = [text for text in said if "other node" in text]
    assert "no other node keeps copies of its state: " in first
    assert again == "rank 0: another node keeps copies of its state again"
