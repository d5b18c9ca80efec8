"""Kills of workers at random: steps lost, and seconds to the next finished step.

    python benchmarks/kills.py --kills 200

llm-tiny on 2 and on 4 ranks, in turns: every plugin with its state copied in memory after each step
and with a checkpoint after each step instead, and plain torch under torchrun, which writes a
checkpoint after each step. A random worker is killed at a random time, several times in each run.
Losses must be those of the same run without kills, and nothing may be left behind.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from colotrain.events.log import EventReader  # noqa: E402
from colotrain.rundir import RunDir  # noqa: E402
from tests.faults.kills import is_gone, processes  # noqa: E402

STEPS, LATEST, KILLS_PER_RUN, GLOBAL_BATCH = 60, 40, 4, 8
RUN_S = 900.0
GONE_S = 20.0
"""Seconds in which all processes of a run must end after its command."""
PLUGINS = ("zero1", "zero2", "zero3", "fsdp-hybrid", "gemini")
SYSTEMS = MEMORY, CHECKPOINTS, TORCHRUN = "copies in memory", "checkpoints", "torchrun"
SETTINGS = {
    MEMORY: ("elastic.memory_copy=1GiB", "checkpoint.every=0"),
    CHECKPOINTS: ("elastic.memory_copy=off", "checkpoint.every=1"),
}


ENVIRONMENT = {
    "CI": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # without it about half of torchrun's restarts hang
}


@dataclass(frozen=True)
class Case:
    system: str
    plugin: str
    ranks: int

    def __str__(self) -> str:
        return f"{self.system}, {self.plugin} on {self.ranks}"

    @property
    def command(self) -> list[str]:
        python, ranks = Path(sys.executable), str(self.ranks)
        if self.system == TORCHRUN:
            script = ROOT / "benchmarks" / "peers" / "with_restarts.py"
            sizes = ["--steps", str(STEPS), "--global-batch", str(GLOBAL_BATCH)]
            launch = [f"{python.parent}/torchrun", "--nproc-per-node", ranks, "--standalone"]
            return [*launch, "--max-restarts", "99", str(script), *sizes]
        hybrid = ["plugin.shard_size=1"] if self.plugin == "fsdp-hybrid" else []
        return [
            *(str(python), "-m", "colotrain", "run", "recipe=llm-tiny", "name=run"),
            *(f"plugin={self.plugin}", *hybrid, f"cluster.procs_per_node={ranks}"),
            *(f"train.max_steps={STEPS}", f"train.global_batch={GLOBAL_BATCH}"),
            *("train.micro_batch=2", "train.eval_every=0", "train.eval_steps=0"),
            *("elastic.max_restarts=99", *SETTINGS[self.system]),
        ]


@dataclass
class Running:
    """A run in `folder`, and what its ranks have written about themselves."""

    case: Case
    folder: Path
    known: list[dict[str, Any]] = field(default_factory=list)
    """Of each rank's start and step: kind, attempt, rank, step, t, pid or loss."""

    def __post_init__(self) -> None:
        self.rundir = RunDir(self.folder / "runs" / "run")
        self.reader = EventReader(self.rundir)

    def look(self) -> list[dict[str, Any]]:
        if self.case.system == TORCHRUN:
            lines = [x for f in self.folder.glob("rank-*.jsonl") for x in f.read_text().split("\n")]
            self.known = [json.loads(line) for line in lines if line.endswith("}")]
        elif self.rundir.events.is_dir():
            self.known += [
                {"kind": e.kind, "attempt": e.attempt, "rank": e.rank, "t": e.t, **e.fields}
                for e in self.reader.drain()
                if e.kind in ("started", "step")
            ]
        return self.known

    def of(self, kind: str, attempt: int) -> list[dict[str, Any]]:
        return [x for x in self.known if x["kind"] == kind and x["attempt"] == attempt]

    def losses(self) -> set[tuple[int, float]]:
        """Every loss of every attempt, those of repeated steps included."""
        steps = [x for x in self.known if x["kind"] == "step" and x["rank"] == 0]
        return {(x["step"], x["loss"]) for x in steps}


@dataclass(frozen=True)
class Kill:
    lost: int
    """Steps that all ranks had finished and that were made again."""
    next_s: float
    """Seconds to the next finished step."""
    new_s: float
    """Seconds to the next step that had not been finished before."""


def carry_out(case: Case, folder: Path, kills: int, chance: random.Random) -> tuple[Running, list]:
    """Run to the end with so many kills; returns what each cost. AssertionError if it fails."""
    running, times = Running(case, folder), list[float]()
    environment = os.environ | ENVIRONMENT
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            case.command, cwd=folder, env=environment, stdout=log, stderr=log
        )
    deadline = time.monotonic() + RUN_S
    try:
        while process.poll() is None:
            assert time.monotonic() < deadline, f"{case}: not done after {RUN_S:g} s"
            time.sleep(0.02)
            running.look()
            done = [x["step"] for x in running.of("step", len(times))]
            if len(times) == kills or not done or max(done) > LATEST:
                continue
            time.sleep(chance.uniform(0, 0.5))
            pid = chance.choice([x["pid"] for x in running.of("started", len(times))])
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                times.append(time.time())
    finally:  # where this fails, torchrun ends its workers if it is asked to
        process.terminate()
    assert process.wait() == 0, f"{case}: {(folder / 'log').read_text()[-2000:]}"
    running.look()
    return running, [cost(running, number, at) for number, at in enumerate(times)]


def cost(running: Running, attempt: int, killed_at: float) -> Kill:
    finished = max(
        (
            min(x["step"] for x in newest.values())
            for newest in [{x["rank"]: x for x in running.of("step", attempt)}]
            if len(newest) == running.case.ranks
        ),
        default=0,
    )
    base = min(x["step"] for x in running.of("started", attempt + 1))
    after = [x for x in running.known if x["kind"] == "step" and x["rank"] == 0]
    after = [x for x in after if x["attempt"] > attempt]
    fresh = [x["t"] for x in after if x["step"] > finished]
    return Kill(
        lost=max(0, finished - base),
        next_s=min(x["t"] for x in after) - killed_at,
        new_s=min(fresh) - killed_at,
    )


def leftovers(running: Running, shared: set[str]) -> list[str]:
    """Processes, shared memory and control files that are left after a run."""
    deadline = time.monotonic() + GONE_S
    while (left := processes(running.folder)) and time.monotonic() < deadline:
        time.sleep(0.05)
    found = [f"process {pid}" for pid in left if not is_gone(pid)]
    found += [f"/dev/shm/{name}" for name in set(os.listdir("/dev/shm")) - shared]
    control = running.rundir.stop_file.parent
    return found + [str(path) for path in control.rglob("*") if path.is_file()]


def cases() -> Iterator[Case]:
    """Without end: each plugin and number of ranks, all systems in turn."""
    for ranks, plugin in itertools.cycle([(r, p) for p in PLUGINS for r in (2, 4)]):
        for system in SYSTEMS:
            yield Case(system, "ddp" if system == TORCHRUN else plugin, ranks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200, help="of each system")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    options = parser.parse_args()
    chance, expected = random.Random(options.seed), dict[tuple[str, int], set]()
    found: dict[str, list[Kill]] = {system: [] for system in options.systems}
    for case in (case for case in cases() if case.system in found):
        if all(len(kills) >= options.kills for kills in found.values()):
            break
        shared = set(os.listdir("/dev/shm"))
        key = case.plugin, case.ranks
        with tempfile.TemporaryDirectory(prefix="kills-") as name:
            if key not in expected:
                (straight := Path(name) / "straight").mkdir()
                expected[key] = carry_out(case, straight, 0, chance)[0].losses()
            (folder := Path(name) / "hurt").mkdir()
            running, kills = carry_out(case, folder, KILLS_PER_RUN, chance)
            same = running.losses() == expected[key]
            assert same or case.system == TORCHRUN, f"{case}: losses differ"
            left = leftovers(running, shared)
            assert not left or case.system == TORCHRUN, f"{case}: left behind: {left}"
        found[case.system] += kills
        each = ", ".join(f"{kill.lost} lost {kill.next_s:.2f} s" for kill in kills)
        print(f"{case}: {each}{'' if same else '; losses differ'}", flush=True)
    print("\n| system | kills | steps lost | median s to the next step | to the next new step |")
    print("| --- | --- | --- | --- | --- |")
    for system, kills in found.items():
        lost, next_s = sum(k.lost for k in kills), median(k.next_s for k in kills)
        new_s = median(k.new_s for k in kills)
        print(f"| {system} | {len(kills)} | {lost} | {next_s:.2f} | {new_s:.2f} |")


if __name__ == "__main__":
    main()
