"""Running a command as its users do, in a folder of its own; nothing of it is left afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil


def carry_out(
    command: list[str], folder: Path, *, environment: Mapping[str, str], timeout_s: float
) -> None:
    """Run a command in `folder` to its end; `RuntimeError` with its last words where it fails."""
    with (folder / "log").open("w+") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | dict(environment),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            code, why = process.wait(timeout=timeout_s), ""
        except subprocess.TimeoutExpired:
            code, why = -1, f"no end after {timeout_s:g} s: "
        finally:
            end(process)
        if code != 0:
            log.seek(0)
            words = " | ".join(log.read().strip().splitlines()[-3:])
            raise RuntimeError(f"{why}exit code {code}: {words[-600:]}")


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and its descendants: a launcher's workers may be in other sessions."""
    family: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        family = psutil.Process(process.pid).children(recursive=True)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()
