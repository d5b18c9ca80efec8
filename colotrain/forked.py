"""Runs a function in a fork of this process, in which everything that it changes ends.

A model that runs without values leaves such tensors wherever the user's code keeps what it makes:
in a function's cache, in a table of a module, in a module that it imports first. The next forward,
which has values, would take them for its own. No torch here.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any, NoReturn, TypeVar

import psutil

from colotrain.errors import ColotrainError
from colotrain.parent_process import die_with, has_ended, send

LIMIT_S = 600.0
"""Maximum seconds in a fork: as long as a rank may be silent until its first step."""
IDLE_S = 8.0
"""Seconds without computing after which a fork waits in vain: it lacks the process's threads."""
FLUSH_S = 5.0
"""Maximum seconds after its answer in which a fork writes what the user's code has printed."""

T = TypeVar("T")


def in_fork(function: Callable[[], T]) -> T:
    """Return what `function` returns in a fork of this process, or raise its `ColotrainError`.

    Where the fork does not answer (it was killed, it needs a GPU or a thread that it lacks, its
    result cannot be pickled), `function` is called here.
    """
    ours, theirs = Pipe(duplex=False)
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # closed, or of the user's own making
            stream.flush()
    parent = os.getpid()
    try:
        with warnings.catch_warnings(action="ignore"):  # Python warns of threads
            child = os.fork()
    except OSError:
        ours.close()
        theirs.close()
        return function()
    if not child:
        _answer(function, theirs, parent)
    theirs.close()
    outcome, found = _received(ours, child)
    if outcome == "refused":
        raise found
    return found if outcome == "found" else function()


def _answer(function: Callable[[], Any], pipe: Connection, parent: int) -> NoReturn:
    """Body of the fork."""
    try:
        die_with(parent)
        gc.freeze()  # a process group that awaits its collection has threads that are not here
        if (internals := sys.modules.get("colotrain.torch_internals")) is not None:
            internals.keep_from_threads_and_cuda()
        try:
            outcome = ("found", function())
        except ColotrainError as error:
            outcome = ("refused", error)
        pipe.send(outcome)
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # the parent calls the function itself
        os._exit(1)
    os._exit(0)


def _answers(pipe: Connection, child: int) -> bool:
    """Wait for an answer; False where process `child` takes too long, or computes no more."""
    fork, used = psutil.Process(child), 0.0
    end = time.monotonic() + LIMIT_S
    idle_since = time.monotonic()
    while not pipe.poll(1.0):
        now, before = time.monotonic(), used
        times = [one.cpu_times() for one in (fork, *fork.children(recursive=True))]
        used = sum(one.user + one.system for one in times)
        if used > before:
            idle_since = now
        if now > end or now > idle_since + IDLE_S:
            return False
    return True


def _received(pipe: Connection, child: int) -> tuple[str, Any]:
    """What process `child` sends; `("", None)` where it does not. It has ended afterwards."""
    try:
        if _answers(pipe, child):
            found: tuple[str, Any] = pipe.recv()
            has_ended(child, within_s=FLUSH_S)
            return found
    except Exception:  # also what cannot be made again of what was sent
        pass
    finally:
        pipe.close()
        send(signal.SIGKILL, child)
        with suppress(ChildProcessError):
            os.waitpid(child, 0)
    return "", None
