"""The time between a run's creation and its workers: failures there are recorded too."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from colotrain.errors import ColotrainError
from colotrain.events.kinds import LaunchEnded
from colotrain.events.log import EventReader, EventWriter
from colotrain.rundir import RunDir
from colotrain.spec.exit_codes import EXIT_CODE_BY_STATUS, PREEMPTED


class AskedToStop(ColotrainError):
    """A signal arrived before there were workers that could save."""

    exit_code = PREEMPTED


@contextmanager
def end_recorded(rundir: RunDir) -> Iterator[None]:
    """Write a `done` event if an error or Ctrl-C ends the block and nothing else wrote it."""
    events = EventReader(rundir, ranks=())
    events.skip_to_end()  # those of earlier launches, whatever the clock was then
    try:
        yield
    except BaseException as error:
        if not any(event.kind == LaunchEnded.KIND for event in events.drain()):
            _record(rundir, error)
        raise


def _record(rundir: RunDir, error: BaseException) -> None:
    status = "failed"
    if isinstance(error, KeyboardInterrupt):
        status = "interrupted"
    elif isinstance(error, AskedToStop):
        status = "preempted"
    cause = error.problem if isinstance(error, ColotrainError) else ""
    cause = cause or " ".join(f"{type(error).__name__}: {error}".rstrip(": ").split())
    with EventWriter(rundir.launcher_events, inside=rundir.path) as events:
        exit_code = EXIT_CODE_BY_STATUS[status]
        events.write(LaunchEnded(status=status, exit_code=exit_code, cause=cause))


@contextmanager
def ended_by_signals(
    what: str = "stopped before the first step", fix: str = "`colotrain resume` begins it"
) -> Iterator[None]:
    """Raise `AskedToStop` on SIGTERM, SIGHUP and SIGUSR1, unless ignored, within the block."""

    def stop(number: int, _: Any) -> None:
        name = signal.Signals(number).name
        raise AskedToStop(f"{name}: {what}", fix)

    with ExitStack() as handlers:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            if signal.getsignal(number) is not signal.SIG_IGN:
                before = signal.signal(number, stop)
                handlers.callback(signal.signal, number, before)
        yield
