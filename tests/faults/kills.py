"""Kills at random moments, and what must be true after each: the same losses, nothing left.

`python tests/faults/kills.py --count 50 --seed 0` kills a worker or the launcher, several times in
each run, at random times or before random file operations, of runs that save every second step;
it resumes what does not recover by itself. With `--every` instead, each rank is killed before each
of the file operations of a save, in turn, and so is the launcher.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from colotrain.engine.state.manifest import damage  # noqa: E402
from tests.running import SMALL, Colotrain, losses  # noqa: E402

STEPS = 12
OPERATIONS = {0: 30, 1: 12}
"""About as many changes of the checkpoints' folder as a rank makes in three saves."""
TIMEOUT_S = 1200


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


def plan(steps: int) -> tuple[str, ...]:
    """A run that saves every second step."""
    return (
        *SMALL,
        f"train.max_steps={steps}",
        "checkpoint.every=2",
        "elastic.max_restarts=100",
        "elastic.check_every=3",
        "optim.schedule.name=constant",
        "train.on_gradients=tests.faults.plant:nothing",
    )


def draw(chance: random.Random, *, timed: bool) -> Kill:
    """At any time, or within a save."""
    whom = chance.choice(("rank 0", "rank 1", "launcher"))
    if timed:
        return Kill(whom=whom, after_s=chance.uniform(0, 1))
    rank = int(whom[-1]) if whom != "launcher" else chance.choice((0, 1))
    return Kill(whom=whom, rank=rank, operation=chance.randint(1, OPERATIONS[rank]))


def every_operation() -> list[Kill]:
    """Before each change of the checkpoints' folder: by itself, or with the launcher."""
    return [
        Kill(whom=whom, rank=rank, operation=operation)
        for rank, count in OPERATIONS.items()
        for operation in range(1, count + 1)
        for whom in (f"rank {rank}", "launcher")
    ]


def environment(kills: Sequence[Kill] = ()) -> dict[str, str]:
    orders = [
        {
            "whom": "launcher" if kill.whom == "launcher" else "self",
            "rank": kill.rank,
            "operation": kill.operation,
        }
        for kill in kills
        if kill.after_s is None
    ]
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return {"PYTHONPATH": path, "PLANT": json.dumps({"kills": orders})}


def inflict(
    colotrain: Colotrain,
    name: str,
    plugin: str,
    kills: Sequence[Kill],
    steps: int = STEPS,
    options: Sequence[str] = (),
) -> int:
    """Run, kill again and again, resume where needed; returns how many kills happened.

    All kills are of one kind: at a time, or before a file operation. AssertionError where the run
    does not end as it should.
    """
    timed = [kill for kill in kills if kill.after_s is not None]
    command: tuple[str, ...] = ("run", *plan(steps), f"plugin={plugin}", f"name={name}", *options)
    happened = 0
    for _ in range(len(kills) + 1):
        process = colotrain.start(*command, env=environment(kills))
        (colotrain.cwd / "launcher.pid").write_text(str(process.pid))
        try:
            happened += kill_one_by_one(colotrain, name, process, timed)
            _, err = process.communicate(timeout=TIMEOUT_S)
        finally:
            process.kill()
        wait_until_gone(colotrain.cwd)
        if process.returncode == 0:
            break
        # killed, or a rank was before the first step: it would fail again, and is not restarted
        assert process.returncode in (-signal.SIGKILL, 1), err
        command = ("resume", name)
    assert process.returncode == 0, err
    check_leftovers(colotrain, name, steps)
    planted = sum((colotrain.cwd / f"planted-{n}").exists() for n in range(len(kills)))
    for marker in colotrain.cwd.glob("planted-*"):
        marker.unlink()
    return happened + planted


def kill_one_by_one(
    colotrain: Colotrain, name: str, process: subprocess.Popen[str], kills: list[Kill]
) -> int:
    """Inflict the timed kills, each in an attempt that has made a step, while the run lives."""
    happened, begun = 0, time.time()
    while kills:
        steps = []
        while not steps:
            if process.poll() is not None:
                return happened
            steps = [e for e in events(colotrain, name) if e.kind == "step" and e.t > begun]
            time.sleep(0.02)
        time.sleep(kills[0].after_s or 0.0)
        started = [e for e in events(colotrain, name) if e.kind == "started"]
        pids = {f"rank {event.rank}": int(event.fields["pid"]) for event in started}
        begun = time.time()
        if process.poll() is not None:
            return happened
        whom = kills.pop(0).whom
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids.get(whom, process.pid), signal.SIGKILL)
            happened += 1
        if whom == "launcher":
            return happened
        while process.poll() is None and not is_gone(pids[whom]):
            time.sleep(0.01)
    return happened


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def events(colotrain: Colotrain, name: str) -> list:
    return colotrain.events(name) if colotrain.rundir(name).events.is_dir() else []


def wait_until_gone(folder: Path, timeout_s: float = 20) -> None:
    """No process that the run started is left."""
    deadline = time.monotonic() + timeout_s
    while left := processes(folder):
        assert time.monotonic() < deadline, f"processes are left: {left}"
        time.sleep(0.05)


def processes(folder: Path) -> list[int]:
    """Those that work in this folder, as all do that a run has started there."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cwd"):
        try:
            if path.readlink() == folder.resolve():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def check_leftovers(colotrain: Colotrain, name: str, steps: int) -> None:
    """Only whole checkpoints, no temporary file, no request, no sign of life is left."""
    rundir = colotrain.rundir(name)
    for path in rundir.checkpoints.iterdir():
        assert path.name.startswith("step-"), f"{path} is left"
        assert damage(path) is None
    assert (rundir.checkpoints / f"step-{steps:08d}").is_dir()
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
    parser.add_argument("--per-run", type=int, default=5)
    parser.add_argument("--every", action="store_true", help="each file operation, in turn")
    options = parser.parse_args()
    chance, steps = random.Random(options.seed), 6 * options.per_run
    in_turn = every_operation() if options.every else []
    count = len(in_turn) or options.count
    done, number = 0, 0
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        colotrain = Colotrain(Path(folder))
        expected = straight(colotrain, options.plugin, steps)
        while done < count and (in_turn or not options.every):
            kills = [in_turn.pop(0) for _ in range(min(options.per_run, len(in_turn)))]
            timed = number % 2 == 0
            kills = kills or [draw(chance, timed=timed) for _ in range(options.per_run)]
            name, began = f"kills-{number}", time.monotonic()
            happened = inflict(colotrain, name, options.plugin, kills, steps)
            took = time.monotonic() - began
            what = "; ".join(map(str, kills))
            print(f"{happened} of {len(kills)} kills in {took:.0f} s: {what}", flush=True)
            found = history(colotrain, name)
            assert found == expected, f"losses differ: {found} instead of {expected}"
            done, number = done + happened, number + 1
            print(f"{done} kills so far, losses bit-equal, nothing left", flush=True)


def straight(
    colotrain: Colotrain, plugin: str, steps: int = STEPS, options: Sequence[str] = ()
) -> list[float]:
    """The losses of the run that nothing happens to."""
    command = ("run", *plan(steps), f"plugin={plugin}", "name=straight", *options, "--json")
    result = colotrain(*command, env=environment())
    assert result.code == 0, result.err
    return losses(result.json)


if __name__ == "__main__":
    main()
