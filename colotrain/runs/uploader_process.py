"""The process of `colotrain.runs.uploader`, as a launcher starts it and waits for it at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from colotrain.config.stores import run_address
from colotrain.dotted import new_python
from colotrain.errors import ColotrainError
from colotrain.events.kinds import Note
from colotrain.events.log import EventWriter
from colotrain.rundir import RunDir
from colotrain.runs.sync_state import SyncState, small_files, version_of
from colotrain.runs.uploader import next_checkpoint
from colotrain.show.console import tell
from colotrain.spec.exit_codes import signal_name
from colotrain.spec.plan import RunPlan

MODULE = "colotrain.runs.uploader"
RESTART_S = 5.0
"""Seconds before an uploader that ended by itself is started again."""
QUIET_S = 5.0
"""Seconds of waiting at the end of a run before a message says so."""
END_S = 5.0
"""Longest time that a killed uploader may take to end."""


class UploaderProcess:
    """Keeps an uploader running for a run whose plan names a store; else does nothing.

    Entering starts the uploader, and an exception ends it at once. Without one it runs on until
    `close`, which the caller must call.
    """

    def __init__(self, plan: RunPlan, rundir: RunDir) -> None:
        self._plan, self._rundir, self._address = plan, rundir, address_of(plan, rundir)
        self._process: subprocess.Popen[bytes] | None = None
        self._closing, self._lock = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._keep_running, name="uploads", daemon=True)

    def __enter__(self) -> UploaderProcess:
        if self._address is not None:
            self._start_process()
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._closing.set()
            self._kill()

    def close(self) -> str:
        """Wait until everything is in the store, at most `elastic.grace_s`; return what is not.

        Ctrl-C ends the wait. The result is empty if nothing is missing.
        """
        if self._process is None:
            return ""
        self._closing.set()
        with _interruptible(), suppress(KeyboardInterrupt):
            self._finish(self._plan.elastic.grace_s)
        self._kill()
        return self.missing()

    def _kill(self) -> None:
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                self._process.kill()
                self._process.wait(END_S)

    def missing(self) -> str:
        """Return what is not in the store as it is here, and why; empty if nothing is."""
        assert self._address is not None
        synced, names = SyncState(self._rundir, self._address), list[str]()
        newest = next_checkpoint(self._rundir, synced, set())
        names += [newest.name] if newest else []
        for name in small_files(self._rundir):
            if name.startswith("logs/") or self._rundir.path / name == self._rundir.upload_events:
                continue  # they go on after the run's end
            with suppress(FileNotFoundError):
                if not synced.has(name, version_of(self._rundir.path / name)):
                    names.append(name)
        why = f" ({synced.error})" if synced.error else ""
        return f"{', '.join(names)}{why}" if names else ""

    def _finish(self, limit_s: float) -> None:
        deadline, told = time.monotonic() + limit_s, False
        while time.monotonic() < deadline:
            process = self._ask_to_end()
            try:
                process.wait(min(QUIET_S, max(0.0, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                if not told:
                    what = f"sending the rest to {self._address}"
                    line = f"{what}, at most {limit_s:.0f} s; Ctrl-C leaves it"
                    tell(line)
                told = True
                continue
            if process.returncode == 0:
                return
            time.sleep(1.0)
            with self._lock:
                self._start_again()

    def _ask_to_end(self) -> subprocess.Popen[bytes]:
        with self._lock:
            assert self._process is not None
            if self._process.stdin is not None and not self._process.stdin.closed:
                with suppress(OSError):
                    self._process.stdin.close()
            return self._process

    def _keep_running(self) -> None:
        """Body of the thread: start another uploader if one fails, as when memory is short."""
        told = ""
        while not self._closing.wait(RESTART_S):
            with self._lock:
                code = self._process.poll() if self._process is not None else None
                if code and not self._closing.is_set():
                    if (how := _how_it_ended(code)) != told:
                        told = how
                        self._say(f"what sends the run to {self._address} {how}; it begins again")
                    self._start_again()

    def _say(self, text: str) -> None:
        with EventWriter(self._rundir.upload_events, inside=self._rundir.path) as events:
            events.write(Note(text=f"warning: {text}"))

    def _start_again(self) -> None:
        """Start another uploader; where there is no memory or process for it now, later."""
        with suppress(OSError):
            self._start_process()

    def _start_process(self) -> None:
        keep = str(self._plan.checkpoint.keep)
        where = [str(self._rundir.path), str(self._plan.runs_dir), keep]
        self._process = subprocess.Popen(
            [*new_python(), "-m", MODULE, *where, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the run
        )


def _how_it_ended(code: int) -> str:
    """Return text like `was killed by SIGKILL`."""
    if code > 0:
        return f"ended with exit code {code}"
    with suppress(ValueError):
        return f"was killed by {signal_name(-code)}"
    return f"was killed by signal {-code}"


def address_of(plan: RunPlan, rundir: RunDir) -> str | None:
    """Return the address of a run in its store; None if it has none.

    The run's name there is that of its folder, whatever name a foreign plan has.
    """
    return None if plan.runs_dir is None else run_address(plan.runs_dir, rundir.name)


def report_unsent(left: str, plan: RunPlan, rundir: RunDir, *, finished: bool) -> None:
    """Warn of what is not in the store; raise `ColotrainError` instead if the run has finished."""
    if not left:
        return
    address = address_of(plan, rundir)
    fix = f"it is here; `colotrain resume {rundir.argument}` sends the rest"
    if finished:
        problem = f"{rundir.name} has finished, but is not all in {address}: {left}"
        raise ColotrainError(problem, fix)
    tell(f"warning: not in {address}: {left}; {fix}")


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C interrupt, also where the run was stopped by a signal and ignores further ones."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
