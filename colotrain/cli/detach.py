"""`colotrain run --detach`: the run's launcher in a session of its own, which no terminal ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

from colotrain.cli.output import print_json
from colotrain.errors import ColotrainError
from colotrain.observe import liveness
from colotrain.plan import RunPlan
from colotrain.rundir import RunDir

START_S = 60.0
POLL_S = 0.05


def detach(plan: RunPlan, rundir: RunDir, config: dict[str, Any], *, as_json: bool) -> int:
    """Write the run directory, start its launcher, and return once it can be asked to stop."""
    from colotrain.cli.run import write_down

    rundir.create()
    with liveness.claim(rundir):  # where another launches this run, it is not to be touched
        write_down(plan, rundir, config)
    process = start(rundir)
    deadline = time.monotonic() + START_S
    while not _has_claimed(rundir, process.pid):
        if process.poll() is not None or time.monotonic() > deadline:
            raise ColotrainError(_why(rundir), f"its whole output is in {rundir.launcher_log}")
        time.sleep(POLL_S)
    if as_json:
        print_json({"run_dir": str(rundir.path), "pid": process.pid})
    else:
        print(rundir.path)
    return 0


def start(rundir: RunDir) -> subprocess.Popen[bytes]:
    """The launcher, in a session of its own: it has no terminal whose end could reach it."""
    with rundir.launcher_log.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "colotrain", "resume", str(rundir.path)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )


def _has_claimed(rundir: RunDir, pid: int) -> bool:
    launcher = liveness.launcher_of(rundir)
    return launcher is not None and launcher.pid == pid


def _why(rundir: RunDir) -> str:
    """The last line that says what went wrong."""
    lines = rundir.launcher_log.read_text("utf-8", "replace").splitlines()
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error:")]
    return (errors or lines or ["its launcher did not start"])[-1]
