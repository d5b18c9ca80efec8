"""Fixtures of the tests that run the command line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
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
    *("tests/simulated/", "tests/dist/"),
)
"""Tests that begin first, so that none of them is left at the end while other processes wait."""
DOCS = "tests/dist/test_docs.py::"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the tests by `LONGEST`; SLURM's jobs take ten minutes, most of them waiting."""
    items.sort(key=lambda item: [not item.nodeid.startswith(prefix) for prefix in LONGEST])


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
