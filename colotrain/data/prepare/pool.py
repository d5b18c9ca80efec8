"""A pool of processes that maps a function over a stream, in bounded memory. No torch here."""

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
from colotrain.parent_process import die_with

MOST_WORKERS = 16
AHEAD = 2
"""Pieces of work per process that are in progress at once, which bounds memory."""

_MAIN_NAMES = ("__spec__", "__file__")
"""Attributes with which multiprocessing finds the main module."""

Work = TypeVar("Work")
Result = TypeVar("Result")


def default_workers() -> int:
    """Number of processes: one per core that this process may use, at most `MOST_WORKERS`."""
    return max(1, min(MOST_WORKERS, len(os.sched_getaffinity(0))))


def in_order(
    function: Callable[[Work], Result],
    stream: Iterable[Work],
    *,
    workers: int,
    begin: Callable[..., None],
    args: tuple[Any, ...],
) -> Iterator[Result]:
    """Results of `function` for each piece of `stream`, in order, from `workers` processes.

    `begin(*args)` is called first in each process. With one worker, or for a stream of one or two
    pieces, everything runs in this process. The processes end with this one, however it ends.
    """
    stream = iter(stream)
    first = list(islice(stream, 3))
    if workers <= 1 or len(first) < 3:
        begin(*args)
        yield from map(function, chain(first, stream))  # lazily
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
    """Keep processes that are started inside from loading this one's main module.

    They need nothing of it, and it may be a script without a guard, a notebook or stdin.
    """
    main = sys.modules["__main__"]
    hidden = {name: main.__dict__.pop(name) for name in _MAIN_NAMES if name in main.__dict__}
    main.__spec__ = None
    try:
        yield
    finally:
        main.__dict__.update(hidden)


def _begin(parent: int, begin: Callable[..., None], args: tuple[Any, ...]) -> None:
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process per core is enough
    begin(*args)
