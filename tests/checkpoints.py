"""Reading checkpoints in tests."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from colotrain.engine.state.index import Index, read_index


def read_whole(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, whole, read in this process without a process group."""
    return read_all(read_index(folder))


def read_all(index: Index) -> dict[str, Tensor]:
    return {name: stored.read() for name, stored in index.items()}
