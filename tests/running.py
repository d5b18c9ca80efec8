"""Running colotrain as a user does: the command, in a folder of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colotrain.events.event import Event
from colotrain.events.log import EventReader
from colotrain.rundir import RunDir
from tests.processes import Process, launchers

COMMAND_TIMEOUT_S = 800  # of a busy machine
SMALL = (
    "recipe=llm-tiny",
    "model.args.d_model=32",
    "model.args.num_layers=3",
    "model.args.num_heads=2",
    "model.args.d_hidden=64",
    "data.seq_len=32",
    "train.global_batch=8",
    "train.micro_batch=2",
    "train.eval_steps=1",
    "cluster.procs_per_node=2",
)
"""A plan that trains in a second or two."""


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@dataclass(frozen=True)
class Colotrain:
    """The command line, in `cwd`."""

    cwd: Path
    cold: bool = False
    """Each a new Python, as a user's; else forks of a warm one, which have imported everything."""

    def __call__(self, *arguments: str, env: dict[str, str] | None = None) -> Result:
        process = self.start(*arguments, env=env)
        out, err = process.communicate(timeout=COMMAND_TIMEOUT_S)
        return Result(process.returncode, out, err)

    def start(
        self, *arguments: str, env: dict[str, str] | None = None, new_session: bool = False
    ) -> Process | subprocess.Popen[str]:
        words, environment = ["-m", "colotrain", *arguments], os.environ | {"CI": "1"} | (env or {})
        if not self.cold and not new_session:  # whose group has all its processes
            return Process(launchers(), words, cwd=self.cwd, environment=environment)
        return subprocess.Popen(
            [sys.executable, *words],
            cwd=self.cwd,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=new_session,
        )

    def run(self, *overrides: str) -> dict[str, Any]:
        """Train to the end; the summary."""
        result = self("run", *overrides, "--json")
        assert result.code == 0, result.err
        return result.json  # type: ignore[no-any-return]

    def resume(self, name: str, *overrides: str) -> dict[str, Any]:
        """Go on to the end, with changes; the summary."""
        result = self("resume", name, *overrides, "--json")
        assert result.code == 0, result.err
        return result.json  # type: ignore[no-any-return]

    def rundir(self, name: str) -> RunDir:
        return RunDir(self.cwd / "runs" / name)

    def events(self, name: str) -> list[Event]:
        return EventReader(self.rundir(name)).drain()


def losses(summary: dict) -> list[float]:
    return [loss for _, loss in summary["loss"]["history"]]


def wait_for_step(
    colotrain: Colotrain, name: str, step: int, timeout_s: float = COMMAND_TIMEOUT_S
) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        events = colotrain.events(name) if colotrain.rundir(name).events.is_dir() else []
        if any(e.kind == "step" and e.fields["step"] >= step for e in events):
            return
        time.sleep(0.02)
    raise TimeoutError(f"{name} did not reach step {step}")


def pid_of(colotrain: Colotrain, name: str, rank: int) -> int:
    started = [e for e in colotrain.events(name) if e.kind == "started" and e.rank == rank]
    return int(started[-1].fields["pid"])
