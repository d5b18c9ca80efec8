"""Ends ranks whose step cannot be finished, because another rank of the run has failed.

Left alone they would compute until they wait for the failed one, or wait for it to begin, which may
take minutes; torch ends them after half a minute.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from colotrain.events.heartbeats import Heartbeat, read_heartbeats
from colotrain.rundir import RunDir
from colotrain.spec.phases import FINISHING, LEFT_ALONE, Phase

REDUCE_S = 1.0
"""Seconds in which a step's all-reduce ends, if the failed rank has still taken part in it."""
FINISH_S = 10.0
"""Most seconds that ranks may take to finish a step or a save."""
RAISE_S = 2.0
"""Seconds that ranks have to fail by themselves after another one raised an error: all of them may
raise it, and say so."""
POLL_S = 0.02


def failed(processes: Sequence[Any], device: str = "cpu") -> list[int]:
    """Return the local ranks of workers that have ended with an error or by a signal.

    On a GPU ranks that NCCL's watchdog aborts do not count: the others may be about to write what
    they know of the collective for which they wait.
    """
    spared = (0, None) if device == "cpu" else (0, None, -signal.SIGABRT)
    return [local for local, process in enumerate(processes) if process.exitcode not in spared]


def end_survivors(
    processes: Sequence[Any], rundir: RunDir, *, first_rank: int, has_copies: bool
) -> set[int]:
    """Kill this machine's ranks that compute or wait in vain; return their local ranks.

    `processes` are the workers by local rank. Ranks that finish a step, and copy its state, may do
    so. Without copies in memory (`has_copies`) a save may end if the failed ranks have added their
    parts.
    """
    dead, ended = failed(processes), set[int]()
    killed = any(processes[local].exitcode == -signal.SIGKILL for local in dead) or not dead
    began = time.monotonic()
    saves = [] if has_copies else saves_without(rundir.checkpoints, [first_rank + d for d in dead])
    while time.monotonic() < began + FINISH_S:
        beats = {(b.rank, b.pid): b for b in read_heartbeats(rundir.heartbeats)}
        waited_for = False
        for local, process in enumerate(processes):
            if process.exitcode is not None or local in ended:
                continue
            beat = beats.get((first_rank + local, process.pid))
            if not is_in_vain(beat):
                waited_for |= beat is not None and beat.phase not in LEFT_ALONE
            elif may_end(beat, saves) and (killed or time.monotonic() > began + RAISE_S):
                ended.add(local)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
            else:
                waited_for = True
        if not waited_for:
            break
        time.sleep(POLL_S)
    return ended


def saves_without(checkpoints: Path, dead: Sequence[int]) -> list[Path]:
    """Return the folders of unfinished saves for which the failed ranks are not needed any more."""
    with contextlib.suppress(OSError):
        parts = {path.parent for path in checkpoints.glob("*/__*.json")}
        return [p for p in parts if all((p / f"__{rank}.json").exists() for rank in dead)]
    return []


def may_end(beat: Heartbeat | None, saves: Sequence[Path]) -> bool:
    """Whether the rank is not needed for a save either."""
    return beat is None or beat.phase is Phase.START or not any(save.exists() for save in saves)


def is_in_vain(beat: Heartbeat | None) -> bool:
    """Whether what the rank does needs the failed one, too; one without a heartbeat begins."""
    if beat is None:
        return True
    if beat.phase is Phase.REDUCE:
        return time.monotonic() - beat.t > REDUCE_S
    return beat.phase not in FINISHING | LEFT_ALONE
