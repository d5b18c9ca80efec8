"""The first twenty minutes on a machine with a GPU: what is right, then what is fast.

    python benchmarks/first_gpu.py right|fast [--out FOLDER] [--device cpu]

Both blocks end within ten minutes; steps that no longer fit are listed as left out. The most
telling steps come first. Each is a process with a bound on its time, and a failure does not stop
the others. `right` compares the losses of plugins, precisions, recomputation, compiling, gemini's
budgets and a resume with those of the CPU, runs torch's sanitizer of streams and tests/gpu. `fast`
trains llm-1b under the plugins, beside a plain loop (benchmarks/gpu.py), under budgets, and with
saves. On the CPU steps with device budgets are left out.

Nothing is fetched. Where hydra-core, omegaconf or pytest is missing they are installed from
build/gpu-wheels, which `make gpu-wheels` fills. Results are lines of JSON in FOLDER/results.jsonl.
Ends with 1 where a step failed, with 2 without a GPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WHEELS, SITE = ROOT / "build" / "gpu-wheels", ROOT / "build" / "gpu-site"
NEEDED = ("hydra", "omegaconf", "pytest")
BLOCK_S = 570.0
CLOSE = {"fp32": 1e-4, "bf16": 3e-2, "fp16": 1e-2}
"""Largest difference of a loss from the CPU's in fp32: kernels add in other orders."""
SMALL = (
    *("recipe=llm-tiny", "model.args.d_model=256", "model.args.d_hidden=768", "data.seq_len=128"),
    *("train.global_batch=8", "train.micro_batch=2", "train.eval_steps=0", "checkpoint.every=0"),
    *("optim.schedule.name=constant", "optim.schedule.warmup_steps=0", "train.max_steps=6"),
    "cluster.procs_per_node=1",
)
BIG = (
    *("recipe=llm-1b", "train.precision=bf16", "train.global_batch=4", "train.micro_batch=4"),
    *("data.corpus=stdlib", "data.tokenizer=bytes", "data.seq_len=2048", "train.eval_steps=0"),
    *("train.max_steps=12", "checkpoint.every=0", "cluster.procs_per_node=1"),
)
FACTS = """
import torch
print(torch.__version__, torch.version.cuda, torch.cuda.is_available())
if torch.cuda.is_available():
    print(torch.cuda.get_device_name(), torch.cuda.nccl.version())
import colotrain.engine.sharding.fsdp_internals
print("the engine's names in torch are there")
"""


@dataclass(frozen=True)
class Step:
    """One process, and what its losses must equal."""

    name: str
    command: tuple[str, ...]
    limit_s: float
    environment: tuple[tuple[str, str], ...] = ()
    like: str = ""
    """Step with the same losses, up to the rounding of `precision`."""
    precision: str = "fp32"


def run(name: str, *words: str, limit_s: float = 90, **how: Any) -> Step:
    command = (sys.executable, "-m", "colotrain", "run", *words, f"name={name}", "--json")
    return Step(name=name, command=command, limit_s=limit_s, **how)


def right(device: str) -> Iterator[Step]:
    on = (*SMALL, f"cluster.device={device}")
    yield Step(name="facts", command=(sys.executable, "-c", FACTS), limit_s=60)
    yield run("cpu", *SMALL, "cluster.device=cpu", "plugin=zero1")
    for plugin in ("zero1", "zero2", "zero3", "fsdp-hybrid", "gemini"):
        yield run(plugin, *on, f"plugin={plugin}", like="cpu")
    for precision in ("bf16", "fp16"):
        words = ("plugin=zero3", f"train.precision={precision}")
        yield run(precision, *on, *words, like="cpu", precision=precision)
    for size in ("60MiB", "40MiB") if device == "cuda" else ():
        words = ("plugin=gemini", f"plugin.budget.device={size}")
        yield run(f"gemini-{size}", *on, *words, like="cpu")
    budget = ("plugin.budget.device=60MiB",) if device == "cuda" else ()
    yield run("begun", *on, "plugin=gemini", *budget, "checkpoint.every=3", "train.max_steps=3")
    more = (sys.executable, "-m", "colotrain", "resume", "begun", "train.max_steps=6", "--json")
    yield Step(name="resumed", command=more, limit_s=90, like="cpu")
    recompute = "train.activation_checkpointing"
    yield run("selective", *on, "plugin=zero3", f"{recompute}=selective", like="cpu")
    yield run("compiled", *on, "plugin=zero3", "train.compile=true", like="cpu", limit_s=120)
    if device == "cuda":
        words = ("plugin=gemini", *budget, "train.max_steps=3")
        yield run("sanitizer", *on, *words, environment=(("TORCH_CUDA_SANITIZER", "1"),))
    pytest = (sys.executable, "-m", "pytest", "-q", "-o", "addopts=")
    yield Step(name="tests", command=(*pytest, str(ROOT / "tests/gpu")), limit_s=240)


def fast(device: str) -> Iterator[Step]:
    on = (*BIG, f"cluster.device={device}")
    yield run("1b-zero1", *on, "plugin=zero1", limit_s=120)
    script = str(ROOT / "benchmarks" / "gpu.py")
    beside = ("--models", "llm-1b", "--rounds", "1", "--out", "beside", "--device", device)
    yield Step(name="beside", command=(sys.executable, script, *beside), limit_s=300)
    for size in ("12GiB", "8GiB") if device == "cuda" else ():
        words = ("plugin=gemini", f"plugin.budget.device={size}", "train.max_steps=8")
        yield run(f"1b-gemini-{size}", *on, *words, limit_s=120)
    yield run("1b-save", *on, "plugin=zero1", "checkpoint.every=4", limit_s=120)
    yield run("1b-zero3", *on, "plugin=zero3", limit_s=120)
    yield run("1b-compiled", *on, "plugin=zero1", "train.compile=true", limit_s=150)


def carry_out(step: Step, folder: Path, *, limit_s: float) -> dict[str, Any]:
    """Run a step in `folder`; its outputs are NAME.out and NAME.err there."""
    environment = {**os.environ, **dict(step.environment), "PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT, SITE)))
    began = time.monotonic()
    with (
        (folder / f"{step.name}.out").open("w") as out,
        (folder / f"{step.name}.err").open("w") as err,
    ):
        try:
            code: int | None = subprocess.run(
                step.command,
                cwd=folder,
                env=environment,
                stdout=out,
                stderr=err,
                timeout=limit_s,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            code = None
    return {"step": step.name, "exit": code, "seconds": time.monotonic() - began}


def summary_of(name: str, folder: Path) -> dict[str, Any]:
    """What `run --json` printed; empty for other commands, and where it ended early."""
    try:
        found = json.loads((folder / f"{name}.out").read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def judge(step: Step, result: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The result with its figures, and with `problem` where something is wrong."""
    summary = summary_of(step.name, folder)
    if "loss" in summary:
        memory = summary["memory"]
        result["losses"] = [loss for _, loss in summary["loss"]["history"]]
        result["tokens_per_s"] = summary.get("tokens_per_s")
        result["peak"], result["planned"] = memory["measured_peak"], memory["predicted_peak"]
    err = (folder / f"{step.name}.err").read_text("utf-8", "replace")
    if result["exit"] is None:
        result["problem"] = f"not done after {result['seconds']:.0f} s"
    elif result["exit"]:
        result["problem"] = next(reversed(err.strip().splitlines()), f"exit code {result['exit']}")
    elif "CSAN detected" in err:
        result["problem"] = f"{err.count('CSAN detected')} races between streams"
    elif step.like:
        wanted = summary_of(step.like, folder).get("loss", {}).get("history", [])
        off = [abs(a - b) for a, (_, b) in zip(result["losses"], wanted, strict=False)]
        result["off"] = max(off, default=float("inf"))
        if not result["off"] <= CLOSE[step.precision]:
            result["problem"] = f"losses differ by {result['off']:.2g} from those of {step.like}"
    return result


def install_wheels() -> None:
    """Install what is missing from build/gpu-wheels, beside the machine's own packages."""
    wheels = sorted(WHEELS.glob("*.whl"))
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing and wheels and not SITE.is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
        subprocess.run([*pip, "--target", str(SITE), *map(str, wheels)], check=True)


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("block", choices=("right", "fast"))
    parser.add_argument("--out", type=Path, default=Path("first-gpu"))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options = parser.parse_args()
    if options.device == "cuda" and not has_gpu():
        print("error: torch finds no GPU; --device cpu shows that the steps work", file=sys.stderr)
        return 2
    install_wheels()
    folder = options.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    began, failed = time.monotonic(), 0
    steps = right(options.device) if options.block == "right" else fast(options.device)
    with (folder / "results.jsonl").open("a", encoding="utf-8") as results:
        for step in steps:
            left = BLOCK_S - (time.monotonic() - began)
            if left < min(step.limit_s, 60):
                print(f"{step.name:16} left out: the block's time is over", flush=True)
                continue
            result = judge(step, carry_out(step, folder, limit_s=min(step.limit_s, left)), folder)
            failed += "problem" in result
            results.write(json.dumps(result) + "\n")
            results.flush()
            print(line_of(result), flush=True)
    return 1 if failed else 0


def line_of(result: dict[str, Any]) -> str:
    parts = [f"{result['step']:16} {result['seconds']:6.1f} s"]
    if result.get("tokens_per_s"):
        parts.append(f"{result['tokens_per_s']:10,.0f} tokens/s")
    if result.get("peak"):
        parts.append(
            f"peak {result['peak'] / 2**20:,.0f} MiB, plan {result['planned'] / 2**20:,.0f}"
        )
    if "off" in result:
        parts.append(f"off {result['off']:.1e}")
    return "  ".join([*parts, f"FAILED: {result['problem']}" if "problem" in result else "ok"])


if __name__ == "__main__":
    sys.exit(main())
