"""Tensors of a checkpoint, read one at a time for an export."""

from __future__ import annotations

import functools
from pathlib import Path

from torch import Tensor

from colotrain.engine.optim.schedule_free import averaged
from colotrain.engine.state.checkpoint import step_of
from colotrain.engine.state.index import Index, read_index
from colotrain.engine.state.manifest import Manifest, complete, damage, read_manifest
from colotrain.errors import UsageError
from colotrain.export.stream import Entry
from colotrain.rundir import RunDir
from colotrain.spec.optimizers import optimizer_of

PREFIX = "model."


class CheckpointTensors:
    """The model's unsharded tensors in a checkpoint, by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        manifest, index = read_manifest(folder), read_index(folder)
        self.left_out: tuple[str, ...] = manifest.left_out
        """Names of the parameters that are not in the checkpoint, since they were never trained."""
        self.began_with, self.beneath = manifest.began_with, manifest.beneath
        self.entries = {
            (name := key.removeprefix(PREFIX)): Entry(
                name=name,
                shape=stored.shape,
                dtype=stored.dtype,
                read=functools.partial(read_evaluated, name, index, manifest),
            )
            for key, stored in index.items()
            if key.startswith(PREFIX)
        }


def read_evaluated(name: str, index: Index, manifest: Manifest) -> Tensor:
    """Read a tensor as the run was evaluated with it: of some optimizers, a mean over all steps."""
    tensor, optim = index[f"{PREFIX}{name}"].read(), manifest.plan.get("optim", {})
    z = index.get(f"optim.{name}.z")
    if z is None or not optimizer_of(str(optim.get("name"))).averages:
        return tensor
    return averaged(tensor, z.read(), optim["betas"][0])


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
