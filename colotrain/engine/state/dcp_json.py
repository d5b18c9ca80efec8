"""torch.distributed.checkpoint storage without pickle: raw tensor bytes and an index in JSON.

DCP's own storage pickles its index and wraps each tensor in an archive. Here no file that is read
can name code to run, and a rank reads only the rows that it needs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import LoadPlan, LoadPlanner, StorageReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.futures import Future

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


def describe(pieces: list[Piece], written: Written, file: str) -> dict[str, Any]:
    """Return the part of the index for what one rank wrote."""
    tensors = {}
    for piece, start in zip(pieces, written.starts, strict=True):
        name, shape = piece.part.name, list(piece.part.whole)
        box = {"offsets": list(piece.part.begin), "sizes": list(piece.local.shape)}
        place = {"file": file, "start": start, "length": piece.local.nbytes}
        dtype = str(piece.local.dtype).removeprefix("torch.")
        tensors[name] = {"dtype": dtype, "shape": shape, "chunks": [box | place]}
    return tensors


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


def read_index(folder: Path) -> Metadata:
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


def index_of(tensors: dict[str, Any], source_of: Callable[[str], Source]) -> Metadata:
    """Return the index of the tensors that `join` described; `source_of` finds a file by its name.

    Raises one of `INVALID` where a part is missing, or cannot be so.
    """
    found: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    stored: dict[MetadataIndex, Any] = {}
    for name, entry in tensors.items():
        found[name] = _read_entry(source_of, name, entry, stored)
    return Metadata(state_dict_metadata=found, storage_data=stored)


def _read_entry(
    source_of: Callable[[str], Source],
    name: str,
    entry: dict[str, Any],
    stored: dict[MetadataIndex, Any],
) -> TensorStorageMetadata:
    dtype, shape = getattr(torch, entry["dtype"]), _sizes(entry["shape"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{entry['dtype']} is no dtype")
    chunks, covered = [], 0
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
        covered += math.prod(sizes)
        chunks.append(ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes)))
        index = MetadataIndex(name, torch.Size(offsets))
        if index in stored:
            raise ValueError(f"{name}: a part of it is there twice")
        stored[index] = (source, start, tuple(sizes), dtype)
    if covered != math.prod(shape):
        raise ValueError(f"{name}: {covered} of its {math.prod(shape)} values are there")
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=dtype), size=torch.Size(shape), chunks=chunks
    )


def _sizes(values: Any) -> list[int]:
    if not isinstance(values, list) or not all(type(v) is int and 0 <= v < 1 << 62 for v in values):
        raise ValueError(f"{values!r} are no sizes")
    return values


class JsonIndexReader(StorageReader):
    """Reads a checkpoint for `torch.distributed.checkpoint.load`."""

    def __init__(self, index: Metadata) -> None:
        self.index = index
        self.stored: dict[MetadataIndex, Any] = {}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.index

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        self.stored = metadata.storage_data or {}

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            target = planner.resolve_tensor(item).detach()
            target.copy_(self._read(item).view(target.shape))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, item: ReadItem) -> Tensor:
        """Read the box that `item` asks for; in dimension 0 only its rows are read."""
        source, start, sizes, dtype = self.stored[item.storage_index]
        offsets, lengths = tuple(item.storage_offsets), tuple(item.lengths)
        row = math.prod(sizes[1:]) * dtype.itemsize
        first, rows = (offsets[0], lengths[0]) if sizes else (0, 1)
        data = bytearray(rows * row)
        if not data:
            return torch.empty(lengths, dtype=dtype)
        source.read_into(start + first * row, memoryview(data))
        read = torch.frombuffer(data, dtype=dtype).view((rows, *sizes[1:]) if sizes else ())
        for axis in range(1, len(sizes)):
            read = read.narrow(axis, offsets[axis], lengths[axis])
        return read


class Target(Tensor):
    """A part of a tensor, which torch's loading fills from files that have other parts.

    It has the methods by which DTensor takes part in loading; torch takes only tensors.
    """

    local: Tensor
    part: Part

    @staticmethod
    def of(local: Tensor, part: Part) -> Target:
        target = torch.empty(0, dtype=local.dtype).as_subclass(Target)  # only asked for its parts
        target.local, target.part = local, part
        return target

    def size(self, dim: int | None = None) -> Any:
        whole = torch.Size(self.part.whole)
        return whole if dim is None else whole[dim]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        begin = torch.Size(self.part.begin)
        return [ChunkStorageMetadata(offsets=begin, sizes=self.local.shape)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.local


def load(tensors: Mapping[str, Tensor], parts: Mapping[str, Part], index: Metadata) -> None:
    """Fill `tensors`, which are these parts of whole ones, from a checkpoint with this index.

    All ranks must call. `OSError` on all of them where one cannot read, and `UsageError` where the
    index has another shape.
    """
    for name, part in parts.items():
        stored: Any = index.state_dict_metadata[name]
        if part.whole != (shape := tuple(stored.size)):
            own, _, key = name.partition(".")
            raise UsageError(
                f"{key if own == 'model' else name}: {part.whole} here, {shape} in the checkpoint",
                "resume with the model that the checkpoint was made from",
            )
    state: dict[str, Any] = {
        name: Target.of(local_part(tensor), parts[name]) if parts[name].divided else tensor
        for name, tensor in tensors.items()
    }
    try:
        dcp.load(state, storage_reader=JsonIndexReader(index))
    except dcp.api.CheckpointException as error:  # a BaseException, which would look like a kill
        rank, (cause, _) = next(iter(error.failures.items()))
        raise OSError(f"rank {rank}: {cause}") from error
