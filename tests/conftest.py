"""Fixtures of the tests that run the command line."""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

from tests.running import Colotrain

# There are more test processes than cores: the threads of one would only wait for those of others.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# What is drawn anew each day is the same in all test processes, also at midnight.
os.environ.setdefault("TESTS_DAY", date.today().isoformat())
# Shells let what they start behind `&` ignore Ctrl-C, which tests send to processes of theirs.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


LONGEST = (
    *("tests/slurm/", "tests/faults/test_hosts.py", "tests/dist/test_docs.py"),
    *("tests/simulated/", "tests/dist/test_difficult_models.py", "tests/dist/"),
)
"""Tests that begin first, so that none of them is left at the end while other processes wait."""
DOCS = "tests/dist/test_docs.py::"
END = float(os.environ.get("SLOW_TESTS_END", "inf"))
"""Seconds since 1970, after which no slow test begins: those left are skipped, and say so."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the tests by `LONGEST`; SLURM's jobs take ten minutes, most of them waiting.

    Where slow tests must end in time, each day has other modules at the end.
    """

    def order(item: pytest.Item) -> tuple[list[bool], float]:
        longest = [not item.nodeid.startswith(prefix) for prefix in LONGEST]
        module = item.nodeid.partition("::")[0]
        draw = random.Random(f"{os.environ['TESTS_DAY']} {module}").random()
        return longest, draw if math.isfinite(END) else 0.0

    items.sort(key=order)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if time.time() > END and item.get_closest_marker("slow") is not None:
        pytest.skip(f"no time is left for slow tests of {item.nodeid.partition('::')[0]}")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadScopeScheduling:
    return ByModule(config, log)


class ByModule(LoadScopeScheduling):  # type: ignore[misc]
    """Give a process all tests of a module or of SLURM, or one page of the documentation."""

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(DOCS):
            return nodeid
        return "slurm" if nodeid.startswith("tests/slurm/") else str(super()._split_scope(nodeid))


@pytest.fixture(autouse=True)
def users_modules_end_with_their_test(tmp_path: Path) -> Iterator[None]:
    """Two tests of one process may each write a `mine.py`: the second must not get the first's."""
    paths, finders = sys.path[:], sys.meta_path[:]
    yield
    sys.path[:], sys.meta_path[:] = paths, finders
    for name, module in list(sys.modules.items()):
        source = getattr(module, "__file__", None)
        if isinstance(source, str) and Path(source).is_relative_to(tmp_path):
            del sys.modules[name]


@pytest.fixture
def colotrain(tmp_path: Path) -> Colotrain:
    return Colotrain(tmp_path)


@pytest.fixture
def started() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start processes that are ended with the test, whatever happens."""
    processes: list[subprocess.Popen[str]] = []

    def start(process: subprocess.Popen[str]) -> subprocess.Popen[str]:
        processes.append(process)
        return process

    yield start
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.communicate()
