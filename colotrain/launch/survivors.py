"""Ends ranks whose step cannot be finished, because another rank of the run has failed.

Left alone they would compute until they wait for the failed one, or wait for it to begin, which may
take minutes; torch ends them after half a minute.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from colotrain.events.heartbeats import Heartbeat, heartbeats_of
from colotrain.parent_process import send
from colotrain.rundir import RunDir
from colotrain.spec.phases import FINISHING, LEFT_ALONE, Phase

REDUCE_S = 1.0
"""Seconds in which a step's all-reduce ends, if the failed rank has still taken part in it."""
FINISH_S = 10.0
"""Most seconds that ranks may take to finish a step or a save."""
SILENT_S = 1.0
"""Seconds of waiting for them before it is said for what."""
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
    processes: Sequence[Any],
    rundir: RunDir,
    *,
    first_rank: int,
    has_copies: bool,
    say: Callable[[str], None],
) -> set[int]:
    """Kill this machine's ranks that compute or wait in vain; return their local ranks.

    `processes` are the workers by local rank. Ranks that finish a step, and copy its state, may do
    so within `FINISH_S`. A save may end if the failed ranks have added their parts, and without
    copies in memory (`has_copies`) the ranks that compute meanwhile may, too, as they write it.
    `say` sends a note about what is waited for.
    """
    dead, ended = failed(processes), set[int]()
    killed = any(processes[local].exitcode == -signal.SIGKILL for local in dead) or not dead
    began = time.monotonic()
    dead_ranks = [first_rank + local for local in dead]
    saves = saves_without(rundir.checkpoints, dead_ranks)
    wanted_saves = [] if has_copies else saves
    said = False
    while True:
        now_s = time.monotonic() - began
        pids = {local: process.pid for local, process in enumerate(processes)}
        beats = heartbeats_of(rundir.heartbeats, pids, first_rank=first_rank)
        waited_for = list[str]()
        for local, process in enumerate(processes):
            if process.exitcode is not None or local in ended:
                continue
            beat = beats.get(local)
            saving = _is_saving(beat, rundir.checkpoints)
            if beat is not None and beat.phase in LEFT_ALONE and not saving:
                continue
            in_vain = not _any_unfinished(saves) if saving else is_in_vain(beat)
            is_over = in_vain and may_end(beat, wanted_saves) and (killed or now_s > RAISE_S)
            copies = beat is not None and beat.phase is Phase.MEMORY_COPY
            if is_over or (now_s > FINISH_S and not copies):
                ended.add(local)
                send(signal.SIGKILL, process.pid)
            else:
                at = f" ({beat.where})" if beat is not None else ""
                waited_for.append(f"rank {first_rank + local}{at}")
        if not waited_for or now_s > FINISH_S:  # copies of a large state have torch's half a minute
            return ended
        if now_s > SILENT_S and not said:
            said = True
            say(_waiting(dead_ranks, waited_for, has_save=_any_unfinished(saves)))
        time.sleep(POLL_S)


def _waiting(dead: Sequence[int], waited_for: Sequence[str], *, has_save: bool) -> str:
    """Return what is said while ranks finish something; the first few are named."""
    who = f"rank {', '.join(map(str, dead[:4]))}" if dead else "a rank on another machine"
    more = f" and {len(waited_for) - 4} more" if len(waited_for) > 4 else ""
    named = f"{', '.join(waited_for[:4])}{more}"
    what = " a checkpoint" if has_save else ""
    return f"{who} has failed; waiting up to {FINISH_S:.0f} s for {named} to finish{what}"


def saves_without(checkpoints: Path, dead: Sequence[int]) -> list[Path]:
    """Return the folders of unfinished saves for which the failed ranks are not needed any more.

    Rank 0 always is: it joins the parts.
    """
    if 0 in dead:
        return []
    with contextlib.suppress(OSError):
        parts = {path.parent for path in checkpoints.glob("*/__*.json")}
        return [p for p in parts if all((p / f"__{rank}.json").exists() for rank in dead)]
    return []


def may_end(beat: Heartbeat | None, saves: Sequence[Path]) -> bool:
    """Whether the rank is not needed for a save either."""
    return beat is None or beat.phase is Phase.START or not _any_unfinished(saves)


def _any_unfinished(saves: Sequence[Path]) -> bool:
    return any(save.exists() for save in saves)


def _is_saving(beat: Heartbeat | None, checkpoints: Path) -> bool:
    """Whether the rank waits for a save that is not written yet."""
    if beat is not None and beat.phase is Phase.CHECKPOINT:
        with contextlib.suppress(OSError):
            return any(checkpoints.glob(".*.tmp"))
    return False


def is_in_vain(beat: Heartbeat | None) -> bool:
    """Whether what the rank does needs the failed one, too; one without a heartbeat begins."""
    if beat is None:
        return True
    if beat.phase is Phase.REDUCE:
        return time.monotonic() - beat.t > REDUCE_S
    return beat.phase not in FINISHING | LEFT_ALONE
