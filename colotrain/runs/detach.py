"""`colotrain run --detach`: the run's launcher in a session of its own, without a terminal."""

from __future__ import annotations

import math
import os
import subprocess
import time
from pathlib import Path
from typing import Any

from colotrain.dotted import new_python
from colotrain.errors import ColotrainError
from colotrain.events import liveness
from colotrain.rundir import RunDir
from colotrain.runs import trust
from colotrain.show.console import print_json
from colotrain.spec.plan import RunPlan

START_S = 60.0
EARLY_ERROR_S = 5.0
"""Seconds to watch a launcher that has claimed the run for an early error."""
POLL_S = 0.05


def detach(plan: RunPlan, rundir: RunDir, config: dict[str, Any], *, as_json: bool) -> int:
    """Write the run directory, start its launcher, and return once `colotrain stop` can stop it."""
    rundir.create()
    with liveness.claim(rundir):  # no files are changed if another launcher has the run
        trust.write_signed(plan, rundir, config)
    told = _size(rundir.launcher_events)
    process = start(plan, rundir)
    deadline, claimed_at = time.monotonic() + START_S, math.inf
    while not _has_launched(rundir, told):
        now = time.monotonic()
        if process.poll() or (now > deadline and claimed_at == math.inf):
            raise ColotrainError(_why(rundir), f"its whole output is in {rundir.launcher_log}")
        if _has_claimed(rundir, process.pid):
            claimed_at = min(claimed_at, now)
        if process.poll() == 0 or now > claimed_at + EARLY_ERROR_S:  # preparing data may take long
            break
        time.sleep(POLL_S)
    if as_json:
        print_json({"run_dir": str(rundir.path), "pid": process.pid})
    else:
        print(rundir.path)
    return 0


def start(plan: RunPlan, rundir: RunDir) -> subprocess.Popen[bytes]:
    """Start the plan's launcher in a session of its own, which the terminal's end does not signal.

    It uses this very plan or none: another one in the run directory is not trusted.
    """
    words = ["resume", str(rundir.path), "--trust-plan", plan.digest]
    with rundir.append(rundir.launcher_log) as log:
        return subprocess.Popen(
            [*new_python(), "-m", "colotrain", *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )


def _has_claimed(rundir: RunDir, pid: int) -> bool:
    launcher = liveness.launcher_of(rundir)
    return launcher is not None and launcher.pid == pid


def _has_launched(rundir: RunDir, told: int) -> bool:
    """Whether the launcher's events after their first `told` bytes contain its launch."""
    if _size(rundir.launcher_events) == told:
        return False
    with rundir.launcher_events.open("rb") as events:
        events.seek(told)
        return b'"kind":"launch"' in events.read()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _why(rundir: RunDir) -> str:
    """Return the last error line of the launcher's log."""
    lines = rundir.launcher_log.read_text("utf-8", "replace").splitlines()
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error:")]
    return (errors or lines or ["its launcher did not start"])[-1]
