"""Saving in the background: a thread writes state that does not change, one save at a time.

Parameters and optimizer state do not change until the next update, so the thread writes them from
where they are while training computes the next step's gradients. What is not written when the
update comes is copied first. State that may change earlier or is on a GPU is copied at once.

Each rank writes its own file and reports the outcome through the process group's store; rank 0
publishes the checkpoint once all have. All ranks write into a temporary folder, which is renamed
when every file is synced and in the manifest with its checksum.

The thread uses no collective, which could get mixed up with training's. When a save is due is
decided by `step.participants.Saving`.
"""

from __future__ import annotations

import itertools
import json
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

import torch.distributed as dist
from torch import Tensor

from colotrain import host
from colotrain.engine.comms import exchange
from colotrain.engine.comms.notes import Notes
from colotrain.engine.offload.page_locked import Pages, page_locked
from colotrain.engine.state.index import INDEX, MOST_OF_INDEX, describe, join
from colotrain.engine.state.manifest import (
    FileEntry,
    Manifest,
    checksum,
    prune,
    publish,
    write_manifest,
)
from colotrain.engine.state.shard_file import (
    POLL_S,
    Layout,
    NotFinite,
    Piece,
    PieceLock,
    State,
    write_pieces,
)
from colotrain.errors import ColotrainError, message_of
from colotrain.events.kinds import Checkpoint, CheckpointFailed, CheckpointStarted, Note
from colotrain.events.log import EventWriter
from colotrain.rundir import RunDir, make_folder, write_atomically
from colotrain.spec.plan import RunPlan
from colotrain.timeouts import AwakeTimeout

SLOWEST_BYTES_PER_S = 10e6
"""Bytes per second below which a disk counts as hanging."""
LINGER_S = 60.0

_numbers = itertools.count()
"""Numbers of this process's saves, the same on every rank, for names in the store and on disk."""


@dataclass(slots=True, kw_only=True)
class Save:
    """A checkpoint that is being written. All ranks have one and call `write`."""

    number: int
    """Number of the save in this process, the same on every rank."""
    temporary: Path
    final: Path
    pieces: list[Piece]
    """Pieces of the state to write, which are replaced by copies under `lock`."""
    manifest: Manifest
    keep: int
    """Number of checkpoints to keep."""
    patience_s: float
    """Seconds that this save may take, beside those of a slow disk."""
    layout: Layout = field(init=False)
    num_bytes: int = field(init=False)
    lock: PieceLock = field(default_factory=PieceLock)
    started: float = field(default_factory=time.monotonic)
    timeout: AwakeTimeout = field(init=False)
    """When the save counts as hanging, asked by whoever waits for it."""
    stall_s: float = 0.0
    """Seconds for which training waited for this save."""
    awaits: int | None = None
    """The rank whose report is waited for."""
    error: str | None = None
    thread: threading.Thread | None = None

    def __post_init__(self) -> None:
        self.layout = Layout.of(self.pieces)
        self.num_bytes = sum(piece.local.nbytes for piece in self.pieces)
        slowest_s = self.num_bytes * dist.get_world_size() / SLOWEST_BYTES_PER_S
        self.timeout = AwakeTimeout(self.patience_s + slowest_s)

    def write(self, events: EventWriter, beat: Callable[[], None]) -> None:
        """Write this rank's part and wait for the outcome of all. Never raises."""
        rank = dist.get_rank()
        try:
            notes = Notes()
            try:
                self._write_part(rank, beat)
            except (OSError, NotFinite) as error:
                self.error = f"rank {rank}: {error}"
            notes.write(f"checkpoint/{self.number}/{rank}", self.error or "")
            if rank == 0:
                self.error = self._first_error(notes, beat) or self._publish()
                notes.write(f"checkpoint/{self.number}", self.error or "")
                self._report(events)
            else:
                self.error = self._await(notes, f"checkpoint/{self.number}", 0, beat)
        except Exception as error:  # a bug, or rank 0 has ended and the store with it
            self.error = f"rank {rank}: {type(error).__name__}: {message_of(error)}"
            traceback.print_exc(file=sys.stderr)

    def _part(self, rank: int) -> Path:
        """Return the path where `rank` describes what it wrote, for rank 0 to join."""
        return self.temporary / f"__{rank}.json"

    def _write_part(self, rank: int, beat: Callable[[], None]) -> None:
        make_folder(self.temporary, inside=self.temporary.parent)
        file = self.temporary / f"__{rank}_0.distcp"
        layout = self.layout
        checksum = write_pieces(file, self.pieces, layout, lock=self.lock, report=lambda _: beat())
        entry = {"bytes": layout.num_bytes, "xxh128": checksum}
        tensors = describe(self.pieces, layout.starts, file.name)
        text = json.dumps({"files": {file.name: entry}, "tensors": tensors})
        write_atomically(self._part(rank), text)

    def _first_error(self, notes: Notes, beat: Callable[[], None]) -> str | None:
        """Wait for the outcome of every rank; returns the first error."""
        ranks = range(dist.get_world_size())
        key = f"checkpoint/{self.number}"
        told = [self._await(notes, f"{key}/{rank}", rank, beat) for rank in ranks]
        return next((error for error in told if error), None)

    def _await(self, notes: Notes, key: str, rank: int, beat: Callable[[], None]) -> str | None:
        self.awaits = rank

        def is_over() -> bool:
            beat()
            return self.timeout.is_over()

        if (told := notes.wait(key, is_over=is_over)) is None:
            return f"rank {rank} has not reported its part in time"
        return told or None

    def _publish(self) -> str | None:
        """On rank 0, join the parts and rename the folder; returns the error, if any."""
        try:
            described = [self._part(rank) for rank in range(dist.get_world_size())]
            parts = [json.loads(path.read_text("utf-8")) for path in described]
            index = self.temporary / INDEX
            text = json.dumps(join([part["tensors"] for part in parts]))
            if len(text) > MOST_OF_INDEX:
                return f"rank 0: {index}: {len(text):,} bytes, of which {MOST_OF_INDEX:,} are read"
            write_atomically(index, text)
            for path in described:
                path.unlink()
            files = {n: FileEntry(**entry) for part in parts for n, entry in part["files"].items()}
            files[INDEX] = FileEntry(bytes=index.stat().st_size, xxh128=checksum(index))
            write_manifest(self.temporary, replace(self.manifest, files=files))
            publish(self.temporary, self.final)
        except OSError as error:
            return f"rank 0: {error}"
        with suppress(OSError):  # what cannot be deleted now is deleted after the next save
            best = self.manifest.best_step
            prune(self.final.parent, keep=self.keep, newest=self.final, best=best)
        return None

    def _report(self, events: EventWriter) -> None:
        step, seconds = self.manifest.step, time.monotonic() - self.started
        if self.error is not None:
            shutil.rmtree(self.temporary, ignore_errors=True)
            events.write(CheckpointFailed(step=step, error=self.error, seconds=seconds))
            return
        stall_s = self.stall_s if self.thread else seconds
        path = str(self.final)
        events.write(Checkpoint(step=step, path=path, seconds=seconds, stall_s=stall_s))


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
        """Whether `checkpoint.minutes` have passed since this rank's last save began."""
        return 0 < self.plan.checkpoint.every_s <= time.monotonic() - self.began_at

    def begin(self, state: State, *, background: bool = True) -> None:
        """Save a state, which may change once this returns.

        Only pieces that last must not change before `before_update`. Without `background` it
        returns when the checkpoint is written. Waits for the save before. A failed save is
        announced and has no other effect.
        """
        started, self.began_at = time.perf_counter(), time.monotonic()
        self.wait()
        manifest, pieces = state.manifest, list(state.pieces)
        number, final = next(_numbers), self.rundir.checkpoint(manifest.step)
        # unique to this attempt, so that no old folder of this name must be removed first
        label = f".{final.name}.{self.token}-{number}.tmp"
        save = self.current = Save(
            number=number,
            temporary=final.with_name(label),
            final=final,
            pieces=pieces,
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
            if not host.has_room(room * self.plan.cluster.procs_per_node):
                return False
            on_gpu = any(piece.local.is_cuda for piece in save.pieces)
            self.image = page_locked(room) if on_gpu else Pages.allocate(room).tensor(room)
        return True

    def _copy(self, save: Save, chosen: list[int]) -> None:
        """Replace pieces by copies in the image."""
        assert self.image is not None
        for index in chosen:
            save.pieces[index] = save.layout.copy(save.pieces, index, self.image)
