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
from colotrain.engine.parts.part_map import Part, local_part
from colotrain.engine.state.shard_file import Piece, Written
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

    def read(self, dtype: torch.dtype, begin: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Return a box of the tensor that is inside of this one; only its rows are read."""
        row = math.prod(self.sizes[1:]) * dtype.itemsize
        first, rows = (begin[0] - self.begin[0], sizes[0]) if sizes else (0, 1)
        data = bytearray(rows * row)
        self.source.read_into(self.start + first * row, memoryview(data))
        box = torch.frombuffer(data, dtype=dtype).view((rows, *self.sizes[1:]) if sizes else ())
        for axis in range(1, len(sizes)):
            box = box.narrow(axis, begin[axis] - self.begin[axis], sizes[axis])
        return box


@dataclass(frozen=True, slots=True)
class Stored:
    """A whole tensor, of which each number is in one of the chunks."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    def read_into(self, target: Tensor, begin: Sequence[int]) -> None:
        """Fill `target`, whose first number is that at `begin` of the whole."""
        for chunk in self.chunks:
            pairs = [*zip(begin, target.shape, chunk.begin, chunk.sizes, strict=True)]
            at = [max(a, b) for a, _, b, _ in pairs]
            sizes = [min(a + m, b + n) - f for f, (a, m, b, n) in zip(at, pairs, strict=True)]
            if any(size <= 0 for size in sizes):
                continue
            into = target
            for axis, size in enumerate(sizes):
                into = into.narrow(axis, at[axis] - begin[axis], size)
            into.copy_(chunk.read(self.dtype, at, sizes))

    def read(self) -> Tensor:
        """Return the whole tensor."""
        whole = torch.empty(self.shape, dtype=self.dtype)
        self.read_into(whole, [0] * len(self.shape))
        return whole


Index = Mapping[str, Stored]


def describe(pieces: list[Piece], written: Written, file: str) -> dict[str, Any]:
    """Return the part of the index for what one rank wrote."""
    pairs = zip(pieces, written.starts, strict=True)
    return {p.part.name: entry_of(p.part, p.local, file=file, start=start) for p, start in pairs}


def entry_of(part: Part, local: Tensor, *, file: str, start: int) -> dict[str, Any]:
    """Return what the index says of a tensor of which this rank writes a part."""
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


def index_of(tensors: dict[str, Any], source_of: Callable[[str], Source]) -> Index:
    """Return the index of the tensors that `join` described; `source_of` finds a file by its name.

    Raises one of `INVALID` where a part is missing, or cannot be so.
    """
    return {name: _read_entry(source_of, name, entry) for name, entry in tensors.items()}


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
    covered = sum(math.prod(chunk.sizes) for chunk in chunks.values())
    if covered != math.prod(shape):
        raise ValueError(f"{name}: {covered} of its {math.prod(shape)} values are there")
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
            index[name].read_into(local_part(tensor).detach(), parts[name].begin)
    except Exception as error:  # whatever it is: the others wait for this rank
        problem = f"rank {dist.get_rank()}: {error}"
    for told in exchange.all_gather(problem):
        if told is not None:
            raise OSError(told)
