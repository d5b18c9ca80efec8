"""Copies of the last steps' state in the launcher's memory, from which its workers restart.

After a step each rank copies what it holds of the state into one of its two files, in turn, so
that one whole copy exists at any moment. A rank begins a copy only after all ranks have finished
the one before: between two copies the ranks meet in a step's all-reduce. So the newest copy that
all ranks have is at most one step old. A copy can be read only by the rank that made it, in a run
of as many ranks; otherwise the run goes on from its last checkpoint.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from colotrain import host
from colotrain.engine.checkpoint.buddy import Buddy
from colotrain.engine.checkpoint.manifest import Manifest
from colotrain.engine.checkpoint.memory_file import FIRST, MemoryFile
from colotrain.errors import ConfigError
from colotrain.events.kinds import MemoryCopied, Note
from colotrain.events.log import EventWriter
from colotrain.records import from_plain, to_plain
from colotrain.spec.elastic import COPY_KEEPER, MEMORY_FILES
from colotrain.spec.plan import RunPlan

ABOUT_BYTES = 1 << 20
"""Bytes that are reserved for the description of a copy, beside its tensors."""
SHARE_OF_FREE_MEMORY = 0.9
SMOOTHING = 0.2
"""Weight of the newest copy in the mean cost of copies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """A copy that every rank has."""

    number: int
    """Number of the copy in this launch."""
    file: MemoryFile
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step

    def sizes(self) -> dict[str, int]:
        return self.file.sizes()


@dataclass(slots=True, kw_only=True)
class MemoryCopies:
    """This rank's copies, and how often they are made. All ranks must make the same calls."""

    plan: RunPlan
    events: EventWriter
    files: list[MemoryFile]
    buddy: Buddy | None = None
    """Where copies are also sent, on another node; None where there is no other node."""
    number: int = 0
    """Number of the newest copy."""
    valid: int = 0
    """Number of the newest copy that is not void; 0 where there is none."""
    step: int = 0
    """Step of the newest copy, or from which this attempt began."""
    every: int = 1
    """Steps between two copies."""
    cost: float | None = None
    """Mean duration of a copy, as a multiple of a step's."""
    seconds: float = 0.0
    """Seconds that this rank's last copy took."""
    resumed: bool = False
    """Whether this attempt went on from a copy."""
    told_every: int = 0
    """`every` in the last event about the copies; 0 before the first."""

    @staticmethod
    def open(plan: RunPlan, events: EventWriter) -> MemoryCopies | None:
        """Open this rank's files; None where the plan or any launcher has none. All must call."""
        if not plan.elastic.memory_copy.enabled:
            return None
        paths, files = os.environ.get(MEMORY_FILES, "").split(os.pathsep), []
        try:
            files = [MemoryFile(path) for path in paths]
        except OSError as error:
            _say_none(events, f"the launcher's memory cannot be reached ({error})")
        missing = torch.tensor(float(not files))
        dist.all_reduce(missing)
        if missing.item():
            return None
        copies = MemoryCopies(plan=plan, events=events, files=files)
        if keeper := os.environ.get(COPY_KEEPER):
            try:
                copies.buddy = Buddy(keeper, dist.get_rank())
            except (OSError, ValueError) as error:
                copies.lose_buddy(error)
        return copies

    def choose(self) -> Copied | None:
        """Return the newest copy that every rank has whole. All ranks must call."""
        read = [found for file in self.files if (found := self._read(file))]
        mine = {(found.number, found.step): found for found in read}
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, list(mine))
        self.number = max((number for keys in everyone for number, _ in keys), default=0)
        for key in sorted(set.intersection(*map(set, everyone)), reverse=True):
            bad = torch.tensor(float(not mine[key].file.is_intact()))
            dist.all_reduce(bad)
            if bad.item() == 0:
                return mine[key]
        return None

    def _read(self, file: MemoryFile) -> Copied | None:
        about = file.read()
        if about is None or about["rank"] != [dist.get_rank(), dist.get_world_size()]:
            return None
        try:
            manifest = from_plain(Manifest, about["manifest"])
        except ConfigError:
            return None
        return Copied(number=about["number"], file=file, manifest=manifest)

    def begin(self, copied: Copied | None, step: int) -> None:
        """Begin an attempt after `step` steps: every copy but the one it resumed from is void."""
        self.step, self.resumed = step, copied is not None
        self.valid = copied.number if copied is not None else 0
        for file in self.files:
            if copied is None or file is not copied.file:
                file.clear()
        if copied is not None and copied.file is self.files[0]:
            self.files.reverse()  # the other one is overwritten first

    def clear(self) -> None:
        """Make all copies void, because the state that they hold must not come back."""
        for file in self.files:
            file.clear()
        self.step, self.valid = -1, 0

    def is_due(self, step: int) -> bool:
        return self.step < 0 or step - self.step >= self.every

    def note_durations(self, step_s: float, copy_s: float) -> None:
        """Choose how often to copy, from the mean seconds of all ranks: the same on every rank."""
        share = self.plan.elastic.memory_copy.share
        if share and step_s > 0 and copy_s > 0:
            now = copy_s / step_s
            self.cost = now if self.cost is None else self.cost + SMOOTHING * (now - self.cost)
            self.every = max(1, math.ceil(self.cost / share))

    def take(self, tensors: Mapping[str, Tensor], manifest: Manifest, started: float) -> None:
        """Copy the state; `OSError` where memory is short.

        `started` is when this copy began, by the performance counter.
        """
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        started += self._reserve(FIRST + num_bytes + ABOUT_BYTES)
        about = {
            "number": self.number + 1,
            "rank": [dist.get_rank(), dist.get_world_size()],
            "manifest": to_plain(manifest),
        }
        self.files[0].write(tensors, about)
        if self.buddy is not None:
            try:
                self.buddy.send(self.files[0], self.number + 1, beside=self.valid)
            except (OSError, ValueError) as error:
                self.lose_buddy(error)
        self.files.reverse()
        self.valid = self.number + 1
        self.number, self.step = self.number + 1, manifest.step
        self.seconds = time.perf_counter() - started
        self._tell(num_bytes)

    def lose_buddy(self, error: Exception) -> None:
        """Go on with copies on this node alone, and say so."""
        self.buddy = None
        text = f"warning: rank {dist.get_rank()}: no other node keeps copies of its state: {error}"
        self.events.write(Note(text=text))

    def end(self, why: str) -> None:
        """Make no more copies, and say why."""
        self.clear()
        _say_none(self.events, why)

    def _reserve(self, num_bytes: int) -> float:
        """Take memory for both copies at once; returns the seconds, which only first copies take.

        Later copies then take as long as one another.
        """
        began = time.perf_counter()
        missing = sum(max(0, num_bytes - file.num_bytes) for file in self.files)
        if not missing:
            return 0.0
        ranks = self.plan.cluster.procs_per_node
        if missing * ranks > SHARE_OF_FREE_MEMORY * host.free_bytes():
            raise OSError(f"{missing * ranks >> 20} MiB more are needed, and not free")
        for file in self.files:
            file.reserve(num_bytes)
        return time.perf_counter() - began

    def _tell(self, num_bytes: int) -> None:
        """Write an event on rank 0 about the first copy, and when they become rarer or denser."""
        changed = not self.told_every / 4 < self.every < 4 * self.told_every
        if dist.get_rank() == 0 and changed:
            self.told_every = self.every
            self.events.write(
                MemoryCopied(
                    step=self.step, bytes=num_bytes, seconds=self.seconds, every=self.every
                )
            )


def _say_none(events: EventWriter, why: str) -> None:
    rank = dist.get_rank()
    text = f"warning: rank {rank}: no copies of the state in memory: {why}; restarts go on from "
    events.write(Note(text=f"{text}checkpoints"))
