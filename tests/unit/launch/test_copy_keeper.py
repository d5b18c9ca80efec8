"""Copies that another node's launcher keeps: whole or not read, and by those who may."""

from __future__ import annotations

import os
import time

import pytest
import torch

from colotrain.connections import Link, StrangerError, connect
from colotrain.engine.comms.raw_bytes import bytes_of
from colotrain.engine.state.buddy import Buddy, RemoteLauncher
from colotrain.engine.state.memory_file import MemoryFile
from colotrain.launch import copy_keeper
from colotrain.launch.copy_keeper import CopyKeeper
from colotrain.spec.elastic import COPY_SERVICE
from tests.copies import piece_of

RANK = 5


def file_of(handle: int) -> MemoryFile:
    return MemoryFile(f"/proc/{os.getpid()}/fd/{handle}")


def address(keeper: CopyKeeper) -> str:
    return f"127.0.0.1:{keeper.port}"


def link_to(keeper: CopyKeeper, secret: str = "secret", rank: int = RANK) -> Buddy:
    return Buddy(address(keeper), rank, secret=secret)


def write(handle: int, number: int) -> MemoryFile:
    """A copy of more than one window."""
    file = file_of(handle)
    file.write([piece_of("t", torch.full((700_001,), float(number)))], {"number": number})
    return file


def found(keeper: CopyKeeper) -> dict[int, bool]:
    """Number of each copy that is kept of the rank → whether it is what was written."""
    handles = keeper.kept[RANK].handles if RANK in keeper.kept else []
    assert set(keeper.handles()) == set(handles)
    abouts = [(file, file.read()) for file in map(file_of, handles)]
    return {about["number"]: file.is_intact() for file, about in abouts if about is not None}


def test_the_two_newest_copies_are_kept_and_read_from_anywhere(
    keeper: CopyKeeper, handles: list[int]
) -> None:
    link = link_to(keeper)
    for number in (1, 2, 3):
        link.send(write(handles[0], number), number, beside=number - 1)
    assert found(keeper) == {2: True, 3: True}
    write(handles[1], 7)
    reader = RemoteLauncher(address(keeper), secret="secret")
    for handle in (*keeper.handles(), handles[1]):
        about = file_of(handle).read()
        assert about is not None
        (chunk,) = about["tensors"]["t"]["chunks"]
        start, length = chunk["start"], chunk["length"]
        tensor = torch.zeros(700_001)
        middle = bytes_of(tensor)[1000 : length - 1000]
        reader.read_into(handle, start + 1000, middle)
        assert tensor[250:-250].eq(about["number"]).all()
        assert tensor[:250].eq(0).all()
        assert tensor[-250:].eq(0).all()


def test_no_other_file_of_the_launcher_is_read(keeper: CopyKeeper, handles: list[int]) -> None:
    write(handles[0], 1)
    reader = RemoteLauncher(address(keeper), secret="secret")
    with pytest.raises(OSError, match=r"ended|reset"):
        reader.read_into(handles[0], 0, memoryview(bytearray(8)))


def test_the_copy_that_a_run_went_on_from_is_not_replaced(
    keeper: CopyKeeper, handles: list[int]
) -> None:
    """Another rank died within its third copy, so that all went on from the second."""
    link = link_to(keeper)
    for number in (1, 2, 3):
        link.send(write(handles[0], number), number, beside=number - 1)
    link.send(write(handles[0], 4), 4, beside=2)
    assert found(keeper) == {2: True, 4: True}


def test_a_torn_copy_is_not_given_back(
    keeper: CopyKeeper, handles: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host dies while it sends: the copy before is still there."""
    link = link_to(keeper)
    for number in (1, 2):
        link.send(write(handles[0], number), number, beside=number - 1)

    def half(handle: int, num_bytes: int, **_: object) -> None:
        link.connect().socket.sendall(os.pread(handle, num_bytes // 2, 0))
        link.connect().cut()

    monkeypatch.setattr(link.connect(), "send_file", half)
    with pytest.raises(OSError, match=r"connection|closed|shut"):
        link.send(write(handles[0], 3), 3, beside=2)
    deadline = time.monotonic() + 5
    while found(keeper) != {2: True} and time.monotonic() < deadline:
        time.sleep(0.01)
    assert found(keeper) == {2: True}


def test_reading_that_is_cut_off_is_an_error(
    keeper: CopyKeeper, handles: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(handles[1], 1)

    def half(link: Link, handle: int, num_bytes: int, *, start: int, stall_s: float) -> None:
        link.socket.sendall(os.pread(handle, num_bytes // 2, start))
        raise OSError("gone")

    monkeypatch.setattr(Link, "send_file", half)
    reader = RemoteLauncher(address(keeper), secret="secret")
    with pytest.raises(OSError, match=r"ended|reset"):
        reader.read_into(handles[1], 0, memoryview(bytearray(5000)))


def test_nothing_of_an_earlier_round_is_received(keeper: CopyKeeper, handles: list[int]) -> None:
    """As from a rank whose cable is in again, after others went on without it."""
    link = link_to(keeper)
    link.send(write(handles[0], 1), 1, beside=0)
    keeper.end_senders()
    with pytest.raises(OSError, match=r"ended|reset|pipe"):
        link.send(write(handles[0], 2), 2, beside=1)
    assert found(keeper) == {1: True}
    link_to(keeper).send(write(handles[0], 3), 3, beside=1)
    assert found(keeper) == {1: True, 3: True}


def test_what_no_rank_sends_any_more_is_freed(keeper: CopyKeeper, handles: list[int]) -> None:
    for rank, numbers in ((RANK, (1, 2)), (RANK + 1, (1, 2, 3))):
        link = link_to(keeper, rank=rank)
        for number in numbers:
            link.send(write(handles[0], number), number, beside=number - 1)
    RemoteLauncher(address(keeper), secret="secret").free_before(3)
    sizes = {r: [os.fstat(h).st_size for h in kept.handles] for r, kept in keeper.kept.items()}
    assert sizes[RANK] == [0, 0]
    assert all(sizes[RANK + 1])


def test_a_byte_that_changed_on_the_way_is_found(keeper: CopyKeeper, handles: list[int]) -> None:
    link = link_to(keeper)
    link.send(write(handles[0], 1), 1, beside=0)
    os.pwrite(keeper.kept[RANK].handles[0], b"\1", 6000)
    assert found(keeper) == {1: False}


def test_strangers_can_neither_read_nor_write(keeper: CopyKeeper, handles: list[int]) -> None:
    link_to(keeper).send(write(handles[0], 1), 1, beside=0)
    with pytest.raises(StrangerError, match="does not know the secret"):
        RemoteLauncher(address(keeper), secret="guess")
    with pytest.raises(StrangerError, match="knows no secret"):
        link_to(keeper, "").connect()
    assert found(keeper) == {1: True}


def test_a_connection_that_was_led_to_another_keeper_is_ended(
    keeper: CopyKeeper, handles: list[int]
) -> None:
    """By somebody on the way, who cannot read what is said, but where it goes."""
    for to in ("127.0.0.1:1", f"127.0.0.2:{keeper.port}", ""):
        where = "127.0.0.1", keeper.port
        link = connect(where, secret="secret", service=COPY_SERVICE, within_s=20)
        link.send({"rank": RANK, "to": to}, within_s=20)
        with pytest.raises(OSError, match=r"ended|reset"):
            link.read(within_s=20)
    assert keeper.kept == {}


def test_a_node_without_memory_refuses_and_keeps_what_it_has(
    keeper: CopyKeeper, handles: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    link = link_to(keeper)
    link.send(write(handles[0], 1), 1, beside=0)
    monkeypatch.setattr(copy_keeper.host, "free_bytes", lambda: 1 << 20)
    with pytest.raises(OSError, match="no 2 MiB free"):
        link.send(write(handles[0], 2), 2, beside=1)
    assert found(keeper) == {1: True}


@pytest.mark.parametrize(
    "header",
    [
        {"number": "x"},
        {"number": float("inf"), "bytes": 1, "beside": 0},
        {"number": 1, "bytes": -1, "beside": -1},
        {"number": 1, "bytes": 1 << 80, "beside": []},
    ],
)
def test_nonsense_ends_only_its_own_connection(
    keeper: CopyKeeper, handles: list[int], header: dict[str, object]
) -> None:
    link = link_to(keeper)
    link.connect().send(header, within_s=5)
    other = link_to(keeper)
    other.send(write(handles[0], 1), 1, beside=0)
    assert found(keeper) == {1: True}
