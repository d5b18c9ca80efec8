"""Ends ranks whose step cannot be finished, because another rank of the run was killed.

Left alone they would compute until they wait for the killed one, which may take minutes. What they
have finished is in the launcher's memory.
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

COMPUTING = ("data", "forward or backward", "evaluation")
"""Phases before an all-reduce in which the killed rank is missing."""
FINISHING = ("reduce", "optimizer", "memory copy")
"""Phases of a rank that finishes a step, which the killed rank may have finished."""
REDUCE_S = 1.0
"""Seconds in which a step's all-reduce ends, if the killed rank has still taken part in it."""
FINISH_S = 10.0
"""Most seconds that ranks may take to finish a step."""
POLL_S = 0.02


def end_survivors(processes: Sequence[Any], heartbeats: Path, *, first_rank: int) -> set[int]:
    """Kill this machine's ranks that compute in vain; return their local ranks.

    `processes` are the workers by local rank. Ranks that finish a step first copy its state.
    """
    ended: set[int] = set()
    deadline = time.monotonic() + FINISH_S
    while time.monotonic() < deadline:
        running = {
            (first_rank + local, process.pid): local
            for local, process in enumerate(processes)
            if process.exitcode is None and local not in ended
        }
        beats = [b for b in read_heartbeats(heartbeats) if (b.rank, b.pid) in running]
        for beat in filter(is_in_vain, beats):
            ended.add(running[beat.rank, beat.pid])
            with contextlib.suppress(ProcessLookupError):
                os.kill(beat.pid, signal.SIGKILL)
        if not any(beat.phase.startswith(FINISHING) and not is_in_vain(beat) for beat in beats):
            break
        time.sleep(POLL_S)
    return ended


def is_in_vain(beat: Heartbeat) -> bool:
    """Whether what the rank computes needs the killed one, too."""
    waits = beat.phase.startswith("reduce") and time.monotonic() - beat.t > REDUCE_S
    return waits or beat.phase.startswith(COMPUTING)
