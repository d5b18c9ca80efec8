"""Copies of a rank's state in memory: whole or not read, and used only where every rank has one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from colotrain.engine.checkpoint import memory_file
from colotrain.engine.checkpoint.manifest import Manifest
from colotrain.engine.checkpoint.memory_copy import MemoryCopies
from colotrain.engine.checkpoint.memory_file import MemoryFile
from colotrain.spec.elastic import MEMORY_FILES, MemoryCopyPlan

MANIFEST = Manifest(
    step=3,
    optimizer_steps=3,
    micro_batches=12,
    loss_scale=None,
    clean_steps=0,
    world_size=2,
    plugin="zero3",
    global_batch=8,
    written_at=1.0,
)


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


def test_what_is_read_is_what_was_written(path: str) -> None:
    file, other = MemoryFile(path), MemoryFile(path)
    for _ in range(2):  # the second one replaces the first
        expected = state()
        file.write(expected, {"number": 1})
        assert other.read() == {"number": 1}
        assert other.is_intact()
        assert other.sizes() == {name: tensor.nbytes for name, tensor in expected.items()}
        wide = torch.zeros(6, 8)
        found = {n: torch.full_like(t, 1) for n, t in expected.items()} | {"columns": wide[:, ::2]}
        other.read_into(found)
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    with pytest.raises(ValueError, match="t3: 1200 bytes"):
        other.read_into({"t3": torch.zeros(3)})


def test_a_copy_that_was_not_finished_is_not_read(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, write_all = MemoryFile(path), memory_file._write_all
    file.write(state(), {"number": 1})
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
            file.write(state(), {"number": 2})
        assert file.read() is None
        assert not file.is_intact()


def test_a_changed_byte_is_found(path: str) -> None:
    file = MemoryFile(path)
    file.write({"t": torch.zeros(1000)}, {})
    os.pwrite(file.handle, b"\1", 5000)
    assert file.read() == {}
    assert not file.is_intact()


class Ranks:
    """Stands in for the other ranks of a group of two; this is rank 0."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.other: list[int] = []
        """Numbers of the other rank's copies, each of the step of that number plus `shift`."""
        self.shift = 0
        monkeypatch.setattr(dist, "get_rank", lambda: 0)
        monkeypatch.setattr(dist, "get_world_size", lambda: 2)
        monkeypatch.setattr(dist, "all_reduce", lambda tensor: None)
        monkeypatch.setattr(dist, "all_gather_object", self.gather)

    def gather(self, everyone: list[Any], mine: Any) -> None:
        everyone[:] = [mine, [(number, number + self.shift) for number in self.other]]


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryCopies]:
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: None)
    handles = [os.memfd_create(f"test{n}") for n in range(2)]
    paths = os.pathsep.join(f"/proc/{os.getpid()}/fd/{handle}" for handle in handles)
    monkeypatch.setenv(MEMORY_FILES, paths)
    yield reopened()
    for handle in handles:
        os.close(handle)


def reopened() -> MemoryCopies:
    """As the next attempt's worker has it."""
    memory_copy = MemoryCopyPlan(enabled=True, share=0.05)
    cluster = SimpleNamespace(procs_per_node=2)
    plan: Any = SimpleNamespace(elastic=SimpleNamespace(memory_copy=memory_copy), cluster=cluster)
    events: Any = SimpleNamespace(write=lambda event: None)
    found = MemoryCopies.open(plan, events)
    assert found is not None
    return found


def take(copies: MemoryCopies, step: int) -> None:
    copies.take({"t": torch.full((3,), float(step))}, replace(MANIFEST, step=step), 0.0)


def test_the_newest_copy_that_all_ranks_have_is_taken(
    copies: MemoryCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(monkeypatch)
    assert reopened().choose() is None
    for step in (1, 2, 3):
        take(copies, step)
    ranks.other = [2, 3]
    found = reopened().choose()
    assert found is not None
    assert found.step == 3
    ranks.other = [1, 2]  # it died within its third
    again = reopened()
    found = again.choose()
    assert found is not None
    assert found.step == 2
    tensor = torch.zeros(3)
    found.file.read_into({"t": tensor})
    assert tensor.tolist() == [2.0, 2.0, 2.0]
    again.begin(found, 2)
    take(again, 3)  # must not replace the copy that it went on from
    ranks.other = [2]
    found = reopened().choose()
    assert found is not None
    assert found.step == 2


@pytest.mark.parametrize("other", [[], [1], [7]], ids=["none", "older", "foreign"])
def test_a_rank_without_the_copy_sends_all_to_the_checkpoint(
    copies: MemoryCopies, monkeypatch: pytest.MonkeyPatch, other: list[int]
) -> None:
    """As the ranks of a host that took a lost one's place."""
    ranks = Ranks(monkeypatch)
    for step in (1, 2, 3):
        take(copies, step)
    ranks.other = other
    assert reopened().choose() is None


def test_copies_of_two_steps_are_not_taken_for_one(
    copies: MemoryCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a host's whose launcher began to count anew."""
    ranks = Ranks(monkeypatch)
    for step in (11, 12, 13):
        take(copies, step)
    ranks.other, ranks.shift = [2, 3], 10
    found = reopened().choose()
    assert found is not None
    assert found.step == 13
    ranks.shift = 9
    assert reopened().choose() is None


def test_other_numbers_of_ranks_and_void_copies_do_not_count(
    copies: MemoryCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = Ranks(monkeypatch)
    take(copies, 1)
    ranks.other = [1]
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    assert reopened().choose() is None
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    assert reopened().choose() is not None
    copies.clear()
    assert reopened().choose() is None
    assert copies.is_due(1)


def test_copies_become_rarer_until_they_cost_what_the_plan_allows(copies: MemoryCopies) -> None:
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


def test_no_rank_makes_copies_where_one_cannot_reach_its_launcher(
    copies: MemoryCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    Ranks(monkeypatch)
    monkeypatch.setattr(dist, "all_reduce", lambda missing: missing.add_(1))
    plan: Any = copies.plan
    assert MemoryCopies.open(plan, copies.events) is None
