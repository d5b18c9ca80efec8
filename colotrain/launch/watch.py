"""Watches this machine's ranks: finds silent ranks and the cause, and ends them.

If one rank hangs, all ranks of its process group fall silent, because they wait for it. Each rank
is asked for its stack; the one that does not wait in a collective is the culprit.
"""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from colotrain.events.heartbeats import Heartbeat, heartbeats_of, read_heartbeats
from colotrain.launch.folder_watch import FolderWatch
from colotrain.launch.worker_exits import newest_log
from colotrain.parent_process import has_ended, send, stat_of
from colotrain.rundir import RunDir
from colotrain.spec.plan import RunPlan

POLL_S = 0.5
SLEPT_S = 10.0
"""Seconds between two checks after which this launcher itself was suspended (Ctrl-Z, SLURM)."""
DUMP_S = 1.0
"""Seconds that a rank is given to write its stack."""
ORPHANS_S = 10.0
"""Seconds in which a killed rank must be gone."""
DEPTH = 4
"""Number of innermost frames in which a collective shows that a rank waits for others."""


def _file_of(module: str) -> str:
    return module.replace(".", "/") + ".py"


COLLECTIVES = ("torch/distributed/", _file_of("colotrain.engine.comms.shared_memory"))
MAIN = (_file_of("colotrain.engine.worker"), _file_of("colotrain.verify.worker"))


@dataclass(frozen=True, slots=True, kw_only=True)
class SilentRank:
    """A rank whose last heartbeat is more than its `patience_s` ago."""

    beat: Heartbeat
    state: str
    """State letter of its process in /proc: R, S, D, T, Z, or empty if the process is gone."""
    stack: tuple[str, ...]
    """Frames of the training thread, innermost first; empty if the rank wrote none."""
    log: Path

    @property
    def waits_for_others(self) -> bool:
        inner = self.stack[:DEPTH]
        return self.state not in "TtZ" and any(c in frame for frame in inner for c in COLLECTIVES)

    def __str__(self) -> str:
        silent_s = time.monotonic() - self.beat.t
        where = f"in {self.beat.where}"
        head = f"rank {self.beat.rank} (process {self.beat.pid})"
        if self.state in ("", "Z"):
            return f"{head} ended without a message {where}"
        what = "was stopped (SIGSTOP)" if self.state in "Tt" else "hung"
        if self.state == "D":
            what = "waits for a disk or file system that does not answer"
        at = f" at {self.stack[0]}" if self.stack and self.state not in "Tt" else ""
        return f"{head} {what} {where}, silent for {silent_s:.0f} s{at}; its log: {self.log}"


@dataclass(slots=True, kw_only=True)
class Watch:
    """Detects workers that hang or ignore a stop request, and kills them."""

    plan: RunPlan
    rundir: RunDir
    pids: Callable[[], dict[int, int]] = lambda: {}
    """Returns local rank → process id of this machine's workers."""
    first_rank: Callable[[], int] = lambda: 0
    """Returns the global rank of local rank 0: process ids may repeat on other machines."""
    say: Callable[[str], None] = lambda text: None
    """Sends a note to whoever follows the run."""
    logs: Path | None = None
    """Folder with the logs of these workers."""
    verdict: str | None = None
    """Why the watch ended the newest attempt; None if it did not."""
    is_final: bool = False
    """Whether the run must not be restarted after that."""
    stop_asked_at: float | None = None
    checked_at: float = field(default_factory=time.monotonic)
    woke_at: float = -math.inf
    """Monotonic time at which this process resumed; its ranks were suspended too, not silent."""
    seen: set[int] = field(default_factory=set)
    """Process ids of all workers so far."""
    past: set[int] = field(default_factory=set)
    """Process ids of the previous attempt, which `pids` returns until the next workers run."""
    last: Heartbeat | None = None
    """The newest of the heartbeats that were read."""
    folder: FolderWatch = field(init=False)

    def __post_init__(self) -> None:
        self.folder = FolderWatch(rundir=self.rundir)

    def begin(self) -> None:
        """Begin watching a new attempt."""
        self.verdict, self.past = None, set(self.pids().values())

    def check(self, *, asked_to_stop: bool) -> None:
        """Kill ranks that hang, or all ranks after the grace period of a stop. Call often."""
        now = time.monotonic()
        if now - self.checked_at < POLL_S or self.verdict is not None:
            return
        if now - self.checked_at > SLEPT_S:
            self.woke_at = now
            self.say(
                f"this machine's ranks were stopped for {now - self.checked_at:.0f} s; they go on"
            )
        self.checked_at = now
        self.folder.check()
        pids = {local: pid for local, pid in self.pids().items() if pid not in self.past}
        self.seen.update(pids.values())
        here = heartbeats_of(self.rundir.heartbeats, pids, first_rank=self.first_rank())
        self.last = max(here.values(), key=lambda beat: beat.t, default=self.last)
        self._check_stop(here, asked_to_stop, now)
        silent = {
            local: b for local, b in here.items() if now - max(b.t, self.woke_at) > b.patience_s
        }
        since = max(self.folder.since, self.woke_at)
        if self.folder.lasts and now - since > self.plan.elastic.hang_timeout_s:
            self._end_for_folder()
        elif silent and self.verdict is None:
            self._end_culprits(here, silent)

    def end_all(self, verdict: str) -> None:
        """Kill this machine's ranks at once and forbid restarts."""
        self.verdict, self.is_final = verdict, True
        for pid in self.pids().values():
            send(signal.SIGKILL, pid)

    def end_orphans(self, verdict: str) -> None:
        """Kill this machine's ranks, whose parent has ended, and see to it that they are gone.

        A rank that goes on beside its successor would write to the same run directory.
        """
        self.verdict = f"{verdict}, so its ranks were ended"
        pids = list(self.pids().values())
        for pid in pids:
            send(signal.SIGKILL, pid)
        left = [pid for pid in pids if not has_ended(pid, within_s=ORPHANS_S)]
        if left:
            self.verdict += f"; process {left[0]} cannot be ended, so the run is not restarted"
            self.is_final = True

    def _check_stop(self, here: dict[int, Heartbeat], asked: bool, now: float) -> None:
        if not asked:
            self.stop_asked_at = None
            return
        self.stop_asked_at = max(self.stop_asked_at or now, self.woke_at)
        grace_s = self.plan.elastic.grace_s
        if now - self.stop_asked_at <= grace_s or not self.pids():
            self._end_hang_of_stop(here, now)
            return
        last = min(here.values(), key=lambda beat: beat.t, default=None)
        where = f": rank {last.rank} was in {last.where}" if last else ""
        self.end_all(f"asked to stop, and ended after elastic.grace_s={grace_s:g}{where}")

    def _end_hang_of_stop(self, here: dict[int, Heartbeat], now: float) -> None:
        """Restart ranks of which none has moved for half of the grace period of a stop.

        Where steps are short nothing but their end lets ranks save. Restarted, they have the newest
        copy or checkpoint, and stop after it.
        """
        since = max(self.stop_asked_at or now, self.woke_at, *(beat.t for beat in here.values()))
        if here and now - since > self.plan.elastic.grace_s / 2:
            self._end_culprits(here, here)

    def _end_culprits(self, here: dict[int, Heartbeat], silent: dict[int, Heartbeat]) -> None:
        self.folder.look()
        if self.folder.lasts:
            self._end_for_folder()
            return
        offsets = {local: _size(self._log(local)) for local in here}
        for beat in here.values():
            send(signal.SIGUSR2, beat.pid)  # makes it write its stack (faulthandler)
        time.sleep(DUMP_S)
        found = [
            SilentRank(
                beat=beat,
                state=_state(beat.pid),
                stack=_stack(self._log(local), offsets[local]),
                log=self._log(local),
            )
            for local, beat in silent.items()
        ]
        guilty = [rank for rank in found if not rank.waits_for_others]
        if not guilty and self.plan.cluster.nodes > 1:
            longest = max(2 * rank.beat.patience_s for rank in found)
            since = max(min(rank.beat.t for rank in found), self.woke_at)
            if time.monotonic() - since < longest:
                return  # they wait for another machine's rank; its launcher handles it
        guilty = guilty or sorted(found, key=lambda rank: rank.beat.t)
        culprits = {local: b for local, b in silent.items() if b in [g.beat for g in guilty]}
        self._end(culprits, "; ".join(str(rank) for rank in guilty[:4]))

    def _end_for_folder(self) -> None:
        why = "nothing is saved, and no rank shows that it is alive"
        self.end_all(f"{self.folder.problem}: {why}")

    def ask_to_stop(self) -> None:
        """Tell the ranks themselves, where the run's folder takes no request to stop."""
        for pid in self.pids().values():
            send(signal.SIGUSR1, pid)

    def _end(self, ranks: dict[int, Heartbeat], verdict: str) -> None:
        self.verdict = verdict
        for beat in ranks.values():
            send(signal.SIGKILL, beat.pid)

    def _log(self, local_rank: int) -> Path:
        """Return the newest log of a worker of this machine, to which it writes its stack."""
        return newest_log(self.logs or self.rundir.logs, local_rank)

    def close(self) -> None:
        """Delete the heartbeats of this launch's workers."""
        for beat in read_heartbeats(self.rundir.heartbeats):
            if beat.pid in self.seen:
                with contextlib.suppress(OSError):  # the folder may have become read-only
                    self.rundir.heartbeat_file(beat.rank).unlink()


def _stack(log: Path, offset: int) -> tuple[str, ...]:
    """Return `file:line in function` of the training thread, from what was appended to a log."""
    frames: list[str] = []
    threads: list[list[str]] = []
    for line in _text(log, offset).splitlines():
        if "most recent call first" in line:
            frames = []
            threads.append(frames)
        elif line.startswith('  File "'):
            path, _, rest = line.removeprefix('  File "').partition('", line ')
            number, _, function = rest.partition(" in ")
            frames.append(f"{path}:{number} in {function}")
    main = [t for t in threads if any(name in frame for frame in t for name in MAIN)]
    return tuple(main[-1]) if main else ()


def _text(path: Path, offset: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(1 << 20).decode("utf-8", "replace")
    except OSError:
        return ""


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _state(pid: int) -> str:
    """Return the process's state letter; empty if the process is gone."""
    try:
        return stat_of(pid)[0]
    except OSError:
        return ""
