"""Naming the first cause of a failure: one rank dies, and its peers fail because of it."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from colotrain.observe.events import Event

# What a rank says when a peer of its process group has gone.
OF_A_PEER = ("Connection closed by peer", "Connection reset", "Broken pipe", "Timed out waiting")


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """How a worker process ended."""

    rank: int
    exit_code: int
    log: str
    time: float

    @property
    def killed_by(self) -> str | None:
        if self.exit_code >= 0:
            return None
        return signal.Signals(-self.exit_code).name


def describe(
    deaths: Sequence[Death], events: Sequence[Event], error: BaseException | None = None
) -> str:
    """One line: the rank that failed first, in which phase, why, and where the traceback is."""
    killed = [death for death in deaths if death.killed_by not in (None, "SIGTERM")]
    if killed:
        death = killed[0]
        return f"rank {death.rank} was killed by {death.killed_by}; its log: {death.log}"
    failed = [event for event in events if event.kind == "failed"]
    own = [e for e in failed if not any(mark in str(e.fields["error"]) for mark in OF_A_PEER)]
    if failed:
        first = min(own or failed, key=lambda event: event.t)
        rank = first.rank
        logs = [death.log for death in deaths if death.rank == rank]
        where = f"; its log: {logs[0]}" if logs else ""
        what = "failed in {phase} of step {step}: {error}".format(**first.fields)
        return f"rank {rank} {what}{where}"
    if deaths:
        death = min(deaths, key=lambda death: death.time)
        return f"rank {death.rank} ended with exit code {death.exit_code}; its log: {death.log}"
    return f"the launcher failed: {error!r}"
