"""How near the planner comes: a grid of real runs on CPU, each predicted before it is made.

`python benchmarks/planner.py [--runs 60] [--seed 1000] [--out planner.json]`; runs that are in the
file already are not made again, so that it can be interrupted. Configurations are drawn from seeds
that were not used for calibration. The machine is measured first and again after every 20 runs
(`colotrain plan --measure`, for each number of ranks), for a shared machine is not equally fast all
the time. Times are judged by the typical step of the quietest quarter of a run: other work of the
machine only adds to it; memory is not touched by load.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from colotrain.rundir import write_atomically
from colotrain.runs.resolving import resolve_config
from colotrain.spec.plugins import ROWS

MIN_STEPS, MAX_STEPS, TRAINING_S = 12, 80, 5.0
"""So many steps as are predicted to take `TRAINING_S`; the first quarter is left out of account."""
REMEASURE_EVERY = 20
RANKS = (1, 2, 4)
TIMEOUT_S = 600
GOOD = 1.05
"""`auto`'s choice counts as good where no plugin was faster than by this factor."""


def draw(seed: int) -> list[str]:
    """Overrides of a small run, without its plugin."""
    dice = random.Random(seed)
    width = dice.choice([128, 192, 256, 384])
    samples, seq_len = dice.choice([(1, 64), (1, 256), (2, 128), (4, 64), (8, 64)])
    words = [
        "recipe=llm-tiny",
        f"model.args.vocab_size={dice.choice([256, 1024, 4096])}",
        f"model.args.d_model={width}",
        f"model.args.num_layers={dice.choice([2, 3, 4, 6])}",
        f"model.args.num_heads={width // 64}",
        f"model.args.d_hidden={64 * round(width * 8 / 3 / 64)}",
        f"data.seq_len={seq_len}",
        f"train.micro_batch={samples}",
        f"accumulate.steps={dice.choice([1, 1, 2])}",
        "train.global_batch=null",
        f"cluster.procs_per_node={dice.choice([1, 2, 2, 4])}",
        "train.eval_steps=1",
        "train.eval_every=0",
        "checkpoint.every=0",
        f"train.seed={seed}",
    ]
    if dice.random() < 0.3:
        words.append("freeze.patterns=[embed*,blocks.0.*]")
    if dice.random() < 0.3:
        words.append("train.activation_checkpointing=full")
    if dice.random() < 0.3:
        words.append("observe.grads_every=3")
    return words


def measure(words: list[str], folder: Path) -> dict[str, Any]:
    """One run: predicted and measured peak, and seconds of a step."""
    plan = resolve_config(words).plan
    num_steps = min(MAX_STEPS, max(MIN_STEPS, round(TRAINING_S / plan.time.step_s)))
    steps = f"train.max_steps={num_steps}"
    command = [sys.executable, "-m", "colotrain", "run", *words, steps, "--json"]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=True
    )
    summary = json.loads(done.stdout)
    return {
        "plugin": plan.plugin.name,
        "world_size": plan.world_size,
        "predicted_peak": plan.memory.total,
        "range": [plan.peak.low, plan.peak.high],
        "least": plan.peak.exact,
        "measured_peak": max(summary["memory"]["peak_by_rank"]),
        "predicted_step_s": plan.time.step_s,
        "measured_step_s": typical_step_s(Path(summary["run_dir"])),
        "median_step_s": summary["time"]["step_s"],
        "load": os.getloadavg()[0],
        "words": words,
    }


def typical_step_s(run_dir: Path) -> float:
    """The median of the quietest quarter's steps, of the slowest rank; not of the first quarter."""
    slowest = 0.0
    for file in (run_dir / "events").glob("rank*.jsonl"):
        events = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
        times = [e["step_s"] for e in events if e["kind"] == "step"]
        size = len(times) // 4
        quarters = [times[index * size : (index + 1) * size] for index in (1, 2, 3)]
        slowest = max([slowest, min(median(quarter) for quarter in quarters)])
    return slowest


def measure_machine() -> None:
    for ranks in RANKS:
        words = ["recipe=llm-tiny", f"cluster.procs_per_node={ranks}", "--measure", "--json"]
        command = [sys.executable, "-m", "colotrain", "plan", *words]
        subprocess.run(command, capture_output=True, timeout=TIMEOUT_S, check=True)


def main(num_runs: int, seed: int, out: Path) -> None:
    """Five runs for each draw: one under every plugin."""
    known: dict[str, Any] = json.loads(out.read_text("utf-8")) if out.is_file() else {}
    made = 0
    for index in range(num_runs):
        number, plugin = seed + index // len(ROWS), list(ROWS)[index % len(ROWS)]
        key = f"{number} {plugin}"
        if key in known:
            continue
        if made % REMEASURE_EVERY == 0:
            measure_machine()
        made += 1
        with tempfile.TemporaryDirectory(prefix="colotrain-planner-") as folder:
            known[key] = measure([*draw(number), f"plugin={plugin}", "name=run"], Path(folder))
        write_atomically(out, json.dumps(known, indent=1))
        row = known[key]
        errors = [f"{name} {row_error(row, name):+.1%}" for name in ("peak", "step_s")]
        print(f"{key}: {', '.join(errors)}", flush=True)
    report(known)


def row_error(row: dict[str, Any], name: str) -> float:
    return float(row[f"predicted_{name}"] / row[f"measured_{name}"] - 1)


def report(known: dict[str, Any]) -> None:
    for name, what in (("peak", "peak memory"), ("step_s", "step time")):
        errors = sorted(abs(row_error(row, name)) for row in known.values())
        high = errors[min(len(errors) - 1, int(0.95 * len(errors)))]
        numbers = f"median {median(errors):.1%}, 95th percentile {high:.1%}, worst {errors[-1]:.1%}"
        print(f"{what}: {numbers} ({len(errors)} runs)")
    inside = [r["range"][0] <= r["measured_peak"] <= r["range"][1] for r in known.values()]
    refused = [r for r in known.values() if r["measured_peak"] < r["least"]]
    most = max(row["measured_peak"] / row["predicted_peak"] - 1 for row in known.values())
    print(f"most that was needed beyond the prediction: {max(0.0, most):.1%}")
    print(f"peaks inside their range: {sum(inside)} of {len(inside)}")
    print(f"runs that needed less than what was held for certain: {len(refused)}")
    loads = sorted(row["load"] for row in known.values())
    print(f"load of the machine: {loads[0]:.1f} to {loads[-1]:.1f}, median {median(loads):.1f}")
    good = total = 0
    for number in {key.split()[0] for key in known}:
        rows = [row for key, row in known.items() if key.split()[0] == number]
        if len(rows) == len(ROWS):
            chosen = min(rows, key=lambda row: row["predicted_step_s"])
            best = min(row["measured_step_s"] for row in rows)
            good, total = good + (chosen["measured_step_s"] <= GOOD * best), total + 1
    print(f"the plugin predicted fastest was within {GOOD - 1:.0%} of the best: {good} of {total}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=Path("planner.json"))
    asked = parser.parse_args()
    main(asked.runs, asked.seed, asked.out)
