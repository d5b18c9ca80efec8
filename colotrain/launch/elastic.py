"""Launching: torch's elastic agent in this process, on a thread of its own.

The main thread keeps the terminal and the signals; the agent restarts workers that die.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from colotrain.errors import FINAL_EXIT
from colotrain.launch.causes import Death, describe, num_killed_for_memory
from colotrain.launch.forkserver import ENTRY, warm_up, work
from colotrain.launch.watch import Watch
from colotrain.observe.events import Event, EventReader, EventWriter
from colotrain.plan import RunPlan
from colotrain.rundir import RunDir

POLL_S = 0.2
EXIT_CODES = {"finished": 0, "failed": 1, "preempted": 75, "interrupted": 130}


@dataclass(slots=True, kw_only=True)
class Launch:
    """One launch of a run's workers on this machine, shared by the two threads."""

    plan: RunPlan
    rundir: RunDir
    events: EventWriter
    worker: str
    """Module that each worker process runs."""
    watch: Watch
    killed_for_memory: int = field(default_factory=num_killed_for_memory)
    """Processes that the kernel had ended for want of memory when this began."""
    attempt_before: int = -1
    """The newest attempt that has been restarted."""
    causes: list[str] = field(default_factory=list)
    """Why earlier attempts failed, the first one first."""
    deaths: list[Death] = field(default_factory=list)
    """How the workers of the newest attempt that failed ended."""
    ended: list[Event] = field(default_factory=list)
    """What workers said last: failed, finished or stopped."""
    progressed: bool = False
    """Whether any step was made."""
    error: BaseException | None = None
    signals: list[str] = field(default_factory=list)

    def take(self, events: list[Event]) -> None:
        self.ended += [e for e in events if e.kind in ("failed", "finished", "stopped")]
        self.progressed = self.progressed or any(e.kind == "step" for e in events)

    def cause(self) -> str:
        """Why the newest attempt failed."""
        if self.watch.verdict is not None:
            return self.watch.verdict
        return describe(self.deaths, self.last_words(), self.error)

    def last_words(self) -> list[Event]:
        """What the workers of the newest attempt said last."""
        newest = max((event.attempt or 0 for event in self.ended), default=0)
        return [e for e in self.ended if e.attempt == newest and newest > self.attempt_before]

    def has_failed(self, deaths: list[Death]) -> None:
        """Take how this machine's workers ended."""
        starved = num_killed_for_memory() > self.killed_for_memory
        self.deaths = [replace(d, out_of_memory=starved and d.exit_code == -9) for d in deaths]

    def restarts(self) -> None:
        """Tell why, and look at the next attempt with fresh eyes."""
        self.causes.append(self.cause())
        self.events.write("restart", cause=self.causes[-1])
        self.watch.begin()
        self.attempt_before = max((event.attempt or 0 for event in self.ended), default=-1)

    def whole_cause(self) -> str:
        """Why the run failed in the end: the first cause, where restarting did not help."""
        last = self.cause()
        if not self.causes:
            return last
        again = "" if last == self.causes[0] else f", in the end: {last}"
        num = len(self.causes)
        return f"{self.causes[0]}; {num} restart{'s' * (num > 1)} did not help{again}"


def launch(
    plan: RunPlan,
    rundir: RunDir,
    *,
    follow: Callable[[list[Event]], None] = lambda events: None,
    worker: str = ENTRY,
) -> tuple[int, str]:
    """Run the plan's workers until they end; returns the exit code and the cause of a failure.

    `follow` is called with new events several times a second, on this (the main) thread; when it
    fails, the run goes on unseen. SIGINT, SIGTERM, SIGHUP and SIGUSR1 ask the workers to save and
    stop; a second SIGINT ends everything at once. `worker` is the module that the processes run.
    """
    warm_up()
    rundir.stop_file.unlink(missing_ok=True)
    current = Launch(
        plan=plan,
        rundir=rundir,
        events=EventWriter(rundir.launcher_events),
        worker=worker,
        watch=Watch(plan=plan, rundir=rundir),
    )
    follow = _shielded(follow)
    reader = EventReader(rundir)
    reader.drain()  # what earlier launches wrote
    current.events.write(
        "launch", pid=os.getpid(), host=socket.gethostname(), world_size=plan.world_size
    )
    agent = threading.Thread(target=_run_agent, args=(current,), name="agent", daemon=True)
    with _signals(current):
        agent.start()
        running = True
        while running:
            running = agent.is_alive()
            fresh = reader.drain()
            current.take(fresh)
            follow(fresh)
            current.watch.look(asked_to_stop=rundir.stop_file.exists())
            agent.join(POLL_S)
    current.watch.close()
    status = _outcome(current)
    cause = current.whole_cause() if status == "failed" else ""
    current.events.write("done", status=status, exit_code=EXIT_CODES[status], cause=cause)
    follow(reader.drain())
    return EXIT_CODES[status], cause


def _shielded(follow: Callable[[list[Event]], None]) -> Callable[[list[Event]], None]:
    """`follow` until it fails: a closed pipe or a bug in showing must not leave a run headless."""
    failed = False

    def shielded(events: list[Event]) -> None:
        nonlocal failed
        if failed:
            return
        try:
            follow(events)
        except (Exception, SystemExit) as error:
            failed = True
            with suppress(Exception):
                print(f"warning: no longer shown ({error!r}); training goes on", file=sys.stderr)

    return shielded


def _outcome(current: Launch) -> str:
    if current.error is not None:
        return "failed"
    if current.ended and current.ended[-1].kind == "stopped":
        return "interrupted" if "SIGINT" in current.signals else "preempted"
    if any(event.kind == "finished" for event in current.ended):
        return "finished"
    current.error = RuntimeError("every worker ended early, with exit code 0 and without a word")
    return "failed"


def _run_agent(current: Launch) -> None:
    """Body of the agent's thread."""
    try:
        _elastic(current)
    except BaseException as error:  # handed to the main thread
        current.error = error


def _elastic(current: Launch) -> None:
    # what it says is said better by the events, and a thread without signals is meant
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous import registry as rendezvous

    plan, rundir = current.plan, current.rundir

    class Agent(LocalElasticAgent):
        """Tells why workers died, and gives up at once where trying again cannot help."""

        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            result: RunResult = super()._monitor_workers(worker_group)
            if result.is_failed():
                current.has_failed(_deaths(rundir, self._pcontext, result.failures))
                final = any(death.exit_code == FINAL_EXIT for death in current.deaths)
                if final or current.watch.is_final or not current.progressed:  # it would fail again
                    self._remaining_restarts = 0
                if self._remaining_restarts:
                    time.sleep(2 * POLL_S)  # let the main thread read the workers' last words
                    current.restarts()
            return result

    parameters = RendezvousParameters(
        backend="c10d",
        endpoint="127.0.0.1:0",
        run_id=rundir.name,
        min_nodes=1,
        max_nodes=1,
        local_addr="127.0.0.1",
    )
    spec = WorkerSpec(
        role="worker",
        local_world_size=plan.cluster.procs_per_node,
        entrypoint=work,
        args=(current.worker, str(rundir.path), os.getpid()),
        rdzv_handler=rendezvous.get_rendezvous_handler(parameters),
        max_restarts=plan.elastic.max_restarts,
        monitor_interval=0.1,
        local_addr="127.0.0.1",
    )
    logs = DefaultLogsSpecs(log_dir=str(_log_folder(rundir)), redirects=Std.ALL)
    agent = Agent(spec=spec, logs_specs=logs, start_method="forkserver", shutdown_timeout=10)
    current.watch.pids = lambda: agent._pcontext.pids() if agent._pcontext else {}
    try:
        result = agent.run()
    finally:
        spec.rdzv_handler.shutdown()
    if result.is_failed():
        raise RuntimeError("workers failed")


def _deaths(rundir: RunDir, processes: Any, failures: dict[int, Any]) -> list[Death]:
    """How the workers of this machine ended, those that the agent itself terminated left out.

    torch elastic reports only one of several that died within a poll; the processes tell all.
    """
    first_rank = min(rank - failure.local_rank for rank, failure in failures.items())
    ended = getattr(getattr(processes, "_pc", None), "processes", [])
    codes = {first_rank + local: process.exitcode for local, process in enumerate(ended)}
    codes |= {rank: failure.exitcode for rank, failure in failures.items()}
    deaths = [
        _death(rundir, rank, rank - first_rank, code)
        for rank, code in codes.items()
        if code is not None
    ]
    return [death for death in deaths if death.killed_by != "SIGTERM"] or deaths


def _death(rundir: RunDir, rank: int, local_rank: int, code: int) -> Death:
    logs = rundir.logs.glob(f"*/*/attempt_*/{local_rank}/stderr.log")
    log = max(logs, key=lambda path: path.stat().st_mtime, default=rundir.logs)
    lines = log.read_text("utf-8", "replace").splitlines() if log.is_file() else []
    return Death(rank=rank, exit_code=code, log=str(log), last_line=lines[-1] if lines else "")


def _end_now(current: Launch) -> None:
    """Leave at once; the workers notice and follow."""
    current.events.write(
        "done", status="interrupted", exit_code=EXIT_CODES["interrupted"], cause="ended at once"
    )
    if sys.stderr.isatty():
        os.write(sys.stderr.fileno(), b"\x1b[?25h\n")  # a live view hides the cursor
    os._exit(EXIT_CODES["interrupted"])


def _log_folder(rundir: RunDir) -> Path:
    folder = rundir.logs / time.strftime("%Y%m%d-%H%M%S")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


@contextmanager
def _signals(current: Launch) -> Iterator[None]:
    """Own the signals while workers run."""

    def ask(number: int, _: Any) -> None:
        name = signal.Signals(number).name
        current.signals.append(name)
        if current.signals.count("SIGINT") > 1:
            _end_now(current)
        current.rundir.stop_file.write_text(name)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    before = {number: signal.signal(number, ask) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            # once stopped, a second signal must not spoil the exit code on the way out
            signal.signal(number, signal.SIG_IGN if current.signals else handler)
