"""Seconds for which this rank has waited for other ranks.

On a GPU the host only queues collectives, so its clock shows nothing of the wait there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

_waited_s = 0.0


def waited_s() -> float:
    """Return the seconds that this process has spent in `waiting` so far."""
    return _waited_s


@contextmanager
def waiting() -> Iterator[None]:
    """Count the time within as spent waiting for other ranks. For the training thread alone."""
    global _waited_s
    began = time.perf_counter()
    try:
        yield
    finally:
        _waited_s += time.perf_counter() - began
