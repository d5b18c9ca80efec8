"""Launch of a run's workers: torch's elastic agent on a thread of this process.

The main thread keeps the terminal and the signals; the agent restarts workers that die.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from colotrain.errors import UsageError
from colotrain.events.event import Event
from colotrain.events.kinds import LaunchEnded, LaunchStarted, WorkerFinished, WorkerStopped
from colotrain.events.log import EventReader, EventWriter
from colotrain.launch.memory_watch import MemoryWatch
from colotrain.launch.node_registry import Left, NotNeeded, Refused, Stopped
from colotrain.launch.rendezvous import Node
from colotrain.launch.server.forkserver import ENTRY, import_agent, warm_up
from colotrain.launch.slow_nodes import SlowNodes
from colotrain.launch.state import POLL_S, Launch
from colotrain.launch.watch import Watch
from colotrain.rundir import RunDir
from colotrain.spec.exit_codes import EXIT_CODE_BY_STATUS, INTERRUPTED, USAGE
from colotrain.spec.plan import RunPlan

Follow = Callable[[list[Event]], Sequence[str]]


def launch(
    plan: RunPlan,
    rundir: RunDir,
    *,
    follow: Follow = lambda events: (),
    worker: str = ENTRY,
    case_digests: Sequence[str] = (),
    node: Node | None = None,
    began_at: float | None = None,
    slow_nodes: SlowNodes | None = None,
) -> tuple[int, str]:
    """Run the plan's workers until they end; return the exit code and the cause of a failure.

    In a run on several nodes these are the workers of `node`; every node's launcher must call this.
    Raises `UsageError` if the nodes disagree about the run.

    `follow` is called with new events several times a second, on this (the main) thread, and
    returns notes to record; if it raises, the run continues without it. SIGINT, SIGTERM, SIGHUP and
    SIGUSR1 ask the workers to save and stop; a second SIGINT ends everything at once. `worker` is
    the module that the processes run, `case_digests` are those of the plans that it reads beside
    the run's. `began_at` is the Unix time at which the launching command began, by default now.
    `slow_nodes`, which `follow` keeps up to date, tells without which nodes the run should go on.
    """
    warm_up()
    node = node or Node()
    own_file = rundir.launcher_events if node.is_head else rundir.node_events(node.rank)
    current = Launch(
        plan=plan,
        rundir=rundir,
        events=EventWriter(own_file, inside=rundir.path),
        worker=worker,
        case_digests=case_digests,
        node=node,
        watch=Watch(plan=plan, rundir=rundir),
    )
    current.watch.say = current.say
    reader = EventReader(rundir)
    reader.skip_to_end()  # events of earlier launches
    if node.is_head:
        rundir.stop_file.unlink(missing_ok=True)
        current.events.write(_launch_started(plan, began_at or time.time()))
    follow = shielded(follow)
    with _signals(current):
        _follow_workers(current, follow, reader, slow_nodes)
    status = _outcome(current)
    exit_code = EXIT_CODE_BY_STATUS[status]
    if status == "failed" and current.is_misconfigured:
        exit_code = USAGE
    cause = current.full_cause() if status == "failed" else ""
    if isinstance(current.error, Left | NotNeeded):
        cause = str(current.error)
    if node.is_head:
        current.events.write(LaunchEnded(status=status, exit_code=exit_code, cause=cause))
    follow(reader.drain())
    if isinstance(current.error, Refused | UsageError):
        raise UsageError(cause)
    return exit_code, cause


def _launch_started(plan: RunPlan, began_at: float) -> LaunchStarted:
    return LaunchStarted(
        pid=os.getpid(),
        host=socket.gethostname(),
        world_size=plan.world_size,
        began_at=began_at,
    )


def _follow_workers(
    current: Launch, follow: Follow, reader: EventReader, slow_nodes: SlowNodes | None
) -> None:
    """Run the agent on a thread until it ends; meanwhile watch the workers, and tell `follow`."""
    agent = threading.Thread(target=_run_agent, args=(current,), name="agent", daemon=True)
    memory_watch = MemoryWatch(current.plan, current.watch)
    agent.start()
    memory_watch.start()
    running = True
    while running:
        running = agent.is_alive()
        fresh = reader.drain()
        current.take(fresh)
        for text in follow(fresh):
            current.say(text)
        if slow_nodes is not None and not current.asked_to_stop():
            current.leave_slow_nodes(slow_nodes)
        current.acknowledge_stop()
        current.watch.check(asked_to_stop=current.asked_to_stop())
        current.awake.wait(POLL_S)
        current.awake.clear()
    memory_watch.close()
    current.watch.close()


def shielded(follow: Follow) -> Follow:
    """Call `follow` until it raises once: a closed pipe or a display bug must not end the run."""
    failed = False

    def shown(events: list[Event]) -> Sequence[str]:
        nonlocal failed
        if failed:
            return ()
        try:
            return follow(events)
        except (Exception, SystemExit) as error:
            failed = True
            with suppress(Exception):
                print(f"warning: no longer shown ({error!r}); training goes on", file=sys.stderr)
            return ()

    return shown


def _outcome(current: Launch) -> str:
    if isinstance(current.error, Left):
        return "left"
    if isinstance(current.error, NotNeeded):
        return "finished"
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
        import_agent()
        from colotrain.launch.agent import run_workers

        run_workers(current)
    except BaseException as error:  # the main thread reports it
        current.error = error
    finally:
        current.awake.set()


def _end_now(current: Launch) -> None:
    """Exit at once; the workers notice that their launcher is gone and exit too."""
    ended = LaunchEnded(status="interrupted", exit_code=INTERRUPTED, cause="ended at once")
    current.events.write(ended)
    show_cursor = b"\x1b[?25h\n" if sys.stderr.isatty() else b""  # a live view hides it
    with suppress(OSError):
        os.write(sys.stderr.fileno(), show_cursor + b"ended at once, without saving\n")
    os._exit(INTERRUPTED)


@contextmanager
def _signals(current: Launch) -> Iterator[None]:
    """Handle the signals while workers run; an ignored SIGHUP (nohup) stays ignored."""

    def ask(number: int, _: Any) -> None:
        name = signal.Signals(number).name
        current.signals.append(name)
        if current.signals.count("SIGINT") > 1:
            _end_now(current)
        try:
            current.rundir.write(current.rundir.stop_file, name)
        except OSError:  # for example on a full disk
            current.watch.ask_to_stop()

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
