"""Peak activations and time of ranks that divide samples or matrices among themselves, on CPU.

`python benchmarks/activations.py [AXES…]`, such as `cp=2` or `tp=2,sequence_parallel=true`; by
default cp 1, 2 and 4. A small llm trains on samples of 4,096 tokens, one at a time, with as many
ranks as the axes ask for. The first number is what a rank's resident memory holds at its peak
beside parameters, gradients, optimizer state and the process itself, of the rank that has the most;
windows of shared memory, 4 MiB for each rank, are in it. The second is the plan's: live tensors, as
traced. Each is followed by its ratio to that of the first axes. Whole runs take turns: of the
rounds, the smallest peak and the median of the runs' quickest steps are printed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from math import prod
from pathlib import Path
from statistics import median

from colotrain.events.fold import follow
from colotrain.rundir import RunDir

MIB = 1 << 20
CONTEXT = ("cp=1", "cp=2", "cp=4")
MODEL = ("vocab_size=256", "d_model=512", "num_layers=8", "num_heads=8", "num_kv_heads=4")


def main() -> None:
    args = parse()
    found: dict[str, list[Run]] = defaultdict(list)
    for turn in range(args.rounds):
        for axes in args.axes if turn % 2 == 0 else reversed(args.axes):
            found[axes].append(run(axes, args))
    peaks = {axes: min(one.peak for one in runs) for axes, runs in found.items()}
    planned = {axes: runs[0].planned for axes, runs in found.items()}
    first = args.axes[0]
    for axes, runs in found.items():
        row = f"{axes:<28}"
        for of in (peaks, planned):
            row += f" {of[axes] / MIB:>6.0f} MiB {of[axes] / of[first]:.3f}"
        seconds = median(one.step_s for one in runs)
        print(f"{row} {seconds:>7.2f} s a step  loss {runs[0].loss:.7f}", flush=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Bytes of activations at the peak, as measured and planned, and a run's quickest step."""

    peak: int
    planned: int
    step_s: float
    loss: float


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("axes", nargs="*", default=CONTEXT)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--plugin", default="zero3")
    parser.add_argument("--set", nargs="+", default=[], help="further settings, as KEY=VALUE")
    return parser.parse_args()


def run(axes: str, args: argparse.Namespace) -> Run:
    sizes = dict(word.split("=") for word in axes.split(","))
    ranks = prod(int(size) for size in sizes.values() if size.isdigit())
    words = [
        *("run", "model.target=colotrain.models.llm:LLM", f"plugin={args.plugin}", "name=bench"),
        *(f"model.args.{word}" for word in MODEL),
        *("data.corpus=stdlib", "data.tokenizer=bytes", f"data.seq_len={args.sequence}"),
        *("train.global_batch=1", "train.micro_batch=1", f"train.max_steps={args.steps}"),
        *("train.eval_steps=0", "checkpoint.every=0", "observe.grads_every=1", "--force"),
        *(f"cluster.procs_per_node={ranks}", *(f"mesh.{word}" for word in axes.split(","))),
        *args.set,
    ]
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", "colotrain", *words]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CI": "1"}
        done = subprocess.run(command, cwd=name, capture_output=True, text=True, env=environment)
        if done.returncode:
            sys.exit(done.stderr)
        rundir = RunDir(Path(name, "runs", "bench"))
        view, planned = follow(rundir), rundir.plan().memory.activations
    return Run(
        peak=max(memory.activations for memory in view.memory_by_rank.values()),
        planned=planned,
        step_s=min(seconds for _, seconds in view.step_times),
        loss=view.loss[-1][1],
    )


if __name__ == "__main__":
    main()
