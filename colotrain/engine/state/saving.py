"""Saving in the background: a thread writes state that does not change, one save at a time.

Parameters and optimizer state do not change until the next update, so the thread writes them from
where they are while training computes the next step's gradients. What is not written when the
update comes is copied first. State that may change earlier or is on a GPU is copied at once.

The thread uses no collective, which could get mixed up with training's.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from colotrain.engine.comms import exchange
from colotrain.engine.comms.shared_memory import available_bytes
from colotrain.engine.offload.page_locked import Pages, page_locked
from colotrain.engine.state.manifest import Manifest
from colotrain.engine.state.save import Save
from colotrain.engine.state.shard_file import POLL_S, Piece
from colotrain.errors import ColotrainError
from colotrain.events.kinds import CheckpointStarted, Note
from colotrain.events.log import EventWriter
from colotrain.rundir import RunDir
from colotrain.spec.plan import RunPlan

LINGER_S = 60.0
SHARE_OF_FREE_MEMORY = 0.9

_numbers = itertools.count()
"""Numbers of this process's saves, the same on every rank, for names in the store and on disk."""


@dataclass(slots=True, kw_only=True)
class Saver:
    """Writes the checkpoints of a run. All ranks must have one and make the same calls."""

    plan: RunPlan
    rundir: RunDir
    events: EventWriter
    token: str
    """Random text, the same on every rank and different in each attempt."""
    beat: Callable[[], None] = lambda: None
    """Function called repeatedly while training waits for the disk."""
    began_at: float = field(default_factory=time.monotonic)
    """Monotonic seconds at which the last save, or else this attempt, began."""
    current: Save | None = None
    saved_step: int = -1
    can_be_saved: bool = False
    """Whether the state was checked and a checkpoint can hold it."""
    restored: set[str] = field(default_factory=set)
    """Names of the parameters that came from a checkpoint."""
    sources: dict[str, str] = field(default_factory=dict)
    """Identities of the data and models that are read; on rank 0, which writes manifests."""
    files_in_place: dict[Path, str] = field(default_factory=dict)
    """Token files that are read where they are, with their versions; on rank 0."""
    image: Tensor | None = None
    """Memory for copies, laid out like the file; pages take memory once copies are written."""

    @staticmethod
    def make(plan: RunPlan, rundir: RunDir, events: EventWriter) -> Saver:
        """Make a saver. All ranks must call."""
        token = exchange.broadcast(os.urandom(4).hex())
        return Saver(plan=plan, rundir=rundir, events=events, token=token)

    def is_due_by_time(self) -> bool:
        """Whether `checkpoint.every` as a duration has passed since this rank's last save began."""
        return 0 < self.plan.checkpoint.every_s <= time.monotonic() - self.began_at

    def begin(self, pieces: list[Piece], manifest: Manifest, *, background: bool = True) -> None:
        """Save the state that `pieces` describe. The state may change once this returns.

        Only pieces that last must not change before `before_update`. Without `background` it
        returns when the checkpoint is written. Waits for the save before. A failed save is
        announced and has no other effect.
        """
        started, self.began_at = time.perf_counter(), time.monotonic()
        self.wait()
        number, final = next(_numbers), self.rundir.checkpoint(manifest.step)
        # unique to this attempt, so that no old folder of this name must be removed first
        label = f".{final.name}.{self.token}-{number}.tmp"
        save = self.current = Save(
            number=number,
            temporary=final.with_name(label),
            final=final,
            pieces=list(pieces),
            manifest=manifest,
            keep=self.plan.checkpoint.keep,
            patience_s=self.plan.elastic.hang_timeout_s + 60,
        )
        if dist.get_rank() == 0:
            self.events.write(CheckpointStarted(step=manifest.step, bytes=save.num_bytes))
        background = background and self.plan.checkpoint.async_
        if not background or not self._make_room(save):
            save.write(self.events, self.beat)
            return
        self._copy(save, [n for n, p in enumerate(pieces) if p.local.is_cuda or not p.lasts])
        save.stall_s = time.perf_counter() - started
        self._start(save)

    def _start(self, save: Save) -> None:
        """Write in the background; at once where no further thread may be started."""
        save.thread = threading.Thread(
            target=save.write, args=(self.events, lambda: None), name="checkpoint", daemon=True
        )
        try:
            save.thread.start()
        except RuntimeError as error:  # as under `ulimit -u`
            save.thread = None
            what = f"warning: checkpoint of step {save.manifest.step}: {error}"
            self.events.write(Note(text=f"{what}; training waits until it is written"))
            save.write(self.events, self.beat)

    def before_update(self) -> None:
        """Allow the state to change: copy the part that the current save has not written yet."""
        save = self.current
        if save is None or save.thread is None or not save.thread.is_alive():
            return
        started = time.perf_counter()
        with save.lock.replace(lambda: self._waiting(save)) as first:
            still = range(first, len(save.pieces))
            self._copy(save, [n for n in still if not save.pieces[n].is_copy])
        save.stall_s += time.perf_counter() - started

    def wait(self) -> str | None:
        """Wait for the current save; returns the error of the last one, or None."""
        save = self.current
        if save is None or save.thread is None:
            return save.error if save else None
        while save.thread.is_alive():
            save.thread.join(POLL_S)
            self._waiting(save)
        return save.error

    def _waiting(self, save: Save) -> None:
        """Called while training waits for a save, which has a timeout."""
        self.beat()
        if save.timeout.is_over():
            who = "" if save.awaits is None else f", without a report of rank {save.awaits}"
            raise ColotrainError(
                f"checkpoint of step {save.manifest.step}: not written within "
                f"{save.timeout.limit_s:.0f} s{who}",
                f"see that {self.rundir.checkpoints} is on a disk that answers",
            )

    def linger(self) -> None:
        """Give the current save time to end although the run has failed; never raises."""
        if self.current is not None and self.current.thread is not None:
            self.current.thread.join(LINGER_S)

    def _make_room(self, save: Save) -> bool:
        """Allocate memory to copy the whole state; returns whether there is enough."""
        room = save.layout.num_bytes
        if self.image is None or len(self.image) < room:
            self.image = None  # freed before the new one is made
            if room * self.plan.cluster.procs_per_node > SHARE_OF_FREE_MEMORY * available_bytes():
                return False
            on_gpu = any(piece.local.is_cuda for piece in save.pieces)
            self.image = page_locked(room) if on_gpu else Pages.allocate(room).tensor(room)
        return True

    def _copy(self, save: Save, chosen: list[int]) -> None:
        """Replace pieces by copies in the image."""
        assert self.image is not None
        for index in chosen:
            piece, start = save.pieces[index], save.layout.starts[index]
            local = self.image[start : start + piece.local.nbytes].view(piece.local.dtype)
            local = local.view(piece.local.shape).copy_(piece.local)
            save.pieces[index] = replace(piece, local=local, is_copy=True)
