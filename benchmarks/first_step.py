"""From the command to the end of the first step, for a model of the user's own.

    python benchmarks/first_step.py --turns 7 --micro-batch 4

In turns: torchrun with a plain DistributedDataParallel script, `colotrain run` of the same model
that it has never seen, and once more when it knows it; then `colotrain plan` of the model, unknown
and known, beside a Python that imports torch. Prints medians, and ratios of medians.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

MODEL = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width=256, depth=4, tokens=1024):
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, tokens)

    def forward(self, input_ids, labels):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def samples():
    generator = torch.Generator().manual_seed(0)
    draw = lambda: torch.randint(1024, (128,), generator=generator)
    return [{"input_ids": draw(), "labels": draw()} for _ in range(64)]
"""
PEER = """
import sys, time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
import mine

torch.manual_seed(0)
dist.init_process_group("gloo")
torch.set_num_threads(1)
model = DistributedDataParallel(mine.Model())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = mine.samples()
for batch in DataLoader(data, batch_size=int(sys.argv[1]), sampler=DistributedSampler(data)):
    model(**batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    break
if dist.get_rank() == 0:
    open("first", "w").write(str(time.time()))
dist.destroy_process_group()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--micro-batch", type=int, default=4)
    given = parser.parse_args()
    times: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("mine.py").write_text(MODEL)
        Path("peer.py").write_text(PEER)
        for turn in range(given.turns + 1):
            for name, seconds in one_turn(given.micro_batch, turn).items():
                if turn:  # the first one warms the disk's cache
                    times[name].append(seconds)
            print(turn, {name: round(seconds[-1], 2) for name, seconds in times.items()})
    median = {name: statistics.median(seconds) for name, seconds in times.items()}
    for name, beside in (
        ("first run", "DDP"),
        ("second run", "DDP"),
        ("plan", "import torch"),
        ("known plan", "import torch"),
    ):
        ratio = median[name] / median[beside]
        print(f"{name:<10} {median[name]:5.2f} s, {ratio:.2f} of {beside}'s {median[beside]:.2f} s")


def one_turn(micro_batch: int, turn: int) -> dict[str, float]:
    shutil.rmtree("cache", ignore_errors=True)
    colotrain = [sys.executable, "-m", "colotrain"]
    settings = ["model.target=mine:Model", "data.target=mine:samples", "train.max_steps=1"]
    settings += [f"train.micro_batch={micro_batch}", f"train.global_batch={2 * micro_batch}"]
    settings += ["train.eval_steps=0", "checkpoint.every=0", "cluster.procs_per_node=2"]
    peer = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    began = time.time()
    run([*peer, "peer.py", str(micro_batch)])
    found = {"DDP": float(Path("first").read_text()) - began}
    for name in ("first run", "second run"):
        output = run([*colotrain, "run", *settings, f"name={name[0]}{turn}", "--json"])
        found[name] = json.loads(output)["time_to_first_step_s"]
    shutil.rmtree("cache")
    for name, command in (
        ("plan", [*colotrain, "plan", *settings]),
        ("known plan", [*colotrain, "plan", *settings]),
        ("import torch", [sys.executable, "-c", "import torch"]),
    ):
        began = time.time()
        run(command)
        found[name] = time.time() - began
    return found


def run(command: list[str]) -> str:
    environment = os.environ | {"XDG_CACHE_HOME": str(Path("cache").absolute()), "PYTHONPATH": PATH}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: exit {done.returncode}\n{done.stderr}")
    return done.stdout


PATH = os.pathsep.join([str(Path(__file__).parents[1]), "."])

if __name__ == "__main__":
    main()
