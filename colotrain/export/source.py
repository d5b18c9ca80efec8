"""Tensors of a checkpoint, read one at a time for an export."""

from __future__ import annotations

from pathlib import Path

from colotrain.engine.state.checkpoint import step_of
from colotrain.engine.state.index import read_index
from colotrain.engine.state.manifest import complete, damage, read_manifest
from colotrain.errors import UsageError
from colotrain.export.stream import Entry
from colotrain.rundir import RunDir

PREFIX = "model."


class CheckpointTensors:
    """The model's unsharded tensors in a checkpoint, by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.left_out: tuple[str, ...] = read_manifest(folder).left_out
        """Names of the parameters that are not in the checkpoint, since they were never trained."""
        self.entries = {
            (name := key.removeprefix(PREFIX)): Entry(
                name=name, shape=stored.shape, dtype=stored.dtype, read=stored.read
            )
            for key, stored in read_index(folder).items()
            if key.startswith(PREFIX)
        }


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
