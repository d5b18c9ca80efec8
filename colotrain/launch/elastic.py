"""Launch of a run's workers: torch's elastic agent on a thread of this process.

The main thread keeps the terminal and the signals; the agent restarts workers that die.
"""

from __future__ import annotations

import inspect
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from colotrain.errors import UsageError
from colotrain.events.event import Event
from colotrain.events.kinds import LaunchEnded, LaunchStarted, WorkerFinished, WorkerStopped
from colotrain.events.log import EventReader, EventWriter
from colotrain.launch.forkserver import ENTRY, import_agent, warm_up, without_results, work
from colotrain.launch.memory_watch import MemoryWatch
from colotrain.launch.node_registry import Refused, Stopped
from colotrain.launch.rendezvous import Node, Rendezvous
from colotrain.launch.state import POLL_S, Launch
from colotrain.launch.torch_log import torch_logs_to
from colotrain.launch.watch import Watch
from colotrain.launch.worker_exits import clean_exits, worker_exits
from colotrain.rundir import RunDir
from colotrain.spec.exit_codes import EXIT_CODE_BY_STATUS, INTERRUPTED, WORKER_FINAL
from colotrain.spec.plan import RunPlan

LOST_GRACE_S = 10.0
"""Seconds of grace for workers that wait for a lost rank: they cannot save any more."""


def launch(
    plan: RunPlan,
    rundir: RunDir,
    *,
    follow: Callable[[list[Event]], None] = lambda events: None,
    worker: str = ENTRY,
    node: Node | None = None,
    began_at: float | None = None,
) -> tuple[int, str]:
    """Run the plan's workers until they end; return the exit code and the cause of a failure.

    In a run on several nodes these are the workers of `node`; every node's launcher must call this.
    Raises `UsageError` if the nodes disagree about the run.

    `follow` is called with new events several times a second, on this (the main) thread; if it
    raises, the run continues without it. SIGINT, SIGTERM, SIGHUP and SIGUSR1 ask the workers to
    save and stop; a second SIGINT ends everything at once. `worker` is the module that the
    processes run. `began_at` is the Unix time at which the launching command began, by default now.
    """
    warm_up()
    node = node or Node()
    own_file = rundir.launcher_events if node.is_head else rundir.node_events(node.rank)
    current = Launch(
        plan=plan,
        rundir=rundir,
        events=EventWriter(own_file),
        worker=worker,
        node=node,
        watch=Watch(plan=plan, rundir=rundir),
    )
    current.watch.say = current.say
    follow = _shielded(follow)
    reader = EventReader(rundir)
    reader.skip_to_end()  # events of earlier launches
    if node.is_head:
        rundir.stop_file.unlink(missing_ok=True)
        current.events.write(
            LaunchStarted(
                pid=os.getpid(),
                host=socket.gethostname(),
                world_size=plan.world_size,
                began_at=began_at or time.time(),
            )
        )
    agent = threading.Thread(target=_run_agent, args=(current,), name="agent", daemon=True)
    memory_watch = MemoryWatch(plan, current.watch)
    with _signals(current):
        agent.start()
        memory_watch.start()
        running = True
        while running:
            running = agent.is_alive()
            fresh = reader.drain()
            current.take(fresh)
            follow(fresh)
            current.acknowledge_stop()
            current.watch.check(asked_to_stop=current.asked_to_stop())
            agent.join(POLL_S)
    memory_watch.close()
    current.watch.close()
    status = _outcome(current)
    cause = current.full_cause() if status == "failed" else ""
    if node.is_head:
        exit_code = EXIT_CODE_BY_STATUS[status]
        current.events.write(LaunchEnded(status=status, exit_code=exit_code, cause=cause))
    follow(reader.drain())
    if isinstance(current.error, Refused | UsageError):
        raise UsageError(cause)
    return EXIT_CODE_BY_STATUS[status], cause


def _shielded(follow: Callable[[list[Event]], None]) -> Callable[[list[Event]], None]:
    """Call `follow` until it raises once: a closed pipe or a display bug must not end the run."""
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
    if current.error is not None and not isinstance(current.error, Stopped):
        return "failed"
    if current.error is not None:
        return "interrupted" if "SIGINT" in current.signals else "preempted"
    if current.ended and current.ended[-1].kind == WorkerStopped.KIND:
        return "interrupted" if "SIGINT" in current.signals else "preempted"
    if any(event.kind == WorkerFinished.KIND for event in current.ended):
        return "finished"
    current.error = RuntimeError("every worker ended early, with exit code 0 and without a message")
    return "failed"


def _run_agent(current: Launch) -> None:
    """Body of the agent's thread."""
    try:
        _elastic(current)
    except BaseException as error:  # the main thread reports it
        current.error = error


def _elastic(current: Launch) -> None:
    import_agent()
    from torch.distributed.elastic.agent.server.api import (
        RunResult,
        WorkerGroup,
        WorkerSpec,
        WorkerState,
    )
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

    plan, rundir, interrupted = current.plan, current.rundir, current.was_regrouped
    rendezvous = Rendezvous(plan, rundir, current.node, stop=current.asked_to_stop, say=current.say)

    class Agent(LocalElasticAgent):
        """Records why workers died; stops restarting when another attempt cannot help."""

        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            result: RunResult = super()._monitor_workers(worker_group)
            left = result.state == WorkerState.HEALTHY and clean_exits(self._pcontext, worker_group)
            if left:
                if not current.have_ended_cleanly(left):
                    result = RunResult(state=WorkerState.FAILED, failures=left)
                elif not interrupted(rendezvous):  # otherwise the agent checks for waiting nodes
                    results = dict.fromkeys(left, 0)
                    result = RunResult(state=WorkerState.SUCCEEDED, return_values=results)
            if result.is_failed():
                current.catch_up()
                current.record_exits(worker_exits(folder, self._pcontext, result.failures))
                final = any(x.exit_code == WORKER_FINAL for x in current.exits)
                again = not current.progressed or current.is_repeated_failure()
                if final or again or current.watch.is_final:
                    self._remaining_restarts = 0
                if self._remaining_restarts:
                    current.record_restart()
            return result

        def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
            with without_results():
                result: dict[int, Any] = super()._start_workers(worker_group)
                return result

        def _let_save(self, worker_group: WorkerGroup, grace_s: float) -> None:
            """Send SIGTERM, on which workers save, and wait until they have exited."""
            for pid in self._pcontext.pids().values() if self._pcontext else ():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
            deadline = time.monotonic() + grace_s
            while time.monotonic() < deadline and not clean_exits(self._pcontext, worker_group):
                if super()._monitor_workers(worker_group).state != WorkerState.HEALTHY:
                    return
                time.sleep(POLL_S)

        def _restart_workers(self, worker_group: WorkerGroup) -> None:
            if worker_group.state == WorkerState.HEALTHY:  # nodes join or leave
                grace_s = plan.elastic.grace_s if rendezvous.is_orderly() else LOST_GRACE_S
                reason = rendezvous.regroup()
                time.sleep(2 * POLL_S)  # reports of the other nodes may still arrive
                current.begin_attempt(current.cause() if current.remote_exits else reason)
                self._let_save(worker_group, grace_s)
            super()._restart_workers(worker_group)

    folder = _log_folder(current)
    spec = WorkerSpec(
        role="worker",
        local_world_size=plan.cluster.procs_per_node,
        entrypoint=work,
        args=(current.worker, str(rundir.path), os.getpid()),
        rdzv_handler=rendezvous.handler(),
        max_restarts=plan.elastic.max_restarts,
        monitor_interval=0.1,
        local_addr="127.0.0.1",
    )
    logs = DefaultLogsSpecs(log_dir=str(folder), redirects=Std.ALL)
    agent = Agent(
        spec=spec,
        logs_specs=logs,
        start_method="forkserver",
        **_shutdown_timeout(LocalElasticAgent),
        exit_barrier_timeout=min(300.0, plan.elastic.hang_timeout_s),
    )
    current.watch.pids = lambda: agent._pcontext.pids() if agent._pcontext else {}
    current.watch.first_rank = lambda: (
        (agent.get_worker_group().group_rank or 0) * plan.cluster.procs_per_node
    )
    current.watch.logs = folder
    failed: BaseException | None = None
    try:
        with torch_logs_to(folder / "torch.log"):  # our events replace its messages
            result = agent.run()
        if result.is_failed():
            raise RuntimeError("workers failed")
    except BaseException as error:
        failed = error
        raise
    finally:
        ends_all = failed is not None and not isinstance(failed, Stopped)
        rendezvous.end(current.full_cause() if ends_all else "")


def _shutdown_timeout(agent: type) -> dict[str, Any]:
    """Return the agent's option for the seconds that workers get to exit (torch 2.12)."""
    known = inspect.signature(agent).parameters
    return {"shutdown_timeout": 10} if "shutdown_timeout" in known else {}


def _end_now(current: Launch) -> None:
    """Exit at once; the workers notice that their launcher is gone and exit too."""
    ended = LaunchEnded(status="interrupted", exit_code=INTERRUPTED, cause="ended at once")
    current.events.write(ended)
    show_cursor = b"\x1b[?25h\n" if sys.stderr.isatty() else b""  # a live view hides it
    with suppress(OSError):
        os.write(sys.stderr.fileno(), show_cursor + b"ended at once, without saving\n")
    os._exit(INTERRUPTED)


def _log_folder(current: Launch) -> Path:
    of_node = f"-node{current.node.rank}" if current.plan.elastic.max_nodes > 1 else ""
    folder = current.rundir.logs / (time.strftime("%Y%m%d-%H%M%S") + of_node)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


@contextmanager
def _signals(current: Launch) -> Iterator[None]:
    """Handle the signals while workers run; an ignored SIGHUP (nohup) stays ignored."""

    def ask(number: int, _: Any) -> None:
        name = signal.Signals(number).name
        current.signals.append(name)
        if current.signals.count("SIGINT") > 1:
            _end_now(current)
        current.rundir.stop_file.write_text(name)

    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, ask) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            # after a stop request, another signal must not change the exit code
            signal.signal(number, signal.SIG_IGN if current.signals else handler)
