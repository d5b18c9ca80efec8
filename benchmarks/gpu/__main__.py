"""Some minutes on one GPU: what is right, how fast, and whether the plan is true.

    python benchmarks/gpu [--only NAME…] [--seconds 500] [--device cpu] [--out FOLDER]

First what the card gives (`ceilings.py`). Then small runs, many at the same time, whose losses and
gradients must be those of the CPU (`cases.py`), with torch's sanitizer of streams, tests/gpu and a
run through the launcher. Then what is timed, alone and by value (`timed.py`); what no longer fits
is left out by name. One line for each, results as lines of JSON in FOLDER/results.jsonl, what
failing processes said in FOLDER/errors.txt; the last line names what failed, for `--only`.

Nothing is fetched: hydra-core and omegaconf are taken from build/gpu-wheels where they are missing
(`make gpu-wheels` fills it), and colotrain from its folder. Ends with 1 where something failed,
with 2 without a GPU; `--device cpu` tries the whole of it out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
WHEELS, SITE = ROOT / "build" / "gpu-wheels", Path("/tmp/colotrain-gpu-site")
NEEDED = {"hydra": "hydra_core", "omegaconf": "omegaconf", "antlr4": "antlr4", "pytest": "pytest"}
"""What is imported → how its wheel's name begins."""
CASES_S = 170.0
"""All small cases have ended after this, or are ended."""


class Results:
    """Lines on the terminal, and in results.jsonl."""

    def __init__(self, out: Path) -> None:
        self.file = (out / "results.jsonl").open("a", encoding="utf-8")
        self.failed: list[str] = []

    def add(self, name: str, row: dict[str, Any]) -> None:
        self.file.write(json.dumps({"name": name, **row}, default=str) + "\n")
        self.file.flush()
        if "failed" in row:
            self.failed.append(name)
        told = " ".join(
            f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}"
            for key, value in row.items()
            if isinstance(value, str | int | float)
        )
        print(f"{name:24} {told}"[:230], flush=True)
        for line in row.get("kernels", ()):
            print(f"    {line}"[:130], flush=True)


def environment(**more: str) -> dict[str, str]:
    paths = [str(ROOT), str(HERE), str(SITE), os.environ.get("PYTHONPATH", "")]
    kernels = {
        "TORCHINDUCTOR_CACHE_DIR": "/tmp/gpu-inductor",
        "TRITON_CACHE_DIR": "/tmp/gpu-triton",
    }
    own = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1", "CI": "1"}
    return os.environ | kernels | own | more


def start(
    name: str, command: tuple[str, ...], folder: Path, **more: str
) -> subprocess.Popen[bytes]:
    """A process in a group of its own; its outputs are NAME.out and NAME.err in `folder`."""
    with (folder / f"{name}.out").open("w") as out, (folder / f"{name}.err").open("w") as err:
        return subprocess.Popen(
            command,
            cwd=folder,
            env=environment(**more),
            stdout=out,
            stderr=err,
            start_new_session=True,
        )


def finish(
    name: str, process: subprocess.Popen[bytes], folder: Path, until: float
) -> dict[str, Any]:
    """How it ended; killed with its group at `until`, on the monotonic clock."""
    try:
        code = process.wait(timeout=max(1.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return {"failed": "not done in its time"}
    if code == 0:
        return {}
    lines = (folder / f"{name}.err").read_text("utf-8", "replace").strip().splitlines()
    return {"failed": f"exit code {code}: {lines[-1] if lines else 'nothing said'}"[:300]}


def small_cases(device: str, folder: Path, results: Results, until: float, only: set[str]) -> None:
    """Every group of cases in a process of its own, all at the same time."""
    import cases

    chosen = cases.small_cases(device)
    if only:
        asked = {case.name for case in chosen if case.name in only}
        asked |= {case.like for case in chosen if case.name in only}
        asked |= {"begun"} if "resumed" in only else set()
        chosen = [case for case in chosen if case.name in asked]
    cases.write_cases(chosen, folder)
    groups: dict[str, list[str]] = {}
    for case in chosen:
        groups.setdefault(case.group, []).append(case.name)
    running = {}
    for group, names in groups.items():
        more = {"OMP_NUM_THREADS": str(cases.THREADS)}
        if group == "sanitizer":
            more["TORCH_CUDA_SANITIZER"] = "1"
        command = (sys.executable, str(HERE / "cases.py"), str(folder), *names)
        running[f"group {group}"] = start(f"group {group}", command, folder, **more)
        if device == "cpu":  # two cores
            running[f"group {group}"].wait()
    for name, command in beside(device).items():
        if not only or name in only:
            running[name] = start(name, command, folder)
    for name, process in running.items():
        row = finish(name, process, folder, until)
        said = (folder / f"{name}.err").read_text("utf-8", "replace")
        if "CSAN detected" in said:
            row["failed"] = f"{said.count('CSAN detected')} races between streams"
        if row or not name.startswith("group"):
            results.add(name, row)
    for case in chosen:
        results.add(case.name, cases.judge(case, folder))


def beside(device: str) -> dict[str, tuple[str, ...]]:
    """What runs beside the small cases: tests/gpu, and a run through the launcher."""
    import cases
    import timed

    on = ("plugin=zero3", f"cluster.device={device}", "checkpoint.every=2")
    pytest = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=")
    return {
        "tests": (sys.executable, *pytest, str(ROOT / "tests" / "gpu")),
        "launched": timed.run("launched", *cases.TINY, *on),
    }


def install_wheels() -> None:
    """Install what is missing from build/gpu-wheels, beside the machine's own packages."""
    missing = [prefix for name, prefix in NEEDED.items() if importlib.util.find_spec(name) is None]
    wheels = [str(w) for p in missing for w in sorted(WHEELS.glob(f"{p}*.whl"))]
    if wheels and not SITE.is_dir():
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps")
        subprocess.run([*pip, "--no-compile", "--target", str(SITE), *wheels], check=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="benchmarks/gpu", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("build/gpu"))
    parser.add_argument("--work", type=Path, default=Path("/tmp/colotrain-gpu"))
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    asked = parser.parse_args()
    until, only = time.monotonic() + asked.seconds, set(asked.only)
    install_wheels()
    sys.path[:0] = [str(ROOT), str(HERE), str(SITE)]
    import cases
    import timed
    import torch

    if asked.device == "cuda" and not torch.cuda.is_available():
        print("error: torch finds no GPU; --device cpu shows that it works", file=sys.stderr)
        return 2
    small = {case.name for case in cases.small_cases(asked.device)}
    if "small" in only:
        only |= small
    small |= {"small", *beside(asked.device)}
    steps = timed.timed_steps(asked.device)
    known = small | {step.name for step in steps} | {"ceilings"}
    if only - known:
        names = ", ".join(sorted(known))
        unknown = ", ".join(sorted(only - known))
        print(f"error: --only {unknown}: expected of: {names}", file=sys.stderr)
        return 2
    folder, out = asked.work.resolve(), asked.out.resolve()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    out.mkdir(parents=True, exist_ok=True)
    results = Results(out)
    if asked.device == "cuda" and (not only or "ceilings" in only):
        command = (sys.executable, str(HERE / "ceilings.py"), str(out / "ceilings.json"))
        process = start("ceilings", command, folder)
        results.add("ceilings", finish("ceilings", process, folder, time.monotonic() + 60))
    if not only or only & small:
        ends = min(until, time.monotonic() + (CASES_S if asked.device == "cuda" else 3600))
        small_cases(asked.device, folder, results, ends, only)
    for step in steps:
        if only and step.name not in only:
            continue
        left = until - time.monotonic()
        if left < step.expected_s:
            results.add(step.name, {"left_out": f"{left:.0f} of {step.expected_s:.0f} s left"})
            continue
        began = time.monotonic()
        process = start(step.name, step.command, folder)
        row: dict[str, Any] = finish(step.name, process, folder, began + min(step.limit_s, left))
        try:
            row = timed.read_timed(step.name, folder) | row
        except (OSError, ValueError, KeyError) as error:
            row.setdefault("failed", f"not read: {type(error).__name__}: {error}")
        results.add(step.name, {"seconds": time.monotonic() - began} | row)
    write_errors(folder, out)
    print("failed:", " ".join(f'"{name}"' for name in results.failed) or "none", flush=True)
    return 1 if results.failed else 0


def write_errors(folder: Path, out: Path) -> None:
    """The ends of what processes wrote to stderr, and tracebacks of cases."""
    with (out / "errors.txt").open("w", encoding="utf-8") as text:
        for path in sorted([*folder.glob("*.err"), *folder.glob("*.trace")]):
            content = path.read_text("utf-8", "replace").strip()
            if content:
                text.write(f"== {path.name}\n{content[-6000:]}\n")


if __name__ == "__main__":
    sys.exit(main())
