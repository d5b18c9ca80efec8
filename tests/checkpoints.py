"""Reading checkpoints in tests."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import load
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from colotrain.engine.state.dcp_json import JsonIndexReader, read_index


def read_whole(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, whole, read in this process without a process group."""
    return read_all(read_index(folder))


def read_all(index: Metadata) -> dict[str, Tensor]:
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in index.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    load(state, storage_reader=JsonIndexReader(index), no_dist=True)
    return state
