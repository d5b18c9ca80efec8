"""Running a command as its users do, in a folder of its own; nothing of it is left afterwards."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Self

import psutil


def carry_out(
    command: list[str], folder: Path, *, environment: Mapping[str, str], timeout_s: float
) -> None:
    """Run a command in `folder` to its end; `RuntimeError` with its last words where it fails."""
    with Running(command, folder, environment=environment) as running:
        running.wait(timeout_s)


class Running:
    """A command and its descendants, which can be halted and go on; killed on exit."""

    def __init__(self, command: list[str], folder: Path, *, environment: Mapping[str, str]) -> None:
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                env=os.environ | dict(environment),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.signal(signal.SIGKILL)
        self.process.wait()

    def family(self) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            head = psutil.Process(self.process.pid)
            return [head, *head.children(recursive=True)]
        return []

    def signal(self, number: signal.Signals) -> None:
        """To every process: a launcher's workers may be in other sessions and groups."""
        for member in self.family():
            with suppress(psutil.NoSuchProcess):
                member.send_signal(number)
        if number == signal.SIGKILL:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def halt(self) -> None:
        self.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.signal(signal.SIGCONT)

    def peak_bytes(self) -> int:
        """The most that any one of its processes had resident so far."""
        found = [0]
        for member in self.family():
            with suppress(OSError):
                status = Path(f"/proc/{member.pid}/status").read_text()
                found += [int(kib) << 10 for kib in re.findall(r"VmHWM:\s*(\d+)", status)]
        return max(found)

    def check(self) -> None:
        """Raise `RuntimeError` with its last words if it ended with an error."""
        code = self.process.poll()
        if code:
            raise RuntimeError(f"exit code {code}: {self.last_words()}")

    def wait(self, timeout_s: float) -> None:
        try:
            self.process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"no end after {timeout_s:g} s: {self.last_words()}") from None
        self.check()

    def last_words(self) -> str:
        lines = self.log.read_text("utf-8", errors="replace").strip().splitlines()
        return " | ".join(lines[-3:])[-600:]
