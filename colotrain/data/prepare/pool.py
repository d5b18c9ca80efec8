"""A few processes that work through a stream in order, in bounded memory. No torch here."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any, TypeVar

from colotrain.errors import ColotrainError
from colotrain.parent_process import end_with

MOST_WORKERS = 16
AHEAD = 2
"""Pieces of work per process that are under way at once: memory is bounded by their number."""

_MAIN_NAMES = ("__spec__", "__file__")
"""By which multiprocessing finds the main module."""

Work = TypeVar("Work")
Result = TypeVar("Result")


def default_workers() -> int:
    """One per core that this process may use."""
    return max(1, min(MOST_WORKERS, len(os.sched_getaffinity(0))))


def in_order(
    function: Callable[[Work], Result],
    stream: Iterable[Work],
    *,
    workers: int,
    begin: Callable[..., None],
    args: tuple[Any, ...],
) -> Iterator[Result]:
    """`function` of each piece of `stream`, in its order, computed by `workers` processes.

    `begin(*args)` is called first in each of them; with one worker, here. A stream of a piece or
    two is not worth processes of its own. They end with this process, however it ends.
    """
    stream = iter(stream)
    first = list(islice(stream, 3))
    if workers <= 1 or len(first) < 3:
        begin(*args)
        yield from map(function, chain(first, stream))  # never the whole stream at once
        return
    context = multiprocessing.get_context("forkserver")
    pool = ProcessPoolExecutor(
        workers, mp_context=context, initializer=_begin, initargs=(os.getpid(), begin, args)
    )
    waiting: deque[Future[Result]] = deque()
    try:
        for piece in chain(first, stream):
            if len(waiting) >= AHEAD * workers:
                yield waiting.popleft().result()
            with _main_hidden():  # processes are started when there is work for them
                waiting.append(pool.submit(function, piece))
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        problem = "a process that tokenizes was killed, or could not start"
        raise ColotrainError(problem, "is memory short? try data.workers=1") from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _main_hidden() -> Iterator[None]:
    """Processes started meanwhile do not load this one's main module, which may be a script
    without a guard, a notebook or stdin: they need nothing of it.
    """
    main = sys.modules["__main__"]
    hidden = {name: main.__dict__.pop(name) for name in _MAIN_NAMES if name in main.__dict__}
    main.__spec__ = None
    try:
        yield
    finally:
        main.__dict__.update(hidden)


def _begin(parent: int, begin: Callable[..., None], args: tuple[Any, ...]) -> None:
    end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to handle
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process per core is enough
    begin(*args)
