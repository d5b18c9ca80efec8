"""Copies of the last steps' state in the launcher's memory, from which its workers restart.

Each rank copies what it holds of the state into one of its two files (`memory_file`), in turn, so
that one whole copy exists at any moment: after every step, or every few where a copy takes long. A
rank begins a copy only after all ranks have finished the one before: between two copies the ranks
meet in a step's all-reduce. A rank reads its own copy where there are as many ranks as there were,
and each has its own; otherwise all read the copies of all ranks as a whole (`whole_copy`).
"""

from __future__ import annotations

import json
import math
import os
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from colotrain import host
from colotrain.addresses import LOOPBACK
from colotrain.engine.comms import exchange
from colotrain.engine.offload.page_locked import page_locked
from colotrain.engine.parts.part_map import Part
from colotrain.engine.state.buddy import Buddy, RemoteLauncher
from colotrain.engine.state.memory_file import FIRST, MemoryFile
from colotrain.engine.state.shard_file import Layout, Piece, State
from colotrain.engine.state.whole_copy import (
    Copied,
    Key,
    join_copies,
    key_of,
    look,
    names_to_join,
)
from colotrain.events.kinds import MemoryCopied, Note
from colotrain.events.log import EventWriter
from colotrain.records import from_plain, to_plain
from colotrain.spec.elastic import COPY_EXTRA_BYTES, COPY_PLACES, CopyPlaces
from colotrain.spec.plan import RunPlan

SMOOTHING = 0.2
"""Weight of the newest copy in the mean cost of copies."""


@dataclass(slots=True, kw_only=True)
class MemoryCopies:
    """This rank's copies, and how often they are made. All ranks must make the same calls."""

    plan: RunPlan
    events: EventWriter
    files: list[MemoryFile]
    attempt: str
    """Random text, the same on every rank and different in each attempt."""
    places: CopyPlaces
    local_rank: int
    readers: ExitStack = field(default_factory=ExitStack)
    """Connections on which copies are read, until the attempt begins."""
    buddy: Buddy | None = None
    """Where copies are also sent, on another node; None where there is no other node."""
    number: int = 0
    """Number of the newest copy."""
    valid: int = 0
    """Number of the newest copy that is not void; 0 where there is none."""
    valid_from: int = 0
    """Copies with smaller numbers are void: those that other launchers have, too."""
    taken: int = 0
    """Number of copies that this attempt has made."""
    parts: dict[str, Part] = field(default_factory=dict)
    """Which part of the whole each tensor of the newest copy is, by its name."""
    step: int = 0
    """Step of the newest copy, or from which this attempt began."""
    every: int = 1
    """Steps between two copies."""
    cost: float | None = None
    """Mean duration of a copy, as a multiple of a step's."""
    seconds: float = 0.0
    """Seconds that this rank's last copy took."""
    beside: BesideGradients | None = None
    """Makes copies while the next gradients are computed (GPU); None: training waits for them."""
    resumed: bool = False
    """Whether this attempt went on from a copy."""
    told_every: int = 0
    """`every` in the last event about the copies; 0 before the first."""

    @staticmethod
    def open(plan: RunPlan, events: EventWriter) -> MemoryCopies | None:
        """Open this rank's files; None where the plan or any launcher has none. All must call."""
        if not plan.elastic.memory_copy.enabled:
            return None
        # not for children of this rank, which inherit its environment
        given, files = os.environ.pop(COPY_PLACES, '{"launcher": 0}'), []
        places = from_plain(CopyPlaces, json.loads(given))
        local_rank = int(os.environ["LOCAL_RANK"])
        try:
            if not (handles := places.own_files(local_rank)):
                raise FileNotFoundError("it has no files for them")
            files = [MemoryFile(places.path(handle)) for handle in handles]
        except OSError as error:
            _say_none(events, f"the launcher's memory cannot be reached ({error})")
        if exchange.is_any(not files):
            return None
        attempt = str(exchange.broadcast(secrets.token_hex(4)))
        copies = MemoryCopies(
            plan=plan,
            events=events,
            files=files,
            attempt=attempt,
            places=places,
            local_rank=local_rank,
        )
        if places.buddy:
            copies.buddy = Buddy(places.buddy, dist.get_rank(), secret=places.secret)
            copies.buddy.reach(copies.buddy.connect)
            copies._tell_of_buddy()
        return copies

    def choose(self) -> Copied | None:
        """Return the newest copy that every rank has whole. All ranks must call."""
        memory = look(self.places, self.local_rank, self._ranks_here)
        here, own_files = [dist.get_rank(), dist.get_world_size()], {f.path for f in self.files}
        made_here = (copy for copy in memory.copies if copy.about["rank"] == here)
        mine = {copy.key: copy for copy in made_here if copy.file.path in own_files}
        held = [(copy.key, copy.rank) for copy in memory.copies]
        told = exchange.all_gather((list(mine), held, memory.newest, memory.valid_from))
        self.number = max(newest for _, _, newest, _ in told)
        self.valid_from = max(valid_from for *_, valid_from in told)
        everyone = [{Key(*key) for key in own} for own, *_ in told]
        ranks_of: dict[Key, set[int]] = {}
        for _, found_there, _, _ in told:
            for key, rank in found_there:
                ranks_of.setdefault(Key(*key), set()).add(rank)
        for key in sorted(ranks_of, reverse=True):
            if key.number < self.valid_from:
                break
            if all(key in own for own in everyone) and (copied := mine[key].open()) is not None:
                return copied
            if ranks_of[key] == set(range(key.world_size)):
                whole = join_copies(key, memory, partial(self._pass_over, key), self.readers)
                if whole is not None:
                    return whole
        return None

    def _pass_over(self, key: Key, why: str) -> None:
        text = f"warning: rank {dist.get_rank()}: copies of step {key.step} cannot be read: {why}"
        self.events.write(Note(text=text))

    @property
    def _ranks_here(self) -> int:
        return self.plan.cluster.procs_per_node

    def begin(self, copied: Copied | None, step: int, device: torch.device | None = None) -> None:
        """Begin an attempt after `step` steps: every copy but the one it resumed from is void.

        On a GPU, which `device` is then, copies are made beside the gradients.
        """
        if device is not None and device.type == "cuda":
            self.beside = BesideGradients(device)
        self.readers.close()
        if copied is None:
            self.clear()
        self.step, self.resumed = step, copied is not None
        if copied is None:
            return
        self.valid = self.valid_from = copied.key.number
        kept = [file for file in self.files if (a := file.read()) and key_of(a) == copied.key]
        for file in self.files:
            if file not in kept:
                file.clear()
        if self.files[0] in kept:
            self.files.reverse()  # the other one is overwritten first

    def clear(self) -> None:
        """Invalidate all copies, because the state that they hold must not come back.

        A marker in this rank's files keeps older copies, also those of other launchers, from being
        restored, until a new copy carries the marker.
        """
        with suppress(OSError):  # what is being written is void, too
            self.finish()
        self.step, self.valid, self.valid_from = -1, 0, self.number + 1
        for file in self.files:
            file.clear()
            with suppress(OSError):  # memory is short
                file.write([], {"number": self.number, "valid_from": self.valid_from})

    def is_due(self, step: int) -> bool:
        return self.step < 0 or step - self.step >= self.every

    def note_durations(self, step_s: float, copy_s: float) -> None:
        """Choose how often to copy, from the mean seconds of all ranks: the same on every rank."""
        share = self.plan.elastic.memory_copy.share
        if share and step_s > 0 and copy_s > 0:
            now = copy_s / step_s
            self.cost = now if self.cost is None else self.cost + SMOOTHING * (now - self.cost)
            self.every = max(1, math.ceil(self.cost / share))

    def take(self, state: State, started: float) -> None:
        """Copy a state, all that this rank holds of it; `OSError` where memory is short.

        `started` is when this copy began, by the performance counter. On a GPU the copy is whole
        only after `finish`.
        """
        self.finish()
        pieces, rank = state.pieces, dist.get_rank()
        num_bytes = sum(piece.local.nbytes for piece in pieces)
        started += self._reserve(FIRST + num_bytes + COPY_EXTRA_BYTES)
        about = {
            "number": self.number + 1,
            "valid_from": self.valid_from,
            "attempt": self.attempt,
            "rank": [rank, dist.get_world_size()],
            "manifest": to_plain(state.manifest),
            "joined": names_to_join(pieces, rank),
        }
        write = partial(self._write, self.files[0], about, beside=self.valid)
        if self.beside is None:
            write(pieces)
            self._tell_of_buddy()
        else:
            started += self.beside.begin(pieces, write)
        self.files.reverse()
        self.valid = self.number + 1
        self.number, self.step, self.taken = self.number + 1, state.manifest.step, self.taken + 1
        if self.taken == 2 and self.local_rank == 0:
            self._free_before(self.number - 1)
        self.seconds = time.perf_counter() - started
        self._tell(num_bytes)

    def finish(self) -> None:
        """Wait until the last copy is whole; `OSError` where it cannot be.

        Call it before the ranks meet next, and so before the state changes.
        """
        if self.beside is not None:
            began = time.perf_counter()
            self.beside.finish()
            self.seconds += time.perf_counter() - began
            self._tell_of_buddy()

    def _write(
        self, file: MemoryFile, about: dict[str, Any], pieces: list[Piece], *, beside: int
    ) -> None:
        """Write a copy and send it to the buddy, whose error is told later: this is a thread."""
        file.write(pieces, about, name=str(about["rank"][0]))
        if self.buddy is not None:
            self.buddy.reach(partial(self.buddy.send, file, about["number"], beside=beside))

    def _tell_of_buddy(self) -> None:
        if self.buddy is not None and (text := self.buddy.news()) is not None:
            self.events.write(Note(text=text))

    def _free_before(self, number: int) -> None:
        """Free copies of ranks of earlier attempts, now that all ranks have a later one."""
        if self.places.own:
            here = f"{LOOPBACK}:{self.places.own.rpartition(':')[2]}"
            with suppress(OSError, ValueError), ExitStack() as stack:
                launcher = RemoteLauncher(here, secret=self.places.secret)
                stack.enter_context(closing(launcher)).free_before(number)

    def end(self, why: str) -> None:
        """Make no more copies, and say why."""
        self.clear()
        if self.buddy is not None:
            self.buddy.close()
        _say_none(self.events, why)

    def _reserve(self, num_bytes: int) -> float:
        """Take memory for both copies at once; returns the seconds, which only first copies take.

        Later copies then take as long as one another.
        """
        began = time.perf_counter()
        missing = sum(max(0, num_bytes - file.num_bytes) for file in self.files)
        if not missing:
            return 0.0
        ranks = self._ranks_here
        if not host.has_room(missing * ranks):
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


class BesideGradients:
    """A copy of a GPU's state, made while the next gradients are computed.

    Parameters and optimizer state do not change before the next update, so that they may be on
    their way to page-locked host memory until then; what a forward changes is copied on the GPU
    first.

    One copy is made at a time: `finish` must be called before the next one, and before the state
    changes.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.memory: Tensor | None = None
        self._thread = ThreadPoolExecutor(1, "memory-copy")
        self._held: list[Piece] = []
        """What is being copied, which must stay until it has been."""
        self._pending: Future[None] | None = None

    def begin(self, pieces: list[Piece], write: Callable[[list[Piece]], None]) -> float:
        """Queue the copies; `write` gets them on the thread when they are there.

        Returns the seconds that locking memory took, which the first copy alone does.
        """
        began = time.perf_counter()
        layout = Layout.of(pieces)
        if self.memory is None or self.memory.numel() < layout.num_bytes:
            self.memory = page_locked(layout.num_bytes)
        locking_s = time.perf_counter() - began
        given = [p if p.lasts else replace(p, local=p.local.clone()) for p in pieces]
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            on_host = [
                piece
                if piece.local.device.type == "cpu"
                else layout.copy(given, index, self.memory, wait=False)
                for index, piece in enumerate(given)
            ]
            there = self.stream.record_event()
        self._held = given

        def write_when_there() -> None:
            there.synchronize()
            write(on_host)

        self._pending = self._thread.submit(write_when_there)
        return locking_s

    def finish(self) -> None:
        """Wait until the copy is written; raises the error because of which it is not."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.result()
        finally:
            self._held = []
