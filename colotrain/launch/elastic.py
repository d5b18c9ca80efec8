"""Launching: torch's elastic agent in this process, on a thread of its own.

The main thread keeps the terminal and the signals; the agent restarts workers that die.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from colotrain.errors import FINAL_EXIT
from colotrain.launch.causes import Death, describe
from colotrain.launch.forkserver import ENTRY, warm_up, work
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
        failed = [event for event in self.ended if event.kind == "failed"]
        newest = max((event.attempt or 0 for event in failed), default=0)
        return describe(self.deaths, [e for e in failed if e.attempt == newest], self.error)


def launch(
    plan: RunPlan,
    rundir: RunDir,
    *,
    follow: Callable[[list[Event]], None] = lambda events: None,
    worker: str = ENTRY,
) -> tuple[int, str]:
    """Run the plan's workers until they end; returns the exit code and the cause of a failure.

    `follow` is called with new events several times a second, on this (the main) thread. The
    first SIGINT or SIGTERM asks the workers to save and stop, the second ends everything at once.
    `worker` is the module that the processes run.
    """
    warm_up()
    rundir.stop_file.unlink(missing_ok=True)
    current = Launch(
        plan=plan, rundir=rundir, events=EventWriter(rundir.launcher_events), worker=worker
    )
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
            agent.join(POLL_S)
    status = _outcome(current)
    cause = current.cause() if status == "failed" else ""
    current.events.write("done", status=status, exit_code=EXIT_CODES[status], cause=cause)
    follow(reader.drain())
    return EXIT_CODES[status], cause


def _outcome(current: Launch) -> str:
    if current.error is not None:
        return "failed"
    if current.ended and current.ended[-1].kind == "stopped":
        return "interrupted" if "SIGINT" in current.signals else "preempted"
    return "finished"


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
                current.deaths = [_death(rundir, r, f) for r, f in result.failures.items()]
                final = any(death.exit_code == FINAL_EXIT for death in current.deaths)
                if final or not current.progressed:  # it would fail again
                    self._remaining_restarts = 0
                if self._remaining_restarts:
                    time.sleep(2 * POLL_S)  # let the main thread read the workers' last words
                    current.events.write("restart", cause=current.cause())
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
        args=(current.worker, str(rundir.path)),
        rdzv_handler=rendezvous.get_rendezvous_handler(parameters),
        max_restarts=plan.elastic.max_restarts,
        monitor_interval=0.1,
        local_addr="127.0.0.1",
    )
    logs = DefaultLogsSpecs(log_dir=str(_log_folder(rundir)), redirects=Std.ALL)
    agent = Agent(spec=spec, logs_specs=logs, start_method="forkserver", shutdown_timeout=10)
    try:
        result = agent.run()
    finally:
        spec.rdzv_handler.shutdown()
    if result.is_failed():
        raise RuntimeError("workers failed")


def _death(rundir: RunDir, rank: int, failure: Any) -> Death:
    """From torch elastic's ProcessFailure."""
    logs = rundir.logs.glob(f"*/*/attempt_*/{failure.local_rank}/stderr.log")
    log = max(logs, key=lambda path: path.stat().st_mtime, default=rundir.logs)
    return Death(rank=rank, exit_code=failure.exitcode, log=str(log), time=failure.timestamp)


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
        if len(current.signals) > 1:
            os._exit(EXIT_CODES["interrupted"])  # the kernel kills the workers with us
        current.rundir.stop_file.write_text(name)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.signal(number, ask) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
