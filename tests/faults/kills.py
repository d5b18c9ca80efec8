"""Kills at random moments, and what must be true after each: the same losses, nothing left.

`python tests/faults/kills.py --count 50 --seed 0` kills a worker or the launcher, at a random time
or before a random file operation of a save, of a run that saves every second step; then it resumes
what does not recover by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from colotrain.engine.manifest import damage  # noqa: E402
from tests.running import SMALL, Colotrain, losses  # noqa: E402

STEPS = 12
PLAN = (
    *SMALL,
    f"train.max_steps={STEPS}",
    "checkpoint.every=2",
    "observe.grads_every=0",
    "elastic.check_every=3",
    "train.on_gradients=tests.faults.plant:nothing",
)
OPERATIONS = {0: 60, 1: 24}
"""About as many changes of the checkpoints' folder as a rank makes in such a run."""
TIMEOUT_S = 300


@dataclass(frozen=True)
class Kill:
    """One fault: whom, and when."""

    whom: str
    """rank 0, rank 1 or launcher."""
    after_s: float | None = None
    """Since the first step; or before a file operation of a rank:"""
    rank: int = 0
    operation: int = 0

    def __str__(self) -> str:
        if self.after_s is not None:
            return f"{self.whom}, {self.after_s:.2f} s after the first step"
        return f"{self.whom}, before change {self.operation} of the checkpoints by rank {self.rank}"


def draw(chance: random.Random, seconds: float) -> Kill:
    """Half of the kills come at any time, half within saves."""
    whom = chance.choice(("rank 0", "rank 1", "launcher"))
    if chance.random() < 0.5:
        return Kill(whom=whom, after_s=chance.uniform(0, seconds))
    rank = int(whom[-1]) if whom != "launcher" else chance.choice((0, 1))
    return Kill(whom=whom, rank=rank, operation=chance.randint(1, OPERATIONS[rank]))


def environment(mark: str, kill: Kill | None = None) -> dict[str, str]:
    order = {}
    if kill is not None and kill.after_s is None:
        whom = "launcher" if kill.whom == "launcher" else "self"
        order = {"what": "at", "whom": whom, "rank": kill.rank, "operation": kill.operation}
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return {"PYTHONPATH": path, "PLANT": json.dumps(order), "KILLS_MARK": mark}


def inflict(colotrain: Colotrain, name: str, plugin: str, kill: Kill) -> str:
    """Run, kill, and resume where needed; returns what happened. Raises AssertionError."""
    mark = f"{os.getpid()}-{name}"
    (colotrain.cwd / "planted").unlink(missing_ok=True)
    command = ("run", *PLAN, f"plugin={plugin}", f"name={name}", "--json")
    process = colotrain.start(*command, env=environment(mark, kill))
    (colotrain.cwd / "launcher.pid").write_text(str(process.pid))
    try:
        if kill.after_s is not None:
            kill_later(colotrain, name, process.pid, kill)
        out, err = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
    happened = "recovered"
    if process.returncode == 0 and json.loads(out)["restarts"] == 0:
        happened = "was over before"
    elif process.returncode == -signal.SIGKILL or kill_was_early(colotrain, name):
        happened = "resumed"
        wait_until_gone(mark)
        result = colotrain("resume", name, "--json", env=environment(mark))
        assert result.code == 0, result.err
    else:
        assert process.returncode == 0, err
    wait_until_gone(mark)
    check_leftovers(colotrain, name)
    return happened


def kill_later(colotrain: Colotrain, name: str, launcher: int, kill: Kill) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not (started := [e for e in events(colotrain, name) if e.kind == "step"]):
        assert time.monotonic() < deadline, "no step was made"
        time.sleep(0.01)
    time.sleep(kill.after_s or 0.0)
    pid = launcher
    if kill.whom != "launcher":
        rank = int(kill.whom[-1])
        started = [e for e in events(colotrain, name) if e.kind == "started" and e.rank == rank]
        pid = started[-1].fields["pid"]
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def kill_was_early(colotrain: Colotrain, name: str) -> bool:
    """Killed before its first step, a run is not restarted: it would fail again."""
    return not any(e.kind == "restart" for e in events(colotrain, name)) and any(
        e.kind == "done" and e.fields["status"] == "failed" for e in events(colotrain, name)
    )


def events(colotrain: Colotrain, name: str) -> list:
    return colotrain.events(name) if colotrain.rundir(name).events.is_dir() else []


def wait_until_gone(mark: str, timeout_s: float = 20) -> None:
    """No process that the run started is left."""
    deadline = time.monotonic() + timeout_s
    while left := processes(mark):
        assert time.monotonic() < deadline, f"processes are left: {left}"
        time.sleep(0.05)


def processes(mark: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"KILLS_MARK={mark}\0".encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def check_leftovers(colotrain: Colotrain, name: str) -> None:
    """Only whole checkpoints, no temporary file, no request, no sign of life is left."""
    rundir = colotrain.rundir(name)
    for path in rundir.checkpoints.iterdir():
        assert path.name.startswith("step-"), f"{path} is left"
        assert damage(path) is None
    assert (rundir.checkpoints / f"step-{STEPS:08d}").is_dir()
    left = [p for p in rundir.path.rglob(".*") if p.name != "."]
    left += [p for p in rundir.stop_file.parent.rglob("*") if p.is_file()]
    assert not left, f"left: {left}"


def history(colotrain: Colotrain, name: str) -> list[float]:
    return losses(json.loads(colotrain.rundir(name).summary_file.read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plugin", default="zero2")
    options = parser.parse_args()
    chance, outcomes = random.Random(options.seed), Counter()
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        colotrain = Colotrain(Path(folder))
        seconds, expected = straight(colotrain, options.plugin)
        for number in range(options.count):
            kill, name = draw(chance, seconds), f"kill-{number}"
            began = time.monotonic()
            happened = inflict(colotrain, name, options.plugin, kill)
            same = history(colotrain, name) == expected
            outcomes[happened] += 1
            took = time.monotonic() - began
            print(f"{number:>3} {kill}: {happened} in {took:.1f} s", flush=True)
            assert same, f"losses differ: {history(colotrain, name)} instead of {expected}"
    told = ", ".join(f"{n} {what}" for what, n in outcomes.items())
    print(f"{options.count} kills, losses bit-equal, nothing left: {told}")


def straight(colotrain: Colotrain, plugin: str) -> tuple[float, list[float]]:
    """The run that nothing happens to: seconds from its first step to its last, and its losses."""
    command = ("run", *PLAN, f"plugin={plugin}", "name=straight", "--json")
    result = colotrain(*command, env=environment("straight"))
    assert result.code == 0, result.err
    at = [e.t for e in events(colotrain, "straight") if e.kind == "step"]
    return max(at) - min(at), losses(result.json)


if __name__ == "__main__":
    main()
