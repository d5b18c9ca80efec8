"""What is timed, one process after the other with nothing beside it, and what is read from it."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
TIMED = slice(3, 9)
"""Steps between whose ends time is taken: after compiling, the first allocations and gemini's
settling; before the record of gradients at step 10, and a trace."""
PEAK_FLOPS = 989e12
"""Of an H100 SXM in bf16, which MFU is a share of."""
LAPS = ("data_s", "compute_s", "reduce_s", "optimizer_s")

TOKENS = (
    *("data.corpus=null", "data.tokenizer=auto", "data.target=quick:Tokens"),
    *("data.args.vocab_size=${model.args.vocab_size}", "data.args.seq_len=${data.seq_len}"),
)
SHORT = (
    *("train.eval_every=0", "train.eval_steps=0", "checkpoint.every=0", "train.precision=bf16"),
    *("optim.schedule.name=constant", "optim.schedule.warmup_steps=0"),
    *("cluster.procs_per_node=1", "elastic.max_restarts=0", "elastic.memory_copy=false"),
)
QUICK = ("model.target=quick:QuickLLM", "model.deferred_init=true")
ONE_B = (
    *("recipe=llm-1b", *TOKENS, *SHORT, "train.micro_batch=4", "train.global_batch=4"),
    *("train.max_steps=14", "train.activation_checkpointing=none"),
)
EIGHT_B = (
    *("recipe=llm-1b", *TOKENS, *SHORT, *QUICK, "model.args.vocab_size=128256"),
    *("model.args.d_model=4096", "model.args.num_layers=32", "model.args.num_heads=32"),
    *("model.args.num_kv_heads=8", "model.args.d_hidden=14336", "model.args.tie_embeddings=false"),
    *("adapter.name=lora", "adapter.rank=16", "adapter.targets=[blocks.*]", "train.micro_batch=2"),
    *("train.global_batch=2", "train.max_steps=9", "train.activation_checkpointing=full"),
)
SEVEN_B = (
    *("recipe=llm-7b", *TOKENS, *SHORT, *QUICK, "train.micro_batch=1", "train.global_batch=4"),
    *("train.max_steps=6", "plugin=gemini"),
)
TINY_SIZES = (
    *("model.args.vocab_size=256", "model.args.d_model=64", "model.args.num_layers=2"),
    *("model.args.num_heads=4", "model.args.num_kv_heads=2", "model.args.d_hidden=128"),
    "data.seq_len=16",
)
"""Instead of a billion parameters, to try the script on a CPU."""


@dataclass(frozen=True)
class Timed:
    """One process. `limit_s` ends it; it begins only where `expected_s` are left."""

    name: str
    command: tuple[str, ...]
    expected_s: float
    limit_s: float


def run(name: str, *words: str) -> tuple[str, ...]:
    python = (sys.executable, "-m", "colotrain", "run")
    return (*python, *words, f"name={name.replace(' ', '-')}", "--force", "--json")


def timed_steps(device: str) -> list[Timed]:
    """By value: where the time ends, the last are left out."""
    on_gpu = device == "cuda"
    less = () if on_gpu else TINY_SIZES
    loop = (sys.executable, str(HERE / "plain.py"))
    on = ("--device", device, *(() if on_gpu else ("--layers", "2", "--seq", "16")))
    steps: list[Timed] = []

    def add(name: str, *command: str, expected_s: float) -> None:
        steps.append(Timed(name, command, expected_s, 2.5 * expected_s + 20))

    def train(name: str, *words: str, expected_s: float) -> None:
        add(name, *run(name, *words, *less, f"cluster.device={device}"), expected_s=expected_s)

    def plain(name: str, *more: str, expected_s: float) -> None:
        add(name, *loop, f"{name}.json", *on, *more, expected_s=expected_s)

    full = "train.activation_checkpointing=full"
    plain("plain", expected_s=14)
    train("1b", *ONE_B, "plugin=zero1", "train.profile.steps=[13,14]", expected_s=26)
    plain("plain compiled", "--compile", expected_s=45)
    train("1b compiled", *ONE_B, "plugin=zero1", "train.compile=true", expected_s=45)
    words = ("plugin=gemini", "train.max_steps=8")
    budget = ("plugin.budget.device=14GiB",) if on_gpu else ()
    train("1b gemini", *ONE_B, *words, *budget, expected_s=32)
    words = (*ONE_B, "plugin=zero1", "train.max_steps=12", *less, f"cluster.device={device}")
    add("kill", sys.executable, str(HERE / "timed.py"), "kill", *words, expected_s=50)
    train("1b full", *ONE_B, "plugin=zero1", full, expected_s=24)
    train("8b lora", *EIGHT_B, "plugin=zero1", expected_s=50)
    words = ("train.global_batch=16", "train.max_steps=9")
    train("1b zero3 accumulation 4", *ONE_B, "plugin=zero3", *words, expected_s=26)
    train("1b save", *ONE_B, "plugin=zero1", "checkpoint.every=5", expected_s=32)
    selective = "train.activation_checkpointing=selective"
    train("1b selective", *ONE_B, "plugin=zero1", selective, expected_s=24)
    train("1b auto", *ONE_B, "plugin=zero1", "train.micro_batch=null", expected_s=30)
    train("7b below", *SEVEN_B, expected_s=110)
    best = ("--compile", "--loss", "compiled", "--micro", "8", "--accumulate", "2")
    plain("plain best", *best, expected_s=50)
    return steps


def read_timed(name: str, folder: Path) -> dict[str, Any]:
    """tokens/s and laps of the median step, MFU, memory beside the plan."""
    loop = folder / f"{name}.json"
    if loop.exists():
        found: dict[str, Any] = json.loads(loop.read_text())
        return found
    printed = (folder / f"{name}.out").read_text().strip()
    summary: dict[str, Any] = json.loads(printed) if printed.startswith("{") else {}
    if "memory" not in summary:
        return summary
    from colotrain.events.log import EventReader
    from colotrain.rundir import RunDir

    path = folder / "runs" / name.replace(" ", "-")
    seen = EventReader(RunDir(path)).drain()
    steps = [e for e in seen if e.kind == "step" and e.rank == 0]
    timed = steps[TIMED]
    gap = median(b.t - a.t for a, b in pairwise(timed)) if len(timed) > 1 else float("nan")
    tokens = timed[-1].fields["tokens"] if timed else 0
    plan = json.loads((path / "plan.json").read_text())
    memory = summary["memory"]
    row = {
        "step_s": gap,
        "tokens_per_s": tokens / gap,
        "mfu": plan["flops_per_token"] * tokens / gap / PEAK_FLOPS,
        "peak_MiB": memory["measured_peak"] >> 20,
        "planned_MiB": memory["predicted_peak"] >> 20,
        "planned_step_s": summary["time"]["predicted_step_s"],
        "first_step_after_s": summary["time_to_first_step_s"],
    }
    for lap in LAPS:
        laps = [event.fields[lap] for event in timed if event.fields.get(lap) is not None]
        if laps:
            row[lap] = median(laps)
    row["losses"] = [event.fields["loss"] for event in steps if "loss" in event.fields]
    row["kernels"] = [line for trace in path.glob("traces/*.gz") for line in busiest(trace)]
    return row


def busiest(trace: Path, most: int = 14) -> list[str]:
    """The kernels of a trace: share of its time, count, name; first, how long none ran."""
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    kernels = [event for event in events if event.get("cat") in kinds]
    if not kernels:
        return []
    spans = sorted((event["ts"], event["ts"] + event["dur"]) for event in kernels)
    begin, end = spans[0][0], max(last for _, last in spans)
    busy, reached = 0.0, begin
    for first, last in spans:
        busy += max(0.0, last - max(first, reached))
        reached = max(reached, last)
    time_of, count = Counter[str](), Counter[str]()
    for event in kernels:
        time_of[event["name"]] += event["dur"]
        count[event["name"]] += 1
    whole = end - begin
    lines = [f"{1 - busy / whole:.1%} of {whole / 1e3:.1f} ms idle, {len(kernels)} launches"]
    for name, spent in time_of.most_common(most):
        lines.append(f"{spent / whole:.1%} {count[name]} × {name[:90]}")
    return lines


def kill(words: list[str]) -> int:
    """Kill the worker after its sixth step; seconds to the next step that was not made before."""
    from colotrain.events.log import EventReader
    from colotrain.rundir import RunDir

    words = [word for word in words if not word.startswith("elastic.")]
    command = run("kill", *words, "elastic.max_restarts=2", "elastic.memory_copy=40GiB")
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    rundir, reader, worker = RunDir(Path("runs/kill")), None, 0
    killed_at, step, again = 0.0, 0, False
    found: dict[str, float] = {}
    while process.poll() is None:
        time.sleep(0.02)
        if reader is None:
            if not Path("runs/kill/events").is_dir():
                continue
            reader = EventReader(rundir)
        for event in reader.drain():
            if event.kind == "started" and event.rank == 0:
                worker, before = event.fields["pid"], worker
                again = again or bool(killed_at and before)
            if event.kind != "step" or event.rank != 0:
                continue
            if not killed_at and event.fields["step"] >= 6:
                os.kill(worker, signal.SIGKILL)  # the worker of the run started above
                killed_at = time.time()
            if not again:  # made before the kill, some of it written after it was asked for
                step = event.fields["step"]
                continue
            if "first_step" not in found:
                found = {"first_step_after_s": event.t - killed_at}
                found |= {"killed_after_step": step, "first_step": event.fields["step"]}
            if event.fields["step"] > step and "next_step_after_s" not in found:
                found["next_step_after_s"] = event.t - killed_at
    Path("kill.json").write_text(json.dumps({**found, "exit": process.returncode}))
    return 0 if "next_step_after_s" in found and process.returncode == 0 else 1


if __name__ == "__main__":
    sys.exit(kill(sys.argv[2:]))
