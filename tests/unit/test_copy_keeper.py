"""Copies that another node's launcher keeps: whole or not given back, and for those who may."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import torch

from colotrain.connections import send
from colotrain.engine.checkpoint import buddy as sending
from colotrain.engine.checkpoint.memory_file import MemoryFile
from colotrain.launch import copy_keeper
from colotrain.launch.copy_keeper import Buddy, CopyKeeper
from colotrain.launch.node_registry import listen

RANK = 5


@pytest.fixture
def keeper() -> Iterator[CopyKeeper]:
    made = CopyKeeper(listen("127.0.0.1", 0), secret=lambda: "secret")
    yield made
    made.close()


@pytest.fixture
def handles() -> Iterator[list[int]]:
    made = [os.memfd_create(f"test{n}") for n in range(4)]
    yield made
    for handle in made:
        os.close(handle)


def file_of(handle: int) -> MemoryFile:
    return MemoryFile(f"/proc/{os.getpid()}/fd/{handle}")


def reached(keeper: CopyKeeper, secret: str = "secret") -> Buddy:
    return Buddy(host="127.0.0.1", port=keeper.port, secret=secret)


def write(handle: int, number: int) -> MemoryFile:
    """A copy of more than one window."""
    file = file_of(handle)
    file.write({"t": torch.full((700_001,), float(number))}, {"number": number})
    return file


def found(keeper: CopyKeeper, handles: list[int], rank: int = RANK) -> dict[int, bool]:
    """Number of each copy that a launcher gets back → whether it is what was written."""
    for handle in handles:
        os.ftruncate(handle, 0)
    reached(keeper).fetch(rank, handles)
    files = [file for file in map(file_of, handles) if file.read() is not None]
    return {file.read()["number"]: file.is_intact() for file in files}  # type: ignore[index]


def test_the_two_newest_copies_come_back(keeper: CopyKeeper, handles: list[int]) -> None:
    assert found(keeper, handles[2:]) == {}
    link = sending.Buddy(reached(keeper).for_ranks(), RANK)
    for number in (1, 2, 3):
        link.send(write(handles[0], number), number, beside=number - 1)
    assert found(keeper, handles[2:]) == {2: True, 3: True}
    tensor = torch.zeros(700_001)
    newest = next(f for f in map(file_of, handles[2:]) if f.read() == {"number": 3})
    newest.read_into({"t": tensor})
    assert tensor.eq(3.0).all()
    assert found(keeper, handles[2:], rank=RANK + 1) == {}


def test_the_copy_that_a_run_went_on_from_is_not_replaced(
    keeper: CopyKeeper, handles: list[int]
) -> None:
    """Another rank died within its third copy, so that all went on from the second."""
    link = sending.Buddy(reached(keeper).for_ranks(), RANK)
    for number in (1, 2, 3):
        link.send(write(handles[0], number), number, beside=number - 1)
    link.send(write(handles[0], 4), 4, beside=2)
    assert found(keeper, handles[2:]) == {2: True, 4: True}


def test_a_torn_copy_is_not_given_back(
    keeper: CopyKeeper, handles: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host dies while it sends: the copy before is still there."""
    link = sending.Buddy(reached(keeper).for_ranks(), RANK)
    for number in (1, 2):
        link.send(write(handles[0], number), number, beside=number - 1)

    def half(stream: object, handle: int, num_bytes: int) -> None:
        stream.write(os.pread(handle, num_bytes // 2, 0))  # type: ignore[attr-defined]
        stream.flush()  # type: ignore[attr-defined]
        link.connection.socket.shutdown(2)

    monkeypatch.setattr(sending, "send_file", half)
    with pytest.raises(OSError, match=r"connection|closed|shut"):
        link.send(write(handles[0], 3), 3, beside=2)
    deadline = time.monotonic() + 5
    while found(keeper, handles[2:]) != {2: True} and time.monotonic() < deadline:
        time.sleep(0.01)
    assert found(keeper, handles[2:]) == {2: True}


def test_a_copy_whose_fetching_is_cut_off_is_not_read(
    keeper: CopyKeeper, handles: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    sending.Buddy(reached(keeper).for_ranks(), RANK).send(write(handles[0], 1), 1, beside=0)

    def half(stream: object, handle: int, num_bytes: int) -> None:
        stream.write(os.pread(handle, num_bytes // 2, 0))  # type: ignore[attr-defined]
        raise OSError("gone")

    monkeypatch.setattr(copy_keeper, "send_file", half)
    write(handles[2], 7)  # what was in the file does not stay either
    assert not reached(keeper).fetch(RANK, handles[2:])
    assert file_of(handles[2]).read() is None


def test_a_byte_that_changed_on_the_way_is_found(keeper: CopyKeeper, handles: list[int]) -> None:
    link = sending.Buddy(reached(keeper).for_ranks(), RANK)
    link.send(write(handles[0], 1), 1, beside=0)
    os.pwrite(keeper.kept[RANK].handles[0], b"\1", 6000)
    assert found(keeper, handles[2:]) == {1: False}


def test_strangers_can_neither_read_nor_write(keeper: CopyKeeper, handles: list[int]) -> None:
    sending.Buddy(reached(keeper).for_ranks(), RANK).send(write(handles[0], 1), 1, beside=0)
    stranger = reached(keeper, secret="guess")
    assert not stranger.fetch(RANK, handles[2:])
    with pytest.raises(OSError, match=r"ended|reset|pipe"):
        sending.Buddy(stranger.for_ranks(), RANK).send(write(handles[0], 9), 9, beside=1)
    assert found(keeper, handles[2:]) == {1: True}


def test_a_node_without_memory_refuses_and_keeps_what_it_has(
    keeper: CopyKeeper, handles: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    link = sending.Buddy(reached(keeper).for_ranks(), RANK)
    link.send(write(handles[0], 1), 1, beside=0)
    monkeypatch.setattr(copy_keeper.host, "free_bytes", lambda: 1 << 20)
    with pytest.raises(OSError, match="no 2 MiB free"):
        link.send(write(handles[0], 2), 2, beside=1)
    assert found(keeper, handles[2:]) == {1: True}


def test_nonsense_ends_only_its_own_connection(keeper: CopyKeeper, handles: list[int]) -> None:
    link = sending.Buddy(reached(keeper).for_ranks(), RANK)
    send(link.connection.stream, {"number": "x"})
    other = sending.Buddy(reached(keeper).for_ranks(), RANK)
    other.send(write(handles[0], 1), 1, beside=0)
    assert found(keeper, handles[2:]) == {1: True}
