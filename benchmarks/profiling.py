"""What traces cost: `python benchmarks/profiling.py --traces 6`.

Two ranks train llm-25m. `colotrain profile` asks for traces of a few steps again and again; traced
steps are compared with those between the traces. While no trace is taken, a step costs a look for a
request and two calls: these are timed by themselves, as a share of the run's own steps.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch

from colotrain.engine.step.clock import StepClock
from colotrain.engine.step.profiling import Profiler
from colotrain.events.kinds import Step, Traced
from colotrain.events.log import EventReader
from colotrain.rundir import RunDir

TRACED = 5
"""Steps of a trace."""
LOOKS = 20_000
PAUSE_S = 8.0
"""Seconds of training between two traces."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--traces", type=int, default=6)
    parser.add_argument("--plugin", default="zero2")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="profiling-") as folder:
        steps, traced = train(Path(folder), options.plugin, options.traces)
        off_s = look_s(RunDir(Path(folder) / "runs" / "traced"))
    plain = {step: s for step, s in steps.items() if step not in traced}
    slower = [s / nearest(plain, step) for step, s in steps.items() if traced.get(step)]
    first = [s / nearest(plain, step) for step, s in steps.items() if traced.get(step) is False]
    print(f"{options.plugin}: a step takes {median(plain.values()):.3f} s")
    print(f"  traced: {median(slower):.2f} of its time, a trace's first step {median(first):.2f}")
    print(f"  not traced: {off_s * 1e6:.0f} us, {off_s / median(plain.values()):.4%} of a step")


def train(folder: Path, plugin: str, traces: int) -> tuple[dict[int, float], dict[int, bool]]:
    """Return the seconds of rank 0's steps, and of traced ones whether they are no first one."""
    run = RunDir(folder / "runs" / "traced")
    command = [sys.executable, "-m", "colotrain"]
    settings = [
        *("recipe=llm-25m", f"plugin={plugin}", "name=traced", "cluster.procs_per_node=2"),
        *("train.global_batch=8", "train.max_steps=100000", "train.eval_every=0"),
        *("checkpoint.every=0", "elastic.memory_copy=off", "train.eval_steps=0"),
    ]
    quiet: dict[str, Any] = {"cwd": folder, "stdout": subprocess.DEVNULL}
    process = subprocess.Popen([*command, "run", *settings], stderr=subprocess.DEVNULL, **quiet)
    reader, steps, traced = EventReader(run), dict[int, float](), dict[int, bool]()
    try:
        wait_for_steps(run, 5)
        for _ in range(traces):
            time.sleep(PAUSE_S)
            asked = [*command, "profile", "traced", "--steps", str(TRACED), "--ranks", "0,1"]
            subprocess.run(asked, check=True, timeout=300, **quiet)
        time.sleep(PAUSE_S)
    finally:
        process.terminate()
        process.wait(60)
    for event in reader.drain():
        if event.kind == Step.KIND and event.rank == 0:
            step = Step.of(event)
            steps[step.step] = step.step_s or 0.0
        if event.kind == Traced.KIND:
            about = Traced.of(event)
            traced |= {step: step > about.first for step in range(about.first, about.last + 1)}
    # the trace is written in the step after its last one
    written = {step + 1 for step in traced} - traced.keys()
    return {step: s for step, s in steps.items() if step > 2 and step not in written}, traced


def wait_for_steps(run: RunDir, number: int) -> None:
    reader, deadline = EventReader(run), time.monotonic() + 120
    while time.monotonic() < deadline:
        number -= sum(event.kind == Step.KIND for event in reader.drain())
        if number <= 0:
            return
        time.sleep(0.2)
    sys.exit("the run made no steps")


def nearest(plain: dict[int, float], step: int) -> float:
    """Return the median of the ten steps without a trace that are nearest."""
    return median(plain[other] for other in sorted(plain, key=lambda n: abs(n - step))[:10])


def look_s(rundir: RunDir) -> float:
    """Return the seconds that a step spends on traces while none is taken."""
    run: Any = SimpleNamespace(
        plan=SimpleNamespace(train=SimpleNamespace(profile=None)), step=0, rank=0, rundir=rundir
    )
    profiler, began = Profiler(run, StepClock(torch.device("cpu"))), time.perf_counter()
    for _ in range(LOOKS):
        profiler._begin_step()
        asked = rundir.profile_request() is not None
        profiler._end_step(asked=asked)
    return (time.perf_counter() - began) / LOOKS


if __name__ == "__main__":
    main()
