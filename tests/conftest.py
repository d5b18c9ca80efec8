"""Fixtures of the tests that run the command line."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.running import Colotrain


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
