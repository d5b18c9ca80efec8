"""How often a slow rank is named, with its cause: `python benchmarks/slow_ranks.py --runs 20`.

Two ranks on two cores, each bound to one. In each run rank 1 is slowed in one way, or in none: a
neighbour that computes on its core, the same with rank 1 at nice 10, or data that takes longer.
A run that is not slowed must name nobody.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from colotrain.events.event import Event
from colotrain.events.kinds import Note, WorkerStarted
from colotrain.events.log import EventReader
from colotrain.rundir import RunDir

LONGEST_S = 90.0
QUIET_S = 30.0
"""Seconds in which an undisturbed run must name nobody."""
CAUSES = {
    "neighbour": "other processes have its cores",
    "nice": "other processes have its cores (it has nice 10)",
    "data": "its data comes late",
    "quiet": "",
}
DATASET = """
import os, time, torch
from torch import nn

class Numbers(torch.utils.data.Dataset):
    def __init__(self, split): pass
    def __len__(self): return 1 << 20
    def __getitem__(self, index):
        if os.environ.get("SLOW") == "1" and os.environ.get("RANK") == "1": time.sleep(0.003)
        x = torch.randn(1024, generator=torch.Generator().manual_seed(index))
        return {"x": x, "y": x.sum(0, keepdim=True)}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
        self.head = nn.Linear(1024, 1)
    def forward(self, x, y):
        return nn.functional.mse_loss(self.head(self.blocks(x)), y)
"""
SETTINGS = (
    "model.target=mine:Net",
    "data.target=mine:Numbers",
    "train.global_batch=128",
    "train.micro_batch=32",
    "train.max_steps=100000",
    "optim.lr=1e-9",
    "cluster.procs_per_node=2",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="of each way (default: 5)")
    parser.add_argument("--plugin", default="zero2")
    parser.add_argument("ways", nargs="*", default=list(CAUSES), help=", ".join(CAUSES))
    options = parser.parse_args()
    for way in options.ways:
        said = [run(way, options.plugin) for _ in range(options.runs)]
        right = sum(is_right(way, texts) for texts in said)
        print(json.dumps({"way": way, "right": right, "runs": len(said)}), flush=True)
        for texts in said:
            if not is_right(way, texts):
                print("   ", texts or "nobody was named", flush=True)


def is_right(way: str, texts: list[str]) -> bool:
    if way == "quiet":
        return not texts
    return bool(texts) and "rank 1 holds" in texts[0] and texts[0].endswith(CAUSES[way])


def run(way: str, plugin: str) -> list[str]:
    """Train until a rank is named, or for a while; return what was said of slow ranks."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as after:
        (Path(folder) / "mine.py").write_text(DATASET, "utf-8")
        process = subprocess.Popen(
            ["colotrain", "run", *SETTINGS, f"plugin={plugin}", "name=slow"],
            cwd=folder,
            env=os.environ | {"SLOW": str(int(way == "data"))},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        after.callback(process.wait, 60)
        after.callback(process.terminate)
        said: list[str] = []
        deadline = time.monotonic() + (QUIET_S if way == "quiet" else LONGEST_S)
        for event in follow(process, RunDir(Path(folder) / "runs" / "slow"), deadline):
            if event.kind == WorkerStarted.KIND:
                started = WorkerStarted.of(event)
                os.sched_setaffinity(started.pid, {started.rank})
                if started.rank == 1:
                    slow_down(way, started.pid, after)
            if event.kind == Note.KIND and "holds the others up" in Note.of(event).text:
                said.append(Note.of(event).text)
                if way != "quiet":
                    break
        return said


def follow(process: subprocess.Popen[bytes], rundir: RunDir, deadline: float) -> Iterator[Event]:
    reader = EventReader(rundir)
    while time.monotonic() < deadline:
        if process.poll() is not None:
            sys.exit(f"the run ended by itself with exit code {process.returncode}")
        yield from reader.drain()
        time.sleep(0.1)


def slow_down(way: str, pid: int, after: contextlib.ExitStack) -> None:
    if way not in ("neighbour", "nice"):
        return
    if way == "nice":
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(ProcessLookupError):
                os.setpriority(os.PRIO_PROCESS, int(thread), 10)
    neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    os.sched_setaffinity(neighbour.pid, {1})
    after.callback(neighbour.wait)
    after.callback(neighbour.kill)


if __name__ == "__main__":
    main()
