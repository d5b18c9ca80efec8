"""Saving in the background: a thread writes state that does not change, one save at a time.

Parameters and optimizer state do not change until the next update, so the thread writes them from
where they are while training computes the next step's gradients. What is not written when the
update comes is copied first. State that may change earlier or is on a GPU is copied at once.

The thread uses no collective, which could get mixed up with training's. Each rank writes its own
file and reports the outcome through the process group's store; rank 0 publishes the checkpoint once
all have. All ranks write into a temporary folder, which is renamed when every file is synced and in
the manifest with its checksum.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from colotrain.engine.checkpoint.dcp_json import INDEX, describe, join
from colotrain.engine.checkpoint.manifest import (
    FileEntry,
    Manifest,
    checksum,
    prune,
    publish,
    write_manifest,
)
from colotrain.engine.checkpoint.shard_file import (
    POLL_S,
    Layout,
    NotFinite,
    Piece,
    PieceLock,
    write_pieces,
)
from colotrain.engine.shm.shared_memory import available_bytes
from colotrain.errors import ColotrainError
from colotrain.events.kinds import Checkpoint, CheckpointFailed, CheckpointStarted
from colotrain.events.log import EventWriter
from colotrain.rundir import RunDir, write_atomically
from colotrain.spec.plan import RunPlan
from colotrain.torch_internals import default_store

SLOWEST_BYTES_PER_S = 10e6
"""Bytes per second below which a disk counts as hanging."""
LINGER_S = 60.0
LONGEST_POLL_S = 0.5
SHARE_OF_FREE_MEMORY = 0.9

_numbers = itertools.count()
"""Numbers of this process's saves, the same on every rank, for names in the store and on disk."""


@dataclass(slots=True, kw_only=True)
class Save:
    """A checkpoint that is being written."""

    number: int
    final: Path
    temporary: Path
    pieces: list[Piece]
    """Pieces of the state to write, which are replaced by copies under `lock`."""
    layout: Layout
    lock: PieceLock
    manifest: Manifest
    started: float
    deadline: float
    stall_s: float = 0.0
    """Seconds for which training waited for this save."""
    error: str | None = None
    thread: threading.Thread | None = None

    def part(self, rank: int) -> Path:
        """Return the path where `rank` describes what it wrote, for rank 0 to join."""
        return self.temporary / f"__{rank}.json"


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
    image: Tensor | None = None
    """Memory for copies, laid out like the file; pages take memory once copies are written."""

    @staticmethod
    def make(plan: RunPlan, rundir: RunDir, events: EventWriter) -> Saver:
        """Make a saver. All ranks must call."""
        token = [os.urandom(4).hex()]
        dist.broadcast_object_list(token)
        return Saver(plan=plan, rundir=rundir, events=events, token=token[0])

    def is_due(self) -> bool:
        """Whether the last save began long enough ago, by this rank's clock."""
        return 0 < self.plan.checkpoint.every_s <= time.monotonic() - self.began_at

    def begin(self, pieces: list[Piece], manifest: Manifest, *, background: bool = True) -> None:
        """Save the state that `pieces` describe. The state may change once this returns.

        Only pieces that last must not change before `before_update`. Without `background` it
        returns when the checkpoint is written. Waits for the save before. A failed save is
        announced and has no other effect.
        """
        started, self.began_at = time.perf_counter(), time.monotonic()
        self.wait()
        save = self.current = self._new(pieces, manifest)
        if dist.get_rank() == 0:
            num_bytes = sum(piece.local.nbytes for piece in pieces)
            self.events.write(CheckpointStarted(step=manifest.step, bytes=num_bytes))
        background = background and self.plan.checkpoint.async_
        if not background or not self._make_room(save):
            self._write(save, self.beat)
            return
        self._copy(save, [n for n, p in enumerate(pieces) if p.local.is_cuda or not p.lasts])
        save.stall_s = time.perf_counter() - started
        save.thread = threading.Thread(
            target=self._write, args=(save, lambda: None), name="checkpoint", daemon=True
        )
        save.thread.start()

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
        """Called while training waits for a save, which may take no longer than its deadline."""
        self.beat()
        if time.monotonic() > save.deadline:
            raise ColotrainError(
                f"checkpoint of step {save.manifest.step}: not written within "
                f"{save.deadline - save.started:.0f} s",
                f"see that {self.rundir.checkpoints} is on a disk that answers",
            )

    def linger(self) -> None:
        """Give the current save time to end although the run has failed; never raises."""
        if self.current is not None and self.current.thread is not None:
            self.current.thread.join(LINGER_S)

    def _new(self, pieces: list[Piece], manifest: Manifest) -> Save:
        number, final = next(_numbers), self.rundir.checkpoint(manifest.step)
        num_bytes, now = sum(piece.local.nbytes for piece in pieces), time.monotonic()
        # unique to this attempt, so that no old folder of this name must be removed first
        label = f".{final.name}.{self.token}-{number}.tmp"
        return Save(
            number=number,
            final=final,
            temporary=final.with_name(label),
            pieces=list(pieces),
            layout=Layout.of(pieces),
            lock=PieceLock(),
            manifest=manifest,
            started=now,
            deadline=now
            + self.plan.elastic.hang_timeout_s
            + 60
            + num_bytes * dist.get_world_size() / SLOWEST_BYTES_PER_S,
        )

    def _make_room(self, save: Save) -> bool:
        """Allocate memory to copy the whole state; returns whether there is enough."""
        room = save.layout.num_bytes
        if self.image is None or len(self.image) < room:
            self.image = None  # freed before the new one is made
            if room * self.plan.cluster.procs_per_node > SHARE_OF_FREE_MEMORY * available_bytes():
                return False
            self.image = _pages(room, pinned=any(piece.local.is_cuda for piece in save.pieces))
        return True

    def _copy(self, save: Save, chosen: list[int]) -> None:
        """Replace pieces by copies in the image."""
        assert self.image is not None
        for index in chosen:
            piece, start = save.pieces[index], save.layout.starts[index]
            local = self.image[start : start + piece.local.nbytes].view(piece.local.dtype)
            local = local.view(piece.local.shape).copy_(piece.local)
            save.pieces[index] = replace(piece, local=local, is_copy=True)

    def _write(self, save: Save, beat: Callable[[], None]) -> None:
        """Write this rank's part and wait for the outcome of all. Never raises."""
        rank, store = dist.get_rank(), own_store()
        try:
            try:
                self._write_part(save, rank, beat)
            except (OSError, NotFinite) as error:
                save.error = f"rank {rank}: {error}"
            store.set(f"checkpoint/{save.number}/{rank}", save.error or "")
            if rank == 0:
                save.error = _outcomes(store, save, beat) or self._publish(save)
                store.set(f"checkpoint/{save.number}", save.error or "")
                self._report(save)
            else:
                save.error = _await(store, f"checkpoint/{save.number}", save, beat)
        except Exception as error:  # a bug, or rank 0 has ended and the store with it
            save.error = f"rank {rank}: {type(error).__name__}: {error}"
            traceback.print_exc(file=sys.stderr)

    def _write_part(self, save: Save, rank: int, beat: Callable[[], None]) -> None:
        save.temporary.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = save.temporary / f"__{rank}_0.distcp"
        written = write_pieces(
            file,
            save.pieces,
            layout=save.layout,
            lock=save.lock,
            report=lambda _: beat(),
        )
        entry = {"bytes": written.num_bytes, "xxh128": written.checksum}
        part = {"files": {file.name: entry}, "tensors": describe(save.pieces, written, file.name)}
        write_atomically(save.part(rank), json.dumps(part))

    def _publish(self, save: Save) -> str | None:
        """On rank 0, join the parts and rename the folder; returns the error, if any."""
        try:
            ranks = range(dist.get_world_size())
            parts = [json.loads(save.part(rank).read_text("utf-8")) for rank in ranks]
            index = save.temporary / INDEX
            write_atomically(index, json.dumps(join([part["tensors"] for part in parts])))
            for rank in ranks:
                save.part(rank).unlink()
            files = {n: FileEntry(**entry) for part in parts for n, entry in part["files"].items()}
            files[INDEX] = FileEntry(bytes=index.stat().st_size, xxh128=checksum(index))
            write_manifest(save.temporary, replace(save.manifest, files=files))
            publish(save.temporary, save.final)
        except OSError as error:
            return f"rank 0: {error}"
        with suppress(OSError):  # what cannot be deleted now is deleted after the next save
            best, keep = save.manifest.best_step, self.plan.checkpoint.keep
            prune(self.rundir.checkpoints, keep=keep, newest=save.final, best=best)
        return None

    def _report(self, save: Save) -> None:
        step, seconds = save.manifest.step, time.monotonic() - save.started
        if save.error is not None:
            shutil.rmtree(save.temporary, ignore_errors=True)
            failed = CheckpointFailed(step=step, error=save.error, seconds=seconds)
            self.events.write(failed)
            return
        stall_s = save.stall_s if save.thread else seconds
        self.events.write(
            Checkpoint(step=step, path=str(save.final), seconds=seconds, stall_s=stall_s)
        )


def _pages(num_bytes: int, *, pinned: bool) -> Tensor:
    """Allocate memory that begins at a page."""
    if pinned:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    pages = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)  # writing from few large pages is cheaper
    return torch.frombuffer(pages, dtype=torch.uint8)


def own_store() -> Any:
    """Make another connection to the store: another thread's wait must not block this one's."""
    return default_store().clone()


def _outcomes(store: Any, save: Save, beat: Callable[[], None]) -> str | None:
    """Wait for the outcome of every rank; returns the first error."""
    told = [
        _await(store, f"checkpoint/{save.number}/{rank}", save, beat)
        for rank in range(dist.get_world_size())
    ]
    return next((error for error in told if error), None)


def _await(store: Any, key: str, save: Save, beat: Callable[[], None]) -> str | None:
    pause_s = POLL_S
    while not store.check([key]):
        beat()
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, LONGEST_POLL_S)  # a thousand ranks may ask one store
        if time.monotonic() > save.deadline:
            return f"{key}: no rank has reported the outcome in time"
    return bytes(store.get(key)).decode() or None
