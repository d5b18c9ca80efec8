"""One SLURM at a time, whatever else runs tests: munged and ports are the machine's."""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module", autouse=True)
def one_at_a_time() -> Iterator[None]:
    with Path(tempfile.gettempdir(), "colotrain-slurm.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
