"""Copies of all ranks read as one whole: by fewer ranks, by more, and from other hosts' memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
import torch.distributed as dist

from colotrain.engine.state.buddy import RemoteFile
from colotrain.engine.state.index import Source
from colotrain.engine.state.memory_copy import MemoryCopies
from colotrain.engine.state.whole_copy import Copied
from tests.checkpoints import read_all
from tests.copies import Launcher, Ranks, opened, take, whole_state


@pytest.fixture
def hosts() -> Iterator[Callable[..., list[Launcher]]]:
    made: list[Launcher] = []

    def make(count: int, procs: int = 2) -> list[Launcher]:
        made.extend(Launcher(procs) for _ in range(count))
        return made[-count:]

    yield make
    for launcher in made:
        launcher.end()


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    return Ranks(monkeypatch)


def attempt(
    ranks: Ranks,
    launchers: Sequence[Launcher],
    *steps: int,
    name: str = "a",
    then: Callable[[MemoryCopies], None] = lambda copies: None,
) -> list[Copied | None]:
    """Begin ranks on these hosts, and copy after each of `steps`; what each went on from."""

    def one(rank: int) -> Copied | None:
        copies = opened(launchers, rank, name)
        found = copies.choose()
        if found is not None and not is_own(found):
            check_whole(found)
        dist.all_reduce(torch.zeros(1))  # nobody begins before all have read
        copies.begin(found, found.step if found else 0)
        if found is not None:
            assert not is_readable_from_afar(found)
        for step in steps:
            take(copies, step)
            dist.all_reduce(torch.zeros(1))  # as in every step
        then(copies)
        return found

    for launcher in launchers:
        launcher.keeper.end_senders()
    return ranks.run(len(launchers) * launchers[0].procs, one)


def check_whole(whole: Copied) -> None:
    """What is read is the whole state of that step, be it read from here or from other hosts."""
    step, world_size = whole.step, whole.manifest.world_size
    own = {f"rng.{rank}": torch.tensor([rank, step]) for rank in range(world_size)}
    own |= {f"rank.{rank}.model.seen": own[f"rng.{rank}"] for rank in range(1, world_size)}
    own["model.seen"] = own["rng.0"]
    expected, read = whole_state(step) | own, read_all(whole.index)
    assert read.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(read[name], expected[name])] == []


def is_readable_from_afar(whole: Copied) -> bool:
    """Whether connections to other launchers are left, each of which keeps a thread there."""
    remote = (source for source in sources_of(whole) if isinstance(source, RemoteFile))
    return any(source.launcher.link.fileno() >= 0 for source in remote)


def sources_of(copied: Copied) -> set[Source]:
    """The files that are read."""
    return {chunk.source for stored in copied.index.values() for chunk in stored.chunks}


def is_own(copied: Copied) -> bool:
    """Whether one rank's copy is read, and not those of all ranks."""
    return len(sources_of(copied)) == 1 < copied.manifest.world_size


def assert_whole(found: Sequence[Copied | None], step: int, *, ranks_then: int) -> None:
    told = [
        (whole.step, whole.manifest.world_size) if whole and not is_own(whole) else None
        for whole in found
    ]
    assert told == [(step, ranks_then)] * len(found)


def damage(handle: int) -> None:
    os.pwrite(handle, bytes(b ^ 1 for b in os.pread(handle, 8, 4096)), 4096)


def newest(handles: Sequence[int], number: int) -> int:
    """The file among `handles` that has the copy of this number."""
    return next(h for h in handles if f'"number": {number},'.replace(" ", "") in text_of(h))


def text_of(handle: int) -> str:
    return os.pread(handle, os.fstat(handle).st_size, 0).decode(errors="ignore")


def test_a_host_is_lost_for_good(ranks: Ranks, hosts: Callable[..., list[Launcher]]) -> None:
    first, second = hosts(2)
    assert attempt(ranks, [first, second], 1, 2, 3) == [None] * 4
    second.keeper.close()
    assert_whole(attempt(ranks, [first], 4, name="b"), 3, ranks_then=4)
    again = attempt(ranks, [first], name="c")  # each has its own copy now
    assert [(is_own(found), found.step) for found in again if found] == [(True, 4)] * 2


def test_what_is_missing_is_read_from_the_hosts_that_have_it(
    ranks: Ranks, hosts: Callable[..., list[Launcher]]
) -> None:
    """Of three hosts the second is lost; the third's ranks have other numbers then."""
    first, second, third = hosts(3)
    attempt(ranks, [first, second, third], 1, 2)
    second.keeper.close()
    assert_whole(attempt(ranks, [first, third], 3, 4), 2, ranks_then=6)


def test_a_host_joins(ranks: Ranks, hosts: Callable[..., list[Launcher]]) -> None:
    first, second = hosts(2)
    attempt(ranks, [first], 1, 2)
    assert_whole(attempt(ranks, [first, second], 3, name="b"), 2, ranks_then=2)


def test_a_host_takes_the_place_of_a_lost_one(
    ranks: Ranks, hosts: Callable[..., list[Launcher]]
) -> None:
    first, second, third = hosts(3)
    attempt(ranks, [first, second], 1, 2)
    second.keeper.close()
    assert_whole(attempt(ranks, [first, third], 3, name="b"), 2, ranks_then=4)


def test_a_rank_that_dies_in_its_first_copy_leaves_the_old_ones(
    ranks: Ranks, hosts: Callable[..., list[Launcher]]
) -> None:
    first, second, third = hosts(3)
    attempt(ranks, [first, second, third], 1, 2)
    left = [first, third]

    def some(copies: MemoryCopies) -> None:
        if dist.get_rank() != 1:
            take(copies, 3)

    assert_whole(attempt(ranks, left, name="b", then=some), 2, ranks_then=6)
    assert_whole(attempt(ranks, left, name="c", then=some), 2, ranks_then=6)
    assert_whole(attempt(ranks, left, 3, name="d", then=some), 2, ranks_then=6)
    again = attempt(ranks, left, name="e")
    assert [(is_own(found), found.step) for found in again if found] == [(True, 3)] * 4


def test_a_damaged_copy_is_passed_over(ranks: Ranks, hosts: Callable[..., list[Launcher]]) -> None:
    first, second = hosts(2)
    attempt(ranks, [first, second], 1, 2, 3)
    damage(newest(first.keeper.kept[3].handles, 3))
    assert_whole(attempt(ranks, [first], name="b"), 2, ranks_then=4)


def test_a_damaged_copy_is_read_where_it_is_intact(
    ranks: Ranks, hosts: Callable[..., list[Launcher]]
) -> None:
    first, second = hosts(2)
    attempt(ranks, [first, second], 1, 2, 3)
    damage(newest(first.handles[2:], 3))
    assert_whole(attempt(ranks, [first, second], name="b"), 3, ranks_then=4)


@pytest.mark.parametrize("num_lost", [1, 2])
def test_a_copy_that_nobody_has_sends_all_to_the_checkpoint(
    ranks: Ranks, hosts: Callable[..., list[Launcher]], num_lost: int
) -> None:
    """Two neighbours of four are lost: nobody has the copies of the second one's ranks."""
    launchers = hosts(4, procs=1)
    attempt(ranks, launchers, 1, 2)
    left = [launchers[0], *launchers[1 + num_lost :]]
    found = attempt(ranks, left, name="b")
    if num_lost == 1:
        assert_whole(found, 2, ranks_then=4)
    else:
        assert found == [None] * 2


def test_copies_of_two_attempts_are_not_joined(
    ranks: Ranks, hosts: Callable[..., list[Launcher]]
) -> None:
    """As those of a host that comes back after others went on without it."""
    first, second = hosts(2, procs=1)
    other, lost = hosts(2, procs=1)
    attempt(ranks, [first, second], 1, 2)
    attempt(ranks, [other, lost], 1, 2, name="b")
    first.keeper.kept.clear()  # of rank 1 there is only what the other attempt has made
    lost.keeper.kept.clear()
    assert attempt(ranks, [first, lost], name="c") == [None] * 2


def test_void_copies_are_read_by_nobody(ranks: Ranks, hosts: Callable[..., list[Launcher]]) -> None:
    """Other launchers keep whole ones of which their ranks know nothing any more."""
    launchers = hosts(3, procs=1)
    attempt(ranks, launchers, 1, 2, then=lambda copies: copies.clear())
    assert attempt(ranks, launchers[:2], name="b") == [None] * 2
    attempt(ranks, launchers, 1, name="c")
    damage(launchers[2].keeper.kept[0].handles[0])
    damage(newest(launchers[0].handles, 3))
    assert attempt(ranks, launchers, name="d") == [None] * 3


def test_the_memory_of_ranks_that_are_no_more_is_freed(
    ranks: Ranks, hosts: Callable[..., list[Launcher]]
) -> None:
    first, second = hosts(2)
    attempt(ranks, [first, second], 1, 2)
    kept = [handle for rank in (2, 3) for handle in first.keeper.kept[rank].handles]
    attempt(ranks, [first], 3, name="b")
    assert all(os.fstat(handle).st_size for handle in kept)  # they may be needed yet
    first, second = hosts(2)
    attempt(ranks, [first, second], 1, 2)
    kept = [handle for rank in (2, 3) for handle in first.keeper.kept[rank].handles]
    attempt(ranks, [first], 3, 4, name="b")
    assert not any(os.fstat(handle).st_size for handle in kept)


def test_a_launcher_that_is_gone_sends_all_to_the_checkpoint(
    ranks: Ranks, hosts: Callable[..., list[Launcher]], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, third = hosts(3, procs=1)
    attempt(ranks, [first, second, third], 1, 2)

    def cut(*_: object) -> None:
        raise ConnectionResetError

    monkeypatch.setattr(third.keeper, "_answer", cut)
    assert attempt(ranks, [first, third], name="b") == [None] * 2
