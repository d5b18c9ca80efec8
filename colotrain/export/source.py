"""Tensors of a checkpoint, read one at a time for an export."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from colotrain.engine.state.checkpoint import step_of
from colotrain.engine.state.dcp_json import JsonIndexReader, read_index
from colotrain.engine.state.manifest import complete, damage, read_manifest
from colotrain.errors import UsageError
from colotrain.export.stream import Entry
from colotrain.rundir import RunDir

PREFIX = "model."


class CheckpointTensors:
    """The model's unsharded tensors in a checkpoint, by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index = read_index(folder)
        self._reader = JsonIndexReader(self.index)
        self.left_out: tuple[str, ...] = read_manifest(folder).left_out
        """Names of the parameters that are not in the checkpoint, since they were never trained."""
        self.entries = {entry.name: entry for entry in self._entries()}

    def _entries(self) -> Iterator[Entry]:
        for key, stored in self.index.state_dict_metadata.items():
            if key.startswith(PREFIX) and isinstance(stored, TensorStorageMetadata):
                yield Entry(
                    name=key.removeprefix(PREFIX),
                    shape=tuple(stored.size),
                    dtype=stored.properties.dtype,
                    read=self._read(key, stored),
                )

    def _read(self, key: str, stored: TensorStorageMetadata) -> Callable[[], Tensor]:
        def read() -> Tensor:
            whole = torch.empty(stored.size, dtype=stored.properties.dtype)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # there is one process only
                dcp.load({key: whole}, storage_reader=self._reader, no_dist=True)
            return whole

        return read


def choose(rundir: RunDir, step: int | None) -> Path:
    """The newest checkpoint, or that of `step`; raises `UsageError` if it is absent or damaged."""
    known = complete(rundir.checkpoints)
    if step is not None:
        known = [path for path in known if path == rundir.checkpoint(step)]
    if not known:
        steps = ", ".join(str(step_of(path)) for path in complete(rundir.checkpoints)) or "none"
        what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        raise UsageError(f"{rundir.path}: {what}", f"there are: {steps}")
    if (wrong := damage(known[0])) is not None:
        others = ", ".join(str(step_of(p)) for p in complete(rundir.checkpoints) if p != known[0])
        fix = f"give another with --step ({others})" if others else "there is no other"
        raise UsageError(f"the checkpoint is damaged: {wrong}", fix)
    return known[0]
