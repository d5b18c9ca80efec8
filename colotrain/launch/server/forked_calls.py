"""Calls functions that need torch or the user's code in a process forked from the fork server.

The launcher need not import torch first, output of the user's code does not reach the launcher's
stdout, and changes that this code makes end with the process.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any, Self

from colotrain.callers_script import Context, Script, belong_to_run, import_script
from colotrain.errors import ColotrainError
from colotrain.parent_process import die_with
from colotrain.spec.exit_codes import signal_name

IMPORT = f"{import_script.__module__}:{import_script.__name__}"
LIMIT_S = 600.0
"""Maximum seconds of a call: as long as a rank may be silent until its first step."""


class NotForked(Exception):
    """No fork server is available."""


class ForkedCaller:
    """Calls functions in another process, which is forked at the first call.

    `meanwhile` runs here while that first call is awaited. `script`: one that the process imports
    first, because functions of `__main__` will be asked for. On leaving the `with` block the
    process is killed; each later call forks another for itself.
    """

    def __init__(
        self, *, meanwhile: Callable[[], None] = lambda: None, script: Script | None = None
    ) -> None:
        self.script = script or {}
        self._meanwhile = meanwhile
        self._process: Any = None
        self._pipe: Connection | None = None
        self._forking: threading.Thread | None = None
        self._stays = False

    def __enter__(self) -> Self:
        self._stays = True
        return self

    def __exit__(self, *_: object) -> None:
        self._stays = False
        self.close()

    def __call__(self, function: str, *args: Any) -> Any:
        """Return the result of `package.module:function` for `args`, or raise its `ColotrainError`.

        Raises `NotForked` if no process can be forked.
        """
        try:
            return self._ask(function, args)
        finally:
            if not self._stays:
                self.close()

    def _ask(self, function: str, args: tuple[Any, ...]) -> Any:
        pipe = self._pipe or self._open()
        try:
            pipe.send((function, args))
            self._meanwhile()
            self._meanwhile = lambda: None
            if not pipe.poll(LIMIT_S):
                self.close()
                raise ColotrainError(
                    f"the model was still not built after {LIMIT_S:.0f} s",
                    "see whether it waits for something: `py-spy dump --pid` tells where",
                )
            outcome, found = pipe.recv()
        except (EOFError, OSError) as error:
            lost = self._lost()
            self.close()
            raise lost from error
        if outcome == "refused":
            raise found
        if outcome == "broken":
            raise RuntimeError(f"in the process that builds the model for the plan:\n{found}")
        return found

    def _open(self) -> Connection:
        if "forkserver" not in multiprocessing.get_all_start_methods():
            raise NotForked
        context = Context()
        self._pipe, theirs = context.Pipe()
        about = (theirs, os.getpid(), os.getcwd(), dict(os.environ))
        self._process = context.Process(target=answer, args=about, daemon=True)
        self._forking = threading.Thread(target=_fork, args=(self._process, theirs), daemon=True)
        self._forking.start()  # it waits for the server's imports
        if self.script:
            try:
                self._ask(IMPORT, (self.script,))
            except BaseException:
                self.close()
                raise
        return self._pipe

    def _lost(self) -> Exception:
        """Return the error that explains why no answer came."""
        assert self._forking is not None
        self._forking.join(1)
        if self._process.pid is None:
            return NotForked()
        self._process.join(1)
        code = self._process.exitcode
        how = f"was killed by {signal_name(-code)}" if code and code < 0 else "ended"
        return ColotrainError(
            f"the process that builds the model for the plan {how} without an answer",
            "see what it printed, and whether it needs more memory than there is",
        )

    def close(self) -> None:
        """Kill the process; it has nothing to save."""
        if self._pipe is not None:
            self._pipe.close()  # if the process is not forked yet, it will find this end closed
            self._pipe = None
        if self._process is not None and self._process.pid is not None:
            self._process.kill()
            self._process.join(1)
        self._process = None


def _fork(process: Any, theirs: Connection) -> None:
    """Fork the process; runs on a thread."""
    with suppress(Exception):  # the parent sees the closed pipe
        process.start()
    theirs.close()


def answer(pipe: Connection, launcher: int, folder: str, environment: Mapping[str, str]) -> None:
    """Body of the process: calls the requested functions until the pipe is closed.

    `launcher` is a process id; `folder` and `environment` are the launcher's.
    """
    die_with(launcher)
    belong_to_run()
    multiprocessing.current_process().daemon = False  # or the user's code could make no pools
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # sent when the launcher exits
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    with stdout_to_stderr(), suppress(EOFError, OSError):
        while True:
            function, args = pipe.recv()
            pipe.send(_outcome(function, args))
    os._exit(0)


def _outcome(function: str, args: tuple[Any, ...]) -> tuple[str, Any]:
    module, _, name = function.partition(":")
    try:
        return "found", getattr(importlib.import_module(module), name)(*args)
    except (ColotrainError, OSError) as error:  # these are shown in one line, without a traceback
        return "refused", error
    except BaseException:
        return "broken", traceback.format_exc()


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Redirect everything printed meanwhile, by any code, to stderr: stdout is for documents."""
    before = sys.stdout
    if before is None:  # stdout is closed
        yield
        return
    before.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    try:
        yield
    finally:
        sys.stdout = before
        os.dup2(kept, 1)
        os.close(kept)
