"""State of one launch, shared by the launcher's two threads."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from colotrain.errors import one_line
from colotrain.events import kinds
from colotrain.events.event import Event
from colotrain.events.log import EventWriter
from colotrain.launch import collective_dumps
from colotrain.launch.causes import describe, num_killed_for_memory, raised_errors, was_killed
from colotrain.launch.gpu_errors import gpu_errors
from colotrain.launch.node_registry import RendezvousError
from colotrain.launch.rendezvous import Node, Rendezvous
from colotrain.launch.slow_nodes import SlowNodes
from colotrain.launch.watch import Watch
from colotrain.rundir import RunDir
from colotrain.spec.exit_codes import WORKER_USAGE
from colotrain.spec.phases import Phase
from colotrain.spec.plan import RunPlan

ENDS = (kinds.Failure.KIND, kinds.WorkerFinished.KIND, kinds.WorkerStopped.KIND)
"""Kinds of a worker's last event."""
SAVES = (kinds.Checkpoint.KIND, kinds.MemoryCopied.KIND, kinds.Resumed.KIND)
"""Kinds after which a restart does not begin with the first step."""
POLL_S = 0.2
REGROUP_S = 3.0
"""Seconds that nodes may take to learn that others join or leave: several reports."""
CATCH_UP_POLL_S = 0.01
CATCH_UP_S = 5.0
"""Seconds that the agent's thread waits for a blocked main thread."""


@dataclass(slots=True, kw_only=True)
class Launch:
    """One launch of a run's workers on this machine, shared by the two threads."""

    plan: RunPlan
    rundir: RunDir
    events: EventWriter
    worker: str
    """Module that each worker process runs."""
    node: Node
    watch: Watch
    case_digests: Sequence[str] = ()
    """verify: digests of the plans of its cases."""
    rendezvous: Rendezvous | None = None
    """Set by the agent's thread."""
    killed_for_memory: int = field(default_factory=num_killed_for_memory)
    """Processes that the kernel had killed for lack of memory before this launch."""
    attempt_before: int = -1
    """Newest attempt that was restarted; -1 before any."""
    causes: list[str] = field(default_factory=list)
    """Causes of the earlier attempts' failures, oldest first."""
    raised_errors: set[tuple[int, Phase | None, str]] = field(default_factory=set)
    """Errors that ranks raised in earlier attempts, as triples (step, phase, error)."""
    exits: list[kinds.WorkerExit] = field(default_factory=list)
    """Exits of this machine's workers in the newest attempt that failed."""
    ended: list[Event] = field(default_factory=list)
    """Last events of workers: failed, finished or stopped."""
    remote_exits: list[kinds.WorkerExit] = field(default_factory=list)
    """Exits of workers on other nodes, some of which may be of an earlier round."""
    begun_at: float = field(default_factory=time.time)
    """Unix time at which the newest attempt began."""
    begun_s: float = field(default_factory=time.monotonic)
    """The same by the clock that nobody sets."""
    progressed: bool = False
    """Whether any step was completed."""
    saved: bool = False
    """Whether a checkpoint was saved or loaded, or the state copied in memory."""
    num_polls: int = 0
    """Number of times that the main thread has read the events."""
    awake: threading.Event = field(default_factory=threading.Event)
    """Set by the agent's thread, so that the main thread reads the events at once."""
    error: BaseException | None = None
    signals: list[str] = field(default_factory=list)
    stop_acknowledged: bool = False
    stop_before: tuple[int, int] | None = field(init=False)
    """Identity of an earlier launch's stop file that node 0 has not deleted yet."""

    def __post_init__(self) -> None:
        self.stop_before = _mark(self.rundir.stop_file)

    def take(self, events: list[Event]) -> None:
        seen = {event.kind for event in events}
        self.ended += [e for e in events if e.kind in ENDS]
        self.progressed = self.progressed or kinds.Step.KIND in seen
        self.saved = self.saved or not seen.isdisjoint(SAVES)
        self.remote_exits += [
            kinds.WorkerExit.of(event) for event in events if event.kind == kinds.WorkerExit.KIND
        ]
        self.num_polls += 1

    def catch_up(self) -> bool:
        """Wait until the main thread has read all events written so far; False on timeout."""
        wanted, deadline = self.num_polls + 2, time.monotonic() + CATCH_UP_S  # one may be under way
        while self.num_polls < wanted and time.monotonic() < deadline:
            self.awake.set()
            time.sleep(CATCH_UP_POLL_S)
        return self.num_polls >= wanted

    def cause(self) -> str:
        """Return why the newest attempt failed, and what is known of GPUs and NCCL beside it."""
        if isinstance(self.error, RendezvousError):
            return str(self.error)
        exits, text = [*self.exits, *self.exits_elsewhere()], self.watch.verdict
        if text is None and self.watch.folder.error is not None and isinstance(self.error, OSError):
            text = f"{self.watch.folder.problem}, so how its ranks ended is not known"
            if (last := self.watch.last) is not None:
                text += f"; rank {last.rank} was in {last.where}"
        if text is None:
            text = describe(exits, self.last_events(), self.error)
        beside = [found for x in exits if (found := x.gpu_errors)]
        if any(x.gave_up for x in exits):
            beside.append(collective_dumps.explain(self.rundir.collective_dumps, self.begun_at))
        return "; ".join([text, *filter(None, dict.fromkeys(beside))])

    @property
    def round(self) -> int:
        """Number of the newest round, the same on all nodes; 0 before the first."""
        return self.rendezvous.round if self.rendezvous is not None else 0

    @property
    def is_misconfigured(self) -> bool:
        """Whether a rank found an error of configuration or input before the first step."""
        exits = [*self.exits, *self.exits_elsewhere()]
        return not self.progressed and any(x.exit_code == WORKER_USAGE for x in exits)

    def exits_elsewhere(self) -> list[kinds.WorkerExit]:
        """Return the exits of the newest round's workers on other nodes, whatever their clocks."""
        return [x for x in self.remote_exits if x.round == self.round]

    def last_events(self) -> list[Event]:
        """Return the last events of the newest attempt's workers."""
        newest = max((event.attempt or 0 for event in self.ended), default=0)
        return [e for e in self.ended if e.attempt == newest and newest > self.attempt_before]

    def have_ended_cleanly(self, ranks: Iterable[int]) -> bool:
        """Whether these ranks, which exited with code 0, have reported that they are done.

        If the main thread is blocked, for example by a terminal that accepts no output, the answer
        is True and the error is found later.
        """

        def all_reported() -> bool:
            said = {e.rank for e in self.last_events() if e.kind != kinds.Failure.KIND}
            return said.issuperset(ranks)

        return all_reported() or not self.catch_up() or all_reported()

    def record_exits(self, exits: list[kinds.WorkerExit]) -> None:
        """Record how this node's workers exited, and report it to the other nodes."""
        starved = num_killed_for_memory() > self.killed_for_memory
        on_gpu, past_s = self.plan.cluster.device == "cuda", time.monotonic() - self.begun_s
        errors = gpu_errors(past_s) if on_gpu else ""
        self.exits = [
            replace(
                x,
                round=self.round,
                out_of_memory=starved and x.exit_code == -9,
                gpu_errors=errors or None,
            )
            for x in exits
        ]
        if not self.node.is_head:
            for worker_exit in self.exits:
                self.events.write(worker_exit)

    def may_restart(self) -> bool:
        """Whether another attempt may help: not where ranks raised the same errors before.

        Before the first step only once, and only if a rank was killed from outside: what a rank
        raises there, or needs in memory, would be the same again.
        """
        if not self.progressed and (self.causes or not was_killed(self.exits)):
            return False
        return self.raised_errors.isdisjoint(raised_errors(self.last_events()))

    def record_restart(self) -> None:
        """Record a failure and begin the next attempt."""
        self.causes.append(self.cause())
        self.raised_errors |= raised_errors(self.last_events())
        self.begin_attempt(self.causes[-1])
        if not self.saved:
            self.say("nothing was saved yet: training begins again with the first step")

    def begin_attempt(self, cause: str) -> None:
        """Record why a new attempt begins, and reset the state of the old one."""
        if self.node.is_head:
            self.events.write(kinds.Restart(cause=cause))
        self.watch.begin()
        self.attempt_before = max((event.attempt or 0 for event in self.ended), default=-1)
        self.remote_exits.clear()
        self.begun_at, self.begun_s = time.time(), time.monotonic()

    def full_cause(self) -> str:
        """Return why the run failed: the first cause, and the last if it differs."""
        last = self.cause()
        if not self.causes:
            return last
        same = _without_rank(last) == _without_rank(self.causes[0])
        again = "" if same else f", in the end: {last}"
        num = len(self.causes)
        return f"{self.causes[0]}; {num} restart{'s' * (num > 1)} did not help{again}"

    def leave_slow_nodes(self, slow_nodes: SlowNodes) -> None:
        """Go on without a node that has held the others up for long, if there is one. Node 0."""
        if self.rendezvous is None or self.rendezvous.registry is None:
            return
        event, texts = slow_nodes.decide(self.rendezvous.leave)
        if event is not None:
            self.events.write(event)
        for text in texts:
            self.say(text)

    def say(self, text: str) -> None:
        """Record a note for whoever follows the run; on nodes other than 0, print it to stderr."""
        if self.node.is_head:
            self.events.write(kinds.Note(text=text))
        else:
            print(one_line(f"node {self.node.rank}: {text}"), file=sys.stderr, flush=True)

    def asked_to_stop(self) -> bool:
        return bool(self.signals) or _mark(self.rundir.stop_file) not in (None, self.stop_before)

    def acknowledge_stop(self) -> None:
        """Announce once what happens after a stop request."""
        if self.stop_acknowledged or not self.node.is_head or not self.asked_to_stop():
            return
        self.stop_acknowledged = True
        why = self.signals[0] if self.signals else "asked to stop"
        again = "; Ctrl-C again ends it at once" if "SIGINT" in self.signals else ""
        self.events.write(
            kinds.Note(
                text=f"{why}: stopping; a step that takes long is left unfinished, and the last "
                f"finished step is saved, within elastic.grace_s={self.plan.elastic.grace_s:g}"
                f"{again}"
            )
        )

    def was_regrouped(self, rendezvous: Rendezvous) -> bool:
        """Whether the workers saved and stopped only because nodes join or leave.

        The other nodes' agents may learn of it one report earlier than this one.
        """
        if self.plan.elastic.max_nodes == 1 or self.asked_to_stop():
            return False
        deadline = time.monotonic() + REGROUP_S
        while time.monotonic() < deadline and self.was_stopped() is not False:
            if rendezvous.membership.regroup() and self.was_stopped():
                return True
            time.sleep(POLL_S)
        return False

    def was_stopped(self) -> bool | None:
        """Whether the newest attempt stopped before its last step; None before any worker ends."""
        words = self.last_events()
        return words[-1].kind == kinds.WorkerStopped.KIND if words else None


def _without_rank(cause: str) -> str:
    return re.sub(r"^rank \d+ |; its log.*", "", cause)


def _mark(path: Path) -> tuple[int, int] | None:
    """Return the inode and modification time, which identify one version of a file; or None."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns
