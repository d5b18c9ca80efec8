"""Cause of a failure: finds the rank that failed first, because of which its peers then fail."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from colotrain.errors import of_system
from colotrain.events.event import Event
from colotrain.events.kinds import Failure, WorkerExit
from colotrain.lost_peers import says_peer_lost
from colotrain.spec.phases import Phase, where

CUT_FILE = (
    " (a file that it had mapped could not be reached: data that somebody made shorter, a full "
    "/dev/shm, or a disk that failed)"
)
ERRNO = "[Errno "
"""Prefix of disk and network errors, which may not happen again."""


def describe(
    exits: Sequence[WorkerExit], events: Sequence[Event], error: BaseException | None = None
) -> str:
    """Return one line: the rank that failed first, its phase, the cause, and the log's path.

    `events` are the ranks' last events: failed, finished or stopped.

    A rank that was killed comes first, then one that failed by itself, then one that exited without
    an event; ranks that only lost a peer come last. Of several that were killed it is the first of
    `exits`.
    """
    waited = [x for x in exits if x.gave_up]
    killed = [x for x in exits if x.killed_by not in (None, "SIGTERM") and not x.gave_up]
    if killed:
        rank, by, log = killed[0].rank, killed[0].killed_by, killed[0].log
        why = " (the kernel ended it for want of memory)" if killed[0].out_of_memory else ""
        why = CUT_FILE if by == "SIGBUS" else why
        return f"rank {rank} was killed by {by}{why}; its log: {log}"
    failed = sorted(_failures(events), key=lambda failure: failure.t)
    own = [e for e in failed if not says_peer_lost(e.error)]
    if own:
        return _failed(own[0], exits)
    told = {event.rank for event in events}
    silent = [x for x in exits if x.rank not in told and not x.gave_up]
    if silent:
        words = f": {silent[0].last_line}" if silent[0].last_line else ""
        code, log = silent[0].exit_code, silent[0].log
        early = " before the run was over" if code == 0 else ""
        return f"rank {silent[0].rank} ended with exit code {code}{early}{words}; its log: {log}"
    if failed:
        return _failed(failed[0], exits)
    if waited:
        ranks = ", ".join(str(x.rank) for x in waited)
        what = "waited in vain for another rank's collective (NCCL's watchdog ended it)"
        return f"rank {ranks} {what}; its log: {waited[0].log}"
    known = of_system(error)
    return f"the launcher failed: {known or repr(error)}"


def was_killed(exits: Sequence[WorkerExit]) -> bool:
    """Whether a rank was ended by SIGKILL that did not come from the kernel for want of memory."""
    return any(x.killed_by == "SIGKILL" and not x.out_of_memory for x in exits)


def _failures(events: Sequence[Event]) -> list[Failure]:
    return [Failure.of(event) for event in events if event.kind == Failure.KIND]


def raised_errors(events: Sequence[Event]) -> set[tuple[int, Phase | None, str]]:
    """Return the (step, phase, error) that ranks raised themselves, without system call errors."""
    return {
        (failure.step, failure.phase, failure.error)
        for failure in _failures(events)
        if not says_peer_lost(failure.error) and ERRNO not in failure.error
    }


def _failed(failure: Failure, exits: Sequence[WorkerExit]) -> str:
    log = next((f"; its log: {x.log}" for x in exits if x.rank == failure.rank), "")
    what = f"failed in {where(failure.phase, failure.step)}: {failure.error}"
    return f"rank {failure.rank} {what}{log}"


def num_killed_for_memory() -> int:
    """Return how many processes the kernel has killed for lack of memory since boot."""
    try:
        lines = Path("/proc/vmstat").read_text("ascii").splitlines()
    except OSError:  # not Linux
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
