"""A rank's file: every byte where the layout says, whatever the tensors are and who has a lock."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import xxhash
from torch import Tensor

from colotrain.engine.parts.part_map import PartMap
from colotrain.engine.state import shard_file
from colotrain.engine.state.shard_file import (
    BLOCK,
    LARGE_BYTES,
    WINDOW_BYTES,
    Layout,
    NotFinite,
    Piece,
    PieceLock,
    write_pieces,
)
from colotrain.spec.axes import DP_SHARD, Ranks

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8)


def tensor_of(num_bytes: int, dtype: torch.dtype) -> Tensor:
    """Anywhere in memory, as its dtype allows."""
    numel, offset = num_bytes // dtype.itemsize, random.randrange(3000)
    whole = torch.randint(0, 100, (numel + offset,)).to(dtype)
    return whole[offset:]


def pieces_of(sizes: list[int]) -> list[Piece]:
    tensors = [tensor_of(size, random.choice(DTYPES)) for size in sizes]
    return [piece_of(f"p{n}", tensor) for n, tensor in enumerate(tensors)]


def piece_of(name: str, local: Tensor, *, must_be_finite: bool = False) -> Piece:
    parts = PartMap(ranks=Ranks({DP_SHARD: 1}), rank=0)
    part = parts.part_of(name, local.shape, "", is_sharded=False)
    return Piece(part=part, local=local, must_be_finite=must_be_finite)


def check(path: Path, layout: Layout, checksum: str, expected: list[Tensor]) -> None:
    content = path.read_bytes()
    assert len(content) == layout.num_bytes
    assert xxhash.xxh3_128(content).hexdigest() == checksum
    end = 0
    for start, tensor in zip(layout.starts, expected, strict=True):
        assert not any(content[end:start])
        end = start + tensor.nbytes
        found = content[start:end]
        assert found == tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    assert end == len(content)


@pytest.mark.parametrize("seed", range(8))
def test_a_file_holds_every_byte_in_its_place(tmp_path: Path, seed: int) -> None:
    random.seed(seed)
    edges = [0, 1, 63, 64, BLOCK, LARGE_BYTES - 1, LARGE_BYTES, LARGE_BYTES + BLOCK + 8]
    sizes = random.choices(edges, k=12) + [random.randrange(9 * LARGE_BYTES) for _ in range(3)]
    random.shuffle(sizes)
    pieces = pieces_of(sizes)
    across = torch.randn(900, 700).t()
    pieces.insert(5, piece_of("across", across))
    told: list[int] = []
    layout = Layout.of(pieces)
    checksum = write_pieces(tmp_path / "file", pieces, layout, report=told.append)
    check(tmp_path / "file", layout, checksum, [piece.local for piece in pieces])
    assert sum(told) == layout.num_bytes


def test_large_tensors_are_written_from_where_they_lie(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random.seed(0)
    pieces = pieces_of([5, 3 * LARGE_BYTES, 7, WINDOW_BYTES + 3 * LARGE_BYTES])
    seen: list[tuple[int, int]] = []
    write = shard_file._write_all

    def watched(handle: int, data: memoryview) -> None:
        seen.append((shard_file._start_of(data), len(data)))
        write(handle, data)

    monkeypatch.setattr(shard_file, "_write_all", watched)
    layout = Layout.of(pieces)
    checksum = write_pieces(tmp_path / "file", pieces, layout)
    check(tmp_path / "file", layout, checksum, [piece.local for piece in pieces])
    assert all(start % BLOCK == size % BLOCK == 0 for start, size in seen)
    for piece in (pieces[1], pieces[3]):
        first, last = piece.local.data_ptr(), piece.local.data_ptr() + piece.local.nbytes
        inside = sum(size for start, size in seen if first <= start < last)
        assert inside > piece.local.nbytes - 2 * BLOCK


def test_what_is_exchanged_for_copies_may_change_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random.seed(1)
    pieces = pieces_of([9, 2 * LARGE_BYTES, WINDOW_BYTES + LARGE_BYTES, LARGE_BYTES, 100])
    originals, expected = [p.local for p in pieces], [p.local.clone() for p in pieces]
    layout, lock = Layout.of(pieces), PieceLock()
    begun, go_on, number = threading.Event(), threading.Event(), 0
    write = shard_file._write_all

    def slowly(handle: int, data: memoryview) -> None:
        nonlocal number
        number += 1
        if number == 3:  # in the middle of the third piece
            begun.set()
            assert go_on.wait(20)
        write(handle, data)

    monkeypatch.setattr(shard_file, "_write_all", slowly)
    found: list[str] = []
    path = tmp_path / "file"
    thread = threading.Thread(
        target=lambda: found.append(write_pieces(path, pieces, layout, lock=lock))
    )
    thread.start()
    assert begun.wait(20)
    threading.Timer(0.2, go_on.set).start()
    with lock.replace() as first:  # waits for the window that is being written
        assert go_on.is_set()
        assert first == 2
        for index in range(first, len(pieces)):
            pieces[index] = replace(pieces[index], local=pieces[index].local.clone())
    for tensor in originals:
        tensor.fill_(7)
    thread.join(20)
    check(path, layout, found[0], expected)


@pytest.mark.parametrize("at", [0, 70, LARGE_BYTES // 4, -1])
def test_a_value_that_is_not_finite_is_found_anywhere(tmp_path: Path, at: int) -> None:
    values = torch.randn(LARGE_BYTES // 2)
    piece = piece_of("bad", values, must_be_finite=True)
    layout = Layout.of([piece])
    write_pieces(tmp_path / "good", [piece], layout)
    values[at] = float("inf")
    with pytest.raises(NotFinite, match="bad"):
        write_pieces(tmp_path / "file", [piece], layout)


def test_a_write_that_fails_leaves_the_turn_to_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int, data: memoryview) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shard_file, "_write_all", full)
    lock, pieces = PieceLock(), pieces_of([3 * LARGE_BYTES])
    with pytest.raises(OSError, match="No space") as kept:  # with all frames of the writer
        write_pieces(tmp_path / "file", pieces, Layout.of(pieces), lock=lock)

    def waiting() -> None:
        raise AssertionError(kept)

    with lock.replace(waiting) as first:
        assert first == 0
