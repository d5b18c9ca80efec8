"""The index of a checkpoint, in JSON: which box of which tensor lies where, and reading from there.

No file that is read can name code to run, and a rank reads only the rows that it needs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from colotrain.engine.comms import exchange
from colotrain.engine.comms.raw_bytes import bytes_of
from colotrain.engine.parts.part_map import Part, local_part
from colotrain.engine.state.shard_file import Piece
from colotrain.errors import ColotrainError, UsageError, fix_of
from colotrain.rundir import open_inside, read_json

INDEX = "index.json"
MOST_OF_INDEX = 512 << 20
"""Maximum bytes of an index: 150 a part, so 1,100 tensors and two states of each on 1,000 ranks."""
SCHEMA = 2
INVALID = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""Errors of an index that is not valid."""


class Source(Protocol):
    """A file of a checkpoint, or what stands for one. Reading raises `OSError`."""

    @property
    def num_bytes(self) -> int: ...

    def read_into(self, start: int, data: memoryview) -> None:
        """Fill `data` with the bytes from `start` on."""


@dataclass(frozen=True, slots=True)
class FileSource:
    path: Path

    @property
    def num_bytes(self) -> int:
        return self.path.stat().st_size

    def read_into(self, start: int, data: memoryview) -> None:
        done = 0
        with self.path.open("rb", buffering=0) as file:
            file.seek(start)
            while done < len(data) and (got := file.readinto(data[done:])):
                done += got
        if done != len(data):
            raise OSError(f"{self.path}: ended after {done} of {len(data)} bytes")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor, row by row from `start` on in a file."""

    begin: tuple[int, ...]
    sizes: tuple[int, ...]
    source: Source
    start: int

    def read_into(self, target: Tensor, dtype: torch.dtype, begin: Sequence[int]) -> None:
        """Fill `target`, a box inside of this one from `begin` on; only its rows are read."""
        row, sizes = math.prod(self.sizes[1:]) * dtype.itemsize, target.shape
        first, rows = (begin[0] - self.begin[0], sizes[0]) if sizes else (0, 1)
        start = self.start + first * row
        is_alike = target.dtype == dtype and sizes[1:] == self.sizes[1:]
        if is_alike and target.device.type == "cpu" and target.is_contiguous():
            self.source.read_into(start, bytes_of(target))
            return
        data = bytearray(rows * row)
        self.source.read_into(start, memoryview(data))
        box = torch.frombuffer(data, dtype=dtype).view((rows, *self.sizes[1:]) if sizes else ())
        for axis in range(1, len(sizes)):
            box = box.narrow(axis, begin[axis] - self.begin[axis], sizes[axis])
        target.copy_(box)


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor, and the chunks in which its numbers are."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    def read_into(self, target: Tensor, begin: Sequence[int]) -> int:
        """Fill `target`, whose first number is that at `begin` of the whole.

        Returns how many of its numbers are in the chunks.
        """
        num_read = 0
        for chunk in self.chunks:
            pairs = [*zip(begin, target.shape, chunk.begin, chunk.sizes, strict=True)]
            at = [max(a, b) for a, _, b, _ in pairs]
            sizes = [min(a + m, b + n) - f for f, (a, m, b, n) in zip(at, pairs, strict=True)]
            if any(size <= 0 for size in sizes):
                continue
            into = target
            for axis, size in enumerate(sizes):
                into = into.narrow(axis, at[axis] - begin[axis], size)
            chunk.read_into(into, self.dtype, at)
            num_read += into.numel()
        return num_read

    def read(self) -> Tensor:
        """Return the whole tensor."""
        whole = torch.empty(self.shape, dtype=self.dtype)
        self.read_into(whole, [0] * len(self.shape))
        return whole


Index = Mapping[str, Stored]


def own_name(rank: int, name: str) -> str:
    """Return the name of a tensor of this rank that differs from rank 0's (the plain name)."""
    return f"rank.{rank}.{name}"


def with_own(index: Index, rank: int) -> Index:
    """Return an index in which this rank's own tensors have the plain names, too."""
    own = own_name(rank, "")
    return {**index, **{n.removeprefix(own): t for n, t in index.items() if n.startswith(own)}}


def describe(pieces: list[Piece], starts: Sequence[int], file: str) -> dict[str, Any]:
    """Return the part of the index for `pieces` that begin at `starts` in a file."""
    pairs = zip(pieces, starts, strict=True)
    return {piece.part.name: _entry_of(piece, file=file, start=start) for piece, start in pairs}


def _entry_of(piece: Piece, *, file: str, start: int) -> dict[str, Any]:
    part, local = piece.part, piece.local
    sizes = list(local.shape)
    box = {"offsets": list(part.begin), "sizes": sizes}
    place = {"file": file, "start": start, "length": local.nbytes}
    dtype = str(local.dtype).removeprefix("torch.")
    # plain data, which is not divided, may have another length than when its part was found
    shape = list(part.whole) if part.divided else sizes
    return {"dtype": dtype, "shape": shape, "chunks": [box | place]}


def join(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Join the parts of all ranks into one index."""
    tensors: dict[str, Any] = {}
    for part in parts:
        for name, entry in part.items():
            if name in tensors:
                tensors[name]["chunks"] += entry["chunks"]
            else:
                tensors[name] = entry
    return {"schema": SCHEMA, "tensors": tensors}


def read_index(folder: Path) -> Index:
    """Read the index of a checkpoint; raises `ColotrainError` where it is not valid."""
    path = folder / INDEX
    try:
        document = read_json(path, functools.partial(open_inside, folder), most=MOST_OF_INDEX)
        if document["schema"] != SCHEMA:
            raise ValueError(f"its schema is {document['schema']!r}, not {SCHEMA}")
        return index_of(document["tensors"], lambda file: FileSource(folder / Path(file).name))
    except (*INVALID, MemoryError) as error:
        what = f"{type(error).__name__}: {error}"
        fix = fix_of(error, "use another checkpoint")
        raise ColotrainError(f"{path}: not an index of a checkpoint ({what})", fix) from error


def index_of(
    tensors: dict[str, Any], source_of: Callable[[str], Source], *, whole: bool = True
) -> Index:
    """Return the index of the tensors that `join` described; `source_of` finds a file by its name.

    Raises one of `INVALID` where a part cannot be so, or is missing and the tensors are `whole`.
    """
    index = {name: _read_entry(source_of, name, entry) for name, entry in tensors.items()}
    for name, stored in index.items() if whole else ():
        covered = sum(math.prod(chunk.sizes) for chunk in stored.chunks)
        if covered != math.prod(stored.shape):
            raise ValueError(f"{name}: {covered} of its {math.prod(stored.shape)} values are there")
    return index


def _read_entry(source_of: Callable[[str], Source], name: str, entry: dict[str, Any]) -> Stored:
    dtype, shape = getattr(torch, entry["dtype"]), _sizes(entry["shape"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{entry['dtype']} is no dtype")
    chunks: dict[tuple[int, ...], Chunk] = {}
    for chunk in entry["chunks"]:
        offsets, sizes = _sizes(chunk["offsets"]), _sizes(chunk["sizes"])
        start, length = _sizes([chunk["start"], chunk["length"]])
        inside = len(offsets) == len(sizes) == len(shape) and all(
            first + size <= whole for first, size, whole in zip(offsets, sizes, shape, strict=True)
        )
        source = source_of(chunk["file"])
        if not inside or length != math.prod(sizes) * dtype.itemsize:
            raise ValueError(f"{name}: a part of it cannot be so")
        if start + length > source.num_bytes:
            raise ValueError(f"{name}: it lies beyond the end of {chunk['file']}")
        if offsets in chunks:
            raise ValueError(f"{name}: a part of it is there twice")
        chunks[offsets] = Chunk(offsets, sizes, source, start)
    return Stored(dtype, shape, tuple(chunks.values()))


def _sizes(values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(type(v) is int and 0 <= v < 1 << 62 for v in values):
        raise ValueError(f"{values!r} are no sizes")
    return tuple(values)


def load(tensors: Mapping[str, Tensor], parts: Mapping[str, Part], index: Index) -> None:
    """Fill `tensors`, which are these parts of whole ones, from a checkpoint with this index.

    All ranks must call. `OSError` on all of them where one cannot read, and `UsageError` where the
    index has another shape.
    """
    for name, part in parts.items():
        if part.whole != (shape := index[name].shape):
            own, _, key = name.partition(".")
            raise UsageError(
                f"{key if own == 'model' else name}: {part.whole} here, {shape} in the checkpoint",
                "resume with the model that the checkpoint was made from",
            )
    problem = None
    try:
        for name, tensor in tensors.items():
            target = local_part(tensor).detach()
            num_read = index[name].read_into(target, parts[name].begin)
            if num_read != target.numel():
                raise ValueError(f"{name}: {num_read} of {target.numel()} values are there")
    except Exception as error:  # whatever it is: the others wait for this rank
        problem = f"rank {dist.get_rank()}: {error}"
    for told in exchange.all_gather(problem):
        if told is not None:
            raise OSError(told)
