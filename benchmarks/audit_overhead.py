"""What `colotrain audit` costs per step: a model of 25 M parameters, plain and audited in turns.

`python benchmarks/audit_overhead.py [--turns 3] [--steps 40]`. Prints seconds of processor time and
of the clock per step: of steps that are only counted, of those that are looked into, and of all.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = """
import json, sys, time, torch
from torch import nn
torch.manual_seed(0)
torch.set_num_threads(1)
layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True, norm_first=True)
net = nn.Sequential(nn.TransformerEncoder(layer, 8, enable_nested_tensor=False), nn.Linear(512, 16))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
times = []
for step in range(int(sys.argv[1])):
    began = time.process_time(), time.perf_counter()
    x = torch.randn(2, 128, 512)
    net(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    times.append((time.process_time() - began[0], time.perf_counter() - began[1]))
print(json.dumps({"parameters": sum(p.numel() for p in net.parameters()), "times": times}))
"""


def run(command: list[str], folder: str) -> dict:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        command, cwd=folder, env=environment, check=True, capture_output=True, text=True
    )
    return json.loads(found.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    given = parser.parse_args()
    plain, audited, looked = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(SCRIPT)
        script = [sys.executable, "train.py", str(given.steps)]
        audit = [sys.executable, "-m", "colotrain", "audit", "--", *script]
        for turn in range(given.turns):
            order = [(plain, script), (audited, audit)]
            for times, command in order if turn % 2 == 0 else reversed(order):
                found = run(command, folder)
                steps = list(enumerate(found["times"], start=1))[3:]  # the first ones warm up
                times += [t for step, t in steps if times is plain or step % 20]
                looked += [t for step, t in steps if times is audited and step % 20 == 0]
    print(
        f"{found['parameters'] / 1e6:.1f} M parameters, {given.turns} turns of {given.steps} steps"
    )
    for index, name in enumerate(("processor", "clock")):
        base, counted, full = (
            statistics.median(t[index] for t in times) for times in (plain, audited, looked)
        )
        all_steps = (19 * counted + full) / 20
        print(
            f"{name}: plain {base:.3f} s; counted {counted / base - 1:+.1%}; "
            f"looked into {full / base - 1:+.1%}; one in twenty {all_steps / base - 1:+.1%}"
        )


if __name__ == "__main__":
    main()
