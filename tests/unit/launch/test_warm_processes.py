"""A command that is forked from a warm process is as it would have been as a new Python."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import Process, start

WARM = "wave"
"""A module that nobody here imports."""
TELLS = """
import json, os, sys
files = os.listdir("/proc/self/fd")
print(json.dumps([sys.argv, os.getcwd(), dict(os.environ), sys.path, __name__, len(files)]))
"""
"""A module that prints what a process knows of itself."""


@pytest.fixture(scope="module")
def address() -> str:
    return start("test", [WARM])


def run(address: str, *arguments: str, cwd: Path, **environment: str) -> Process:
    return Process(address, list(arguments), cwd=cwd, environment=os.environ | environment)


def test_a_module_finds_what_a_new_python_gives_it(address: str, tmp_path: Path) -> None:
    (tmp_path / "tells.py").write_text(TELLS)
    words, environment = ["-m", "tells", "one", "two"], {"PYTHONPATH": "/nowhere", "MINE": "1"}
    out, err = run(address, *words, cwd=tmp_path, **environment).communicate(timeout=60)
    new = subprocess.run(
        [sys.executable, *words],
        cwd=tmp_path,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (json.loads(out), err) == (json.loads(new.stdout), new.stderr)


@pytest.mark.parametrize(
    ("code", "expected", "said"),
    [
        ("pass", 0, ""),
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit('why')", 1, "why\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
        ("import atexit, sys; atexit.register(sys.stderr.write, 'bye\\n')", 0, "bye\n"),
    ],
)
def test_it_ends_as_a_new_python_does(
    address: str, tmp_path: Path, code: str, expected: int, said: str
) -> None:
    process = run(
        address, "-c", f"import sys; assert {WARM!r} in sys.modules; {code}", cwd=tmp_path
    )
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (expected, "")
    assert err.endswith(said)
    assert bool(err) == bool(said)


def test_signals_reach_it_and_waits_are_bounded(address: str, tmp_path: Path) -> None:
    process = run(
        address, "-c", "import time; print('here', flush=True); time.sleep(60)", cwd=tmp_path
    )
    assert process.stdout.readline() == "here\n"
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == process.poll() == -signal.SIGTERM
    process.kill()  # it is gone: nothing happens
