"""How long pipeline stages wait where each rank has a device of its own.

    python benchmarks/bubble.py

On a machine with few cores ranks slow one another down, and a stage that waits makes others faster.
Here blocks sleep instead of computing, as a host does that waits for its GPU: forward for a time,
backward for twice as long. Printed is the share of a step for which each stage waits, measured
(median over steps and ranks) and as the plan plays the schedule with these times.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median

from colotrain.events.kinds import Step
from colotrain.events.log import EventReader
from colotrain.rundir import RunDir
from colotrain.spec.pipeline_schedule import pipeline_time

FORWARD_S, STEPS = 0.02, 12
MODEL = """
import time
import torch
from torch import nn

class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        if not x.is_meta: time.sleep(seconds)
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        time.sleep(2 * ctx.seconds)
        return gradient, None

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
    def forward(self, x):
        return Sleep.apply(self.linear(x), SECONDS)

class Net(nn.Module):
    def __init__(self, blocks):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
    def forward(self, x, y):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return nn.functional.mse_loss(self.last(x), y)

class Numbers(torch.utils.data.Dataset):
    def __init__(self, split): pass
    def __len__(self): return 4096
    def __getitem__(self, index):
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return {"x": x, "y": x.sum(0, keepdim=True)}
"""
CASES = [
    # ranks, blocks of each chunk, chunks, micro-batches
    (2, (2, 2), 1, 4),
    (4, (2, 2), 1, 4),
    (4, (3, 1), 1, 8),
    (4, (1, 1, 1, 1), 1, 8),
    (4, (1, 1, 1, 1), 2, 4),
    (4, (1, 2, 2, 1), 2, 8),
]


def main() -> None:
    argparse.ArgumentParser(description=__doc__.split("\n")[0]).parse_args()
    for ranks, split, chunks, micro_batches in CASES:
        stages = len(split) // chunks
        measured = run(ranks, split, chunks, micro_batches)
        own = [[3 * FORWARD_S * n for n in split[stage::stages]] for stage in range(stages)]
        step_s = pipeline_time(own, micro_batches)
        planned = [1 - micro_batches * sum(costs) / step_s for costs in own]
        print(
            f"mesh.pp={stages} x dp{ranks // stages}, blocks {split}, {micro_batches} micro-batches"
        )
        for stage, (wait, plan) in enumerate(zip(measured, planned, strict=True)):
            off = f"{plan / wait - 1:+.0%}" if wait else "-"
            print(
                f"  stage {stage} waits {wait:.1%} of a step, planned {plan:.1%} ({off})",
                flush=True,
            )


def run(ranks: int, split: tuple[int, ...], chunks: int, micro_batches: int) -> list[float]:
    """Return the median share of a step for which each stage waits."""
    stages = len(split) // chunks
    with tempfile.TemporaryDirectory(prefix="bubble-") as name:
        folder = Path(name)
        (folder / "mine.py").write_text(MODEL.replace("SECONDS", str(FORWARD_S)), "utf-8")
        schedule = (
            ["mesh.pp_schedule=interleaved", f"mesh.pp_chunks={chunks}"] if chunks > 1 else []
        )
        settings = [
            *("model.target=mine:Net", f"model.args={{blocks: {sum(split)}}}", "plugin=zero1"),
            *("data.target=mine:Numbers", "name=run", f"cluster.procs_per_node={ranks}"),
            *("train.micro_batch=1", f"accumulate.steps={micro_batches}", "train.eval_every=0"),
            *(f"train.max_steps={STEPS}", "train.eval_steps=0", "checkpoint.every=0"),
            *(
                f"mesh.pp={stages}",
                f"mesh.pp_split={json.dumps(split)}".replace(" ", ""),
                *schedule,
            ),
        ]
        command = [sys.executable, "-m", "colotrain", "run", *settings, "elastic.memory_copy=off"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
        if done.returncode:
            sys.exit(done.stderr)
        shares = defaultdict[int, list[float]](list)
        for event in EventReader(RunDir(folder / "runs" / "run")).drain():
            if event.kind == Step.KIND and event.rank is not None:
                step = Step.of(event)
                if step.step > 3 and step.step_s and step.wait_s is not None:
                    shares[event.rank // (ranks // stages)].append(step.wait_s / step.step_s)
    return [median(shares[stage]) for stage in range(stages)]


if __name__ == "__main__":
    main()
