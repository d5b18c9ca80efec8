"""Training what does not fit: gemini inside a memory control group, the rest on disk.

    python benchmarks/gemini.py --limit 10GiB [--recipe llm-1b] [--steps 5] [--in-memory] [--kill]
    python benchmarks/gemini.py --peers fully_shard-offload deepspeed-cpu [--limit 10GiB]

Runs the recipe on two CPU ranks (sequence 128, a global batch of 2) in a control group of its own
(as root), and prints losses, tokens/s, the group's highest use and its out-of-memory kills. With
`--in-memory` the same run without limit comes first, and losses and speed are compared with it.
With `--kill` every process is killed (-9) after the second step, the disk is looked at, and the
run is resumed. `--peers` runs llm-1b through other systems, and prints what the group used.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median

from processes import end

from colotrain.config.sizes import parse_size
from colotrain.events.log import EventReader
from colotrain.rundir import RunDir
from colotrain.spec.quantities import format_size

V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
TIMEOUT_S = 3600


@contextmanager
def control_group(limit: int | None) -> Iterator[Path | None]:
    """A memory control group with `limit` bytes and no swap; removed at the end."""
    if limit is None:
        yield None
        return
    version_1 = (V1 / "memory.limit_in_bytes").exists()
    group = (V1 if version_1 else V2) / f"colotrain-{os.getpid()}"
    group.mkdir()
    try:
        (group / ("memory.limit_in_bytes" if version_1 else "memory.max")).write_text(str(limit))
        yield group
    finally:
        for _ in range(100):  # processes that were killed take a moment to leave
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.1)


def highest_use(group: Path) -> int:
    names = ("memory.max_usage_in_bytes", "memory.peak")
    return next(int((group / n).read_text()) for n in names if (group / n).exists())


def kills(group: Path) -> int:
    """Processes that the kernel killed for memory."""
    names = ("memory.oom_control", "memory.events")
    text = next((group / n).read_text() for n in names if (group / n).exists())
    return int(dict(line.split() for line in text.splitlines())["oom_kill"])


def start(arguments: list[str], folder: Path, group: Path | None) -> subprocess.Popen[bytes]:
    join = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
    inside = ["sh", "-c", join, str(group)] if group else []
    command = [*inside, sys.executable, "-m", "colotrain", *arguments]
    log = (folder / "log").open("ab")
    return subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, start_new_session=True)


def settings(args: argparse.Namespace, name: str, disk: Path | None) -> list[str]:
    tiers = [f"plugin.disk_path={disk}", f"plugin.budget.host={args.budget}"] if disk else []
    return [
        *("run", f"recipe={args.recipe}", "plugin=gemini", f"name={name}", *tiers, "--force"),
        *("train.global_batch=2", "train.micro_batch=1", "data.seq_len=128"),
        *(f"train.max_steps={args.steps}", "train.eval_steps=1", "cluster.procs_per_node=2"),
        *("checkpoint.every=1" if args.kill else "checkpoint.every=0", "observe.grads_every=0"),
        *("optim.schedule.warmup_steps=0", "optim.schedule.name=constant", *args.overrides),
    ]


def steps_of(rundir: RunDir) -> list[dict]:
    events = [e for e in EventReader(rundir).drain() if e.kind == "step" and e.rank == 0]
    return [event.fields for event in events]


def report(name: str, folder: Path, group: Path | None) -> tuple[list[float], float]:
    """Print what a run did; its losses and its median tokens/s after the first step."""
    rundir = RunDir(folder / "runs" / name)
    events = EventReader(rundir).drain()
    steps = steps_of(rundir)
    losses = [step["loss"] for step in steps]
    speed = median([s["tokens_per_s"] for s in steps[1:] or steps]) if steps else 0.0
    peaks = [
        max((e.fields["peak"] for e in events if e.kind == "step" and e.rank == r), default=0)
        for r in (0, 1)
    ]
    print(f"{name}: losses {losses}")
    print(f"  {speed:.2f} tokens/s; steps of", *(f"{s['step_s']:.1f}" for s in steps), "s,")
    print("  of which update", *(f"{s['optimizer_s']:.1f}" for s in steps), "s")
    print("  highest resident by rank:", *map(format_size, peaks))
    for event in (e for e in events if e.kind == "tiers" and e.rank == 0):
        for kind, tiers in event.fields["bytes"].items():
            print(f"  {kind}:", ", ".join(f"{t} {format_size(n)}" for t, n in tiers.items()))
        need = {tier: format_size(n) for tier, n in event.fields["need"].items()}
        print(
            f"  attempt {event.attempt}, step {event.fields['step']}: need {need}, moved per step",
            end=" ",
        )
        print(f"{format_size(event.fields['moved_bytes'])}, budget {event.fields['budget']}")
    if group:
        print(
            f"  control group: highest use {format_size(highest_use(group))}, {kills(group)} kills"
        )
    return losses, speed


def train(
    args: argparse.Namespace, name: str, folder: Path, limit: int | None
) -> tuple[list[float], float]:
    disk = folder / "disk" if limit else None
    with control_group(limit) as group:
        process = start(settings(args, name, disk), folder, group)
        if args.kill and limit:
            kill_after(2, process, RunDir(folder / "runs" / name), folder)
            process = start(["resume", name], folder, group)
        try:
            code = process.wait(TIMEOUT_S)
        finally:
            end(process)
        if code:
            print((folder / "log").read_text("utf-8", "replace")[-2000:])
        print(f"{name}: exit code {code}")
        return report(name, folder, group)


def train_peer(args: argparse.Namespace, variant: str, folder: Path, limit: int) -> None:
    """The same with `peers/large.py`; prints the end of its log where it fails."""
    out = folder / f"{variant}-{limit}"
    out.mkdir()
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "2"}
    script = Path(__file__).parent / "peers" / "large.py"
    settings = [str(script), "--variant", variant, "--out", str(out), "--steps", str(args.steps)]
    launch = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    with control_group(limit) as group, (out / "log").open("w+") as log:
        join = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
        command = ["sh", "-c", join, str(group), sys.executable, *launch, *settings]
        process = subprocess.Popen(
            command, cwd=out, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            code = process.wait(TIMEOUT_S)
        finally:
            end(process)
        use = f"highest use {format_size(highest_use(group))}, {kills(group)} kills"
        print(f"{variant}: exit code {code}; control group of {format_size(limit)}: {use}")
        if code:
            log.seek(0)
            print("  " + "\n  ".join(log.read().strip().splitlines()[-12:]))
            return
    documents = [json.loads((out / f"rank{rank}.json").read_text("utf-8")) for rank in (0, 1)]
    gaps = [b - a for a, b in pairwise(documents[0]["ends"])]
    print("  steps of", *(f"{gap:.1f}" for gap in gaps), "s after the first;", end=" ")
    print("highest resident by rank:", *(format_size(d["peak"]) for d in documents), flush=True)


def kill_after(step: int, process: subprocess.Popen[bytes], rundir: RunDir, folder: Path) -> None:
    """kill -9 to every process of the run once `step` is saved; then the disk is looked at."""
    saved = rundir.checkpoint(step) / "manifest.json"
    deadline = time.monotonic() + TIMEOUT_S
    while not saved.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)
    before = shutil.disk_usage(folder).free
    end(process)
    time.sleep(5)
    freed = shutil.disk_usage(folder).free - before
    left = [str(path) for path in (folder / "disk").iterdir()]
    print(f"killed after step {step}: {format_size(max(freed, 0))} of disk came free, left: {left}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="llm-1b")
    parser.add_argument("--limit", action="append", help="of the control group; may be repeated")
    parser.add_argument("--budget", default="auto", help="plugin.budget.host")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--in-memory", action="store_true")
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--peers", nargs="*", default=[], help="variants of peers/large.py")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on a real disk")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder, reference = Path(name), None
        for variant in args.peers:
            for text in args.limit or ["1TiB"]:
                train_peer(args, variant, folder, parse_size(text))
        if args.peers:
            return
        if args.in_memory:
            reference = train(args, "in-memory", folder, None)
        for text in args.limit or []:
            losses, speed = train(args, text, folder, parse_size(text))
            if reference and losses:
                same = "identical" if losses == reference[0] else "DIFFERENT"
                print(f"  against memory: losses {same}, {speed / reference[1]:.2f} of its speed")


if __name__ == "__main__":
    main()
