"""The state that a run goes on from: the newest that is intact, the same on every rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from colotrain.engine.comms import exchange
from colotrain.engine.state.checkpoint import restore, restore_copy, step_of
from colotrain.engine.state.index import read_index
from colotrain.engine.state.manifest import candidates, complete, damage, tidy, where_to_resume
from colotrain.engine.state.memory_copy import MemoryCopies
from colotrain.engine.state.run_state import Run
from colotrain.engine.state.whole_copy import Copied
from colotrain.errors import ColotrainError, UsageError
from colotrain.events.kinds import Note
from colotrain.events.log import EventWriter
from colotrain.models.objective import kept_of
from colotrain.rundir import RunDir
from colotrain.spec.plan import RunPlan
from colotrain.spec.teacher import teacher_of


@dataclass(frozen=True, slots=True)
class StartingPoint:
    """The state from which a run goes on: a copy in memory, a checkpoint, or none."""

    copies: MemoryCopies | None
    copied: Copied | None
    resumed: Path | None

    @staticmethod
    def choose(plan: RunPlan, rundir: RunDir, events: EventWriter) -> StartingPoint:
        """Choose the newest state that every rank can read. All ranks must call."""
        copies = MemoryCopies.open(plan, events)
        copied = copies.choose() if copies is not None else None
        step = copied.step if copied else 0
        resumed = choose_checkpoint(plan, rundir, events, unless_before=step)
        return StartingPoint(copies, copied if resumed is None else None, resumed)

    @property
    def step(self) -> int:
        return self.copied.step if self.copied else step_of(self.resumed)

    def restore_(self, run: Run) -> None:
        """Read the state into `run`, and begin to copy it. All ranks must call."""
        if self.copied is not None:
            restore_copy(run, self.copied)
        elif self.resumed is not None:
            restore(run, self.resumed)
        if self.copies is not None:
            self.copies.begin(self.copied, run.step, run.device)

    def names_to_restore(self, plan: RunPlan) -> set[str]:
        """Return the parameters and buffers that a copy or a checkpoint will give their values.

        Empty where the run computes something with the initial values first
        (`engine.step.precompute`).
        """
        stored: Iterable[str] = ()
        if self.copied is not None:
            stored = self.copied.index
        elif self.resumed is not None:
            stored = read_index(self.resumed)
        if kept_of(plan.model) is not None and teacher_of(plan.model, plan.train.precision) is None:
            return set()
        return {name.removeprefix("model.") for name in stored if name.startswith("model.")}


def choose(folder: Path, events: EventWriter) -> Path | None:
    """Return the newest intact checkpoint in `folder` (or `folder` itself if it is one), or None.

    All ranks must call, and all get the same; each checks a part of the files. If there are
    checkpoints and none is intact, that is an error.
    """
    known = _candidates(folder)
    for path in known:
        found = damage(path, part=dist.get_rank(), parts=dist.get_world_size())
        if not exchange.is_any(found is not None):
            return path
        if found is not None:
            events.write(Note(text=f"warning: checkpoint {path.name} passed over: {found}"))
    if known:
        raise ColotrainError(
            f"{folder}: none of {len(known)} checkpoints is intact ({damage(known[0])})",
            "start again with another name, or give checkpoint.resume=PATH of an older one",
        )
    return None


def _candidates(folder: Path) -> list[Path]:
    """Return the checkpoints to try, the same on every rank: rank 0 looks and tells the others."""
    names = [str(path) for path in candidates(folder)] if dist.get_rank() == 0 else []
    return [Path(name) for name in exchange.broadcast(names)]


def choose_checkpoint(
    plan: RunPlan, rundir: RunDir, events: EventWriter, *, unless_before: int = 0
) -> Path | None:
    """Return the checkpoint to resume from, or None. All ranks must call.

    None, too, if the newest checkpoint is not after step `unless_before`, of which there is a copy
    in memory.
    """
    newer = True
    if dist.get_rank() == 0:
        tidy(rundir.checkpoints)
        if unless_before:
            newest = complete(rundir.checkpoints)[:1]
            newer = any(path.name > rundir.checkpoint(unless_before).name for path in newest)
    if not exchange.broadcast(newer):
        return None
    where = where_to_resume(plan, rundir)
    resumed = choose(where, events)
    if resumed is None and where != rundir.checkpoints:
        raise UsageError(
            f"checkpoint.resume={plan.checkpoint.resume}: holds no complete checkpoint",
            "give a run or a checkpoint folder that does",
        )
    return resumed
