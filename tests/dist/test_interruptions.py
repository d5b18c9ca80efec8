"""SIGINT from the first import to the end of Python: the exit code is the command's own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.running import SMALL, Colotrain

INTERRUPT = """
import atexit, os, signal, sys

def interrupt(frame, event, argument):
    code = frame.f_code
    if not sent and event == "call" and ({when}):
        sent.append(code)
        print("sent", file=sys.stderr)
        os.kill(os.getpid(), signal.SIGINT)

def last():
    pass

sent = []
if sys.orig_argv[1:3] == ["-m", "colotrain"]:  # not in the processes that it starts
    atexit.register(last)
    sys.setprofile(interrupt)
"""
OF_A_STRING = "code.co_filename == '<string>' and code.co_name == '<module>'"
MOMENTS = {
    "the fork server's import": "code.co_filename.endswith('multiprocessing/__init__.py')",
    "the commands' import": "code.co_filename.endswith('typer/__init__.py')",
    "a dataclass of the commands": f"{OF_A_STRING} and 'typer' in sys.modules",
    "a dataclass of the run": f"{OF_A_STRING} and 'colotrain.spec.plan' in sys.modules",
}
"""Moment of a run → whether a call is it; dataclasses call `exec` with a string."""


def interrupted(colotrain: Colotrain, when: str, *arguments: str) -> int:
    """Interrupt a command from within, once `when` holds; its exit code."""
    (colotrain.cwd / "sitecustomize.py").write_text(INTERRUPT.format(when=when))
    ended = subprocess.run(
        [sys.executable, "-m", "colotrain", *arguments],
        env=os.environ | {"PYTHONPATH": str(colotrain.cwd), "PYTHONDONTWRITEBYTECODE": "1"},
        cwd=colotrain.cwd,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.stderr == "sent\n"
    return ended.returncode


@pytest.mark.parametrize("moment", MOMENTS)
def test_an_interruption_before_the_run_exits_with_its_code(
    colotrain: Colotrain, moment: str
) -> None:
    assert interrupted(colotrain, MOMENTS[moment], "run", *SMALL) == 130
    assert [file.name for file in colotrain.cwd.iterdir()] == ["sitecustomize.py"]


def test_an_interruption_of_the_end_changes_no_exit_code(colotrain: Colotrain) -> None:
    assert interrupted(colotrain, "code is last.__code__", "--version") == 0
