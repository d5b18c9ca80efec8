"""One checkpoint that is being written: each rank's part, and the folder that rank 0 publishes.

Each rank writes its own file and reports the outcome through the process group's store; rank 0
publishes the checkpoint once all have. All ranks write into a temporary folder, which is renamed
when every file is synced and in the manifest with its checksum.
"""

from __future__ import annotations

import json
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

from colotrain.engine.comms.notes import Notes
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
    Layout,
    NotFinite,
    Piece,
    PieceLock,
    write_pieces,
)
from colotrain.errors import message_of
from colotrain.events.kinds import Checkpoint, CheckpointFailed
from colotrain.events.log import EventWriter
from colotrain.rundir import make_folder, write_atomically
from colotrain.timeouts import AwakeTimeout

SLOWEST_BYTES_PER_S = 10e6
"""Bytes per second below which a disk counts as hanging."""


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
        written = write_pieces(
            file, self.pieces, layout=self.layout, lock=self.lock, report=lambda _: beat()
        )
        entry = {"bytes": written.num_bytes, "xxh128": written.checksum}
        part = {"files": {file.name: entry}, "tensors": describe(self.pieces, written, file.name)}
        write_atomically(self._part(rank), json.dumps(part))

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
