"""A run's state as it is copied to the launcher's memory, and restored from there."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from colotrain.engine.model import generators
from colotrain.engine.parts.part_map import Part, local_part
from colotrain.engine.state import plain_state, sources
from colotrain.engine.state.checkpoint import began_with, fill, manifest_of
from colotrain.engine.state.index import load
from colotrain.engine.state.memory_copy import Copied
from colotrain.engine.state.pieces import (
    buffers_of,
    model_state,
    own_name,
    parts_of,
    tensors_of,
    unchanged,
    written_here,
)
from colotrain.engine.state.run_state import Run
from colotrain.engine.state.whole_copy import WholeCopy
from colotrain.errors import ColotrainError
from colotrain.events.kinds import Note, Resumed
from colotrain.records import to_plain
from colotrain.spec.phases import Phase


def copy_to_memory(run: Run, *, again: bool = False) -> None:
    """Copy this rank's part of the state after `run.step` steps, where a copy is due.

    With `again` a copy is replaced that was made of the same step, before it was evaluated.
    """
    copies = run.copies
    if copies is None or not (copies.step == run.step if again else copies.is_due(run.step)):
        return
    run.at(Phase.MEMORY_COPY)
    started = time.perf_counter()
    try:
        if run.tiers is not None and run.tiers.placement.streams:
            raise OSError("the state is on disk (plugin=gemini)")
        state = held(run)
        if copies.parts.keys() != state.keys():
            began = time.perf_counter()
            copies.parts = copied_parts(run, state)
            started += time.perf_counter() - began  # later copies take as long as one another
        manifest, changing = manifest_of(run, progress_only=True), buffers_of(run, state)
        copies.take(state, manifest, started, changing)
    except (ColotrainError, OSError) as error:  # state that is no plain data, or too little memory
        copies.end(str(error))
        run.copies = None


def finish_copy(run: Run) -> None:
    """Wait until the copy of the last step is whole (on a GPU it is made beside other work).

    Call it before the ranks meet: only then may one of them begin the next copy.
    """
    copies = run.copies
    if copies is None:
        return
    try:
        copies.finish()
    except OSError as error:
        copies.end(str(error))
        run.copies = None


def held(run: Run) -> dict[str, Tensor]:
    """Return flat name → what this rank holds of the state, with the names of a checkpoint."""
    shards, skipped = run.optimizer.shards, unchanged(run)
    state: dict[str, Tensor] = {}
    for name, tensor in model_state(run.sharded):
        if name not in skipped:
            known = shards.get(name)  # finding the local part of a DTensor takes far longer
            state[f"model.{name}"] = local_part(tensor) if known is None else known
    for name, values in run.optimizer.held_state().items():
        state |= {f"optim.{name}.{key}": value for key, value in values.items()}
    state |= plain_state.encoded(run)
    return state | {f"rng.{run.rank}{n}": t for n, t in generators.states(run.device).items()}


def copied_parts(run: Run, state: Mapping[str, Tensor]) -> dict[str, Part | None]:
    """Return which part of the whole each tensor of `held` is; None where another rank tells it.

    Buffers are told by every rank, as this rank's own.
    """
    tensors = tensors_of(run, unchanged(run))
    found: dict[str, Part | None] = dict.fromkeys(state)
    names = buffers_of(run, tensors)
    own = parts_of(run, {own_name(run, name): tensors[name] for name in names})
    found |= {name: own[own_name(run, name)] for name in names}
    return found | {piece.part.name: piece.part for piece in written_here(run, tensors)}


def restore(run: Run, copied: Copied | WholeCopy) -> None:
    """Read a copy of the state into `run`: this rank's own, or its parts of a whole.

    All ranks must call.
    """

    def load_own(wanted: dict[str, Tensor]) -> None:
        assert isinstance(copied, Copied)
        copied.file.read_into({name: local_part(tensor) for name, tensor in wanted.items()})

    def load_parts(wanted: dict[str, Tensor]) -> None:
        assert isinstance(copied, WholeCopy)
        load(wanted, parts_of(run, wanted), copied.index)

    if run.rank == 0:
        for text in sources.warnings_of(run, copied.manifest, []):
            run.events.write(Note(text=f"warning: the copy in memory {text}"))
    whole = replace(copied.manifest, plan=to_plain(run.plan))
    whole = replace(whole, began_with=began_with(run) if whole.left_out else {})
    how = load_own if isinstance(copied, Copied) else load_parts
    fill(run, Path("memory"), whole, copied.sizes(), how)
    dist.barrier()  # ranks may read one another's part of shared parameters
    if run.rank == 0:
        run.events.write(Resumed(step=run.step, path="", in_memory=True))
