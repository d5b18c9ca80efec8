"""torch.distributed.checkpoint storage whose index is JSON, so that loading executes no code.

DCP's own writer pickles its index. Tensors stay in DCP's files, which are read `weights_only`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, load
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

INDEX = "index.json"


class JsonIndexWriter(FileSystemWriter):
    """Writes one file a rank, synced to disk, and `index.json` by the coordinator."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, single_file_per_rank=True, sync_files=True)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        stored = {r.index: r.storage_data for of_rank in results for r in of_rank}
        with (Path(self.path) / INDEX).open("w", encoding="utf-8") as out:
            json.dump(_encode(metadata, stored), out)
            out.flush()
            os.fsync(out.fileno())


class JsonIndexReader(FileSystemReader):
    """Reads what `JsonIndexWriter` wrote."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return read_index(Path(self.path))


def read_index(folder: Path) -> Metadata:
    """The index of a checkpoint; ValueError or KeyError where it is not one."""
    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    stored = {}
    for name, entry in json.loads((folder / INDEX).read_text("utf-8"))["tensors"].items():
        dtype = getattr(torch, entry["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{folder / INDEX}: {entry['dtype']} is no dtype")
        chunks = []
        for chunk in entry["chunks"]:
            offsets, sizes = torch.Size(chunk["offsets"]), torch.Size(chunk["sizes"])
            chunks.append(ChunkStorageMetadata(offsets=offsets, sizes=sizes))
            where = _StorageInfo(Path(chunk["file"]).name, chunk["start"], chunk["length"])
            stored[MetadataIndex(name, offsets)] = where
        tensors[name] = TensorStorageMetadata(
            properties=TensorProperties(dtype=dtype), size=torch.Size(entry["shape"]), chunks=chunks
        )
    return Metadata(state_dict_metadata=tensors, storage_data=stored)


def _encode(metadata: Metadata, stored: dict[MetadataIndex, _StorageInfo]) -> dict[str, Any]:
    tensors = {}
    for name, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata), f"{name} is not a tensor"
        chunks = []
        for chunk in entry.chunks:
            where = stored.get(MetadataIndex(name, chunk.offsets)) or stored[MetadataIndex(name)]
            place = {"file": where.relative_path, "start": where.offset, "length": where.length}
            box = {"offsets": list(chunk.offsets), "sizes": list(chunk.sizes)}
            chunks.append(box | place)
        dtype = str(entry.properties.dtype).removeprefix("torch.")
        tensors[name] = {"dtype": dtype, "shape": list(entry.size), "chunks": chunks}
    return {"schema": 1, "tensors": tensors}


def read_whole(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole, in this process. Needs no process group."""
    index = read_index(folder)
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in index.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(state, storage_reader=JsonIndexReader(folder), no_dist=True)
    return state
