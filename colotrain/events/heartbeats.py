"""Heartbeats: each rank records its step, phase, stage and time in a small file of its own.

The ranks write them and the launcher of the same machine reads them. Times are of the monotonic
clock, which all processes of a machine share and which setting the clock does not change.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from colotrain.errors import ConfigError
from colotrain.records import from_plain, to_plain
from colotrain.rundir import make_folder, open_inside, read_json
from colotrain.spec.phases import Phase, where

LINE_BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """The last heartbeat of one rank."""

    rank: int
    pid: int
    step: int
    """Step that the rank is in, from 1."""
    phase: Phase
    stage: int | None = None
    """Pipeline stage of the rank; None where each rank has all blocks."""
    t: float
    """Monotonic clock in seconds when it was written."""
    patience_s: float
    """Seconds that the rank may stay silent after `t`."""

    @property
    def where(self) -> str:
        return where(self.phase, self.step, self.stage)


class HeartbeatWriter:
    """Writes one rank's heartbeats, unless the path is None. Takes microseconds, never raises."""

    def __init__(
        self,
        path: Path | None = None,
        *,
        inside: Path | None = None,
        rank: int = 0,
        patience_s: float = 0.0,
    ) -> None:
        """`inside`: the run's folder, below which no links are followed; None: the file's own."""
        self.rank, self.patience_s, self._handle = rank, patience_s, -1
        self.stage: int | None = None
        if path is not None:
            with contextlib.suppress(OSError):
                if inside is not None:
                    make_folder(path.parent, inside=inside)
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                flags = os.O_WRONLY | os.O_CREAT
                self._handle = open_inside(inside or path.parent, path, flags)

    def beat(self, step: int, phase: Phase) -> None:
        if self._handle < 0:
            return
        beat = Heartbeat(
            rank=self.rank,
            pid=os.getpid(),
            step=step,
            phase=phase,
            stage=self.stage,
            t=time.monotonic(),
            patience_s=self.patience_s,
        )
        line = json.dumps(to_plain(beat)).encode()[:LINE_BYTES].ljust(LINE_BYTES)
        with contextlib.suppress(OSError):  # a full disk must not end training
            os.pwrite(self._handle, line, 0)


def heartbeats_of(
    folder: Path, pids: Mapping[int, int], *, first_rank: int
) -> dict[int, Heartbeat]:
    """Return local rank → last heartbeat of a machine's workers, by their process ids in `pids`.

    Those of other machines' ranks and of earlier attempts have other ranks or process ids.
    """
    beats = {(beat.rank, beat.pid): beat for beat in read_heartbeats(folder)}
    found = {local: beats.get((first_rank + local, pid)) for local, pid in pids.items()}
    return {local: beat for local, beat in found.items() if beat is not None}


def read_heartbeats(folder: Path) -> list[Heartbeat]:
    """Return the last heartbeats in `folder`, by rank; unreadable ones are left out."""
    found = []
    for path in folder.glob("rank*.json"):
        try:
            found.append(from_plain(Heartbeat, read_json(path)))
        except (OSError, ValueError, ConfigError):
            continue
    return sorted(found, key=lambda beat: beat.rank)
