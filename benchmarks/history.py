"""How long a long history takes: opening the events of a big run, and following them.

    python benchmarks/history.py                    # 1,000 ranks × 10,000 steps
    python benchmarks/history.py --every 10         # ranks other than 0 record every tenth step

Prints one JSON document. The history is generated in a temporary folder: what every rank of such
a run writes, with a gradient record of 300 parameters every 10 steps, evaluations, checkpoints
and a restart halfway.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from colotrain.events.fold import Fold
from colotrain.events.log import EventReader, encode
from colotrain.rundir import RunDir

STEP_S = 0.5
PARAMETERS = 300
FOLLOWED = 40
MIB = 1 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--every", type=int, default=1, help="steps between records of rank > 0")
    parser.add_argument("--measure", type=Path, help="measure this folder, in a process of its own")
    options = parser.parse_args()
    if options.measure is not None:
        print(json.dumps(measure(RunDir(options.measure), options.ranks, options.steps)))
        return
    with tempfile.TemporaryDirectory() as folder:
        rundir, started = RunDir(folder), time.perf_counter()
        num_bytes = generate(rundir, options.ranks, options.steps, options.every)
        generated_s = time.perf_counter() - started
        command = [sys.executable, __file__, "--measure", folder]
        command += ["--ranks", str(options.ranks), "--steps", str(options.steps)]
        found = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    history = {"ranks": options.ranks, "steps": options.steps, "every": options.every}
    history |= {"bytes": num_bytes, "generated_s": round(generated_s, 1)}
    print(json.dumps({"history": history, **found}, indent=2))


def measure(rundir: RunDir, ranks: int, steps: int) -> dict[str, Any]:
    """Open the history, as the dashboard does, and follow it while it grows."""
    before = rss()
    started, cpu = time.perf_counter(), time.process_time()
    reader, fold = EventReader(rundir, outline=True), Fold(max_steps=2 * steps)
    num_events = len(fold_all(reader, fold))
    view = fold.view()
    opened_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu
    assert (view.steps, len(view.ranks), len(view.loss)) == (steps, ranks, steps), view.steps
    opened_rss, polls = rss(), []
    for number in range(FOLLOWED):
        for rank in range(ranks):
            append(rundir, rank, steps + 1 + number)
        started = time.perf_counter()
        fold_all(reader, fold)
        assert fold.view().steps == steps + 1 + number
        polls.append(time.perf_counter() - started)
    started = time.perf_counter()
    fold_all(reader, fold)
    return {
        "open": {
            "seconds": round(opened_s, 2),
            "cpu_seconds": round(cpu_s, 2),
            "events": num_events,
        },
        "follow": {
            "seconds_per_poll": round(sorted(polls)[len(polls) // 2], 4),
            "seconds_per_idle_poll": round(time.perf_counter() - started, 4),
        },
        "memory": {
            "opening_bytes": opened_rss - before,
            "following_bytes": rss() - opened_rss,
            "steps_followed": FOLLOWED,
        },
    }


def fold_all(reader: EventReader, fold: Fold) -> list[None]:
    """Read until there is no more; one element per event."""
    seen: list[None] = []
    while True:
        events = reader.poll()
        fold.add(events)
        seen += [None] * len(events)
        if not reader.behind:
            return seen


def rss() -> int:
    """The highest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def generate(rundir: RunDir, ranks: int, steps: int, every: int) -> int:
    """Write the whole history; returns its size in bytes."""
    rundir.create()
    half = steps // 2
    launcher = [{"t": 0.0, "kind": "launch", "world_size": ranks, "host": "n0", "pid": 1}]
    launcher += [{"t": half * STEP_S + 5, "kind": "restart", "cause": "rank 7 was killed"}]
    write(rundir.launcher_events, [encode(record) for record in launcher])
    num_bytes = 0
    for attempt, (first, last) in enumerate([(1, half), (half - 9, steps)]):
        lines = list(rank_0(ranks, first, last))
        num_bytes += write(rundir.event_file(rank=0, attempt=attempt), lines)
        body = b"".join(encode(step(n, 3)) for n in range(first, last + 1) if n % every == 0)
        for rank in range(1, ranks):
            begin = encode(start(ranks, rank, first))
            end = encode(step(last, rank)) if last % every else b""
            num_bytes += write(rundir.event_file(rank=rank, attempt=attempt), [begin, body, end])
    return num_bytes


def write(path: Path, lines: list[bytes]) -> int:
    return path.write_bytes(b"".join(lines))


def append(rundir: RunDir, rank: int, number: int) -> None:
    record = step(number, rank) | (shared(number) if rank == 0 else {})
    with rundir.event_file(rank=rank, attempt=1).open("ab") as file:
        file.write(encode(record))


def start(ranks: int, rank: int, first: int) -> dict[str, Any]:
    own = {"rank": rank, "world_size": ranks, "pid": 100 + rank, "host": f"n{rank // 8}"}
    return {"t": first * STEP_S - 1, "kind": "started", "step": first - 1, **own}


def step(number: int, rank: int) -> dict[str, Any]:
    return {
        "t": number * STEP_S + rank * 1e-5,
        "kind": "step",
        "step": number,
        "step_s": 0.49187654321,
        "data_s": 0.00187654321,
        "micro_batches": 4,
        "samples": [number * 4 + i for i in range(4)],
        "rss": 5_000 * MIB + rank,
        "peak": 6_000 * MIB + rank,
    }


def shared(number: int) -> dict[str, Any]:
    return {
        "loss": 11.0 * number**-0.2,
        "tokens": 8_192_000,
        "tokens_per_s": 16_000_000.0 + number,
        "grad_norm": 1.2345678,
        "clip_ratio": 0.81,
        "lr": 3e-4,
        "optimizer_steps": number,
        "total_micro_batches": 4 * number,
        "skipped": False,
    }


def rank_0(ranks: int, first: int, last: int) -> Iterator[bytes]:
    yield encode(start(ranks, 0, first))
    parts = ("attention.qkv.weight", "attention.output.weight", "mlp.up.weight", "mlp.down.weight")
    names = [f"blocks.{i // 4}.{parts[i % 4]}" for i in range(PARAMETERS)]
    shapes, dtypes = [[4096, 4096]] * PARAMETERS, ["float32"] * PARAMETERS
    about = {"names": names, "shapes": shapes, "dtypes": dtypes, "aliases": {}}
    yield encode({"t": first * STEP_S - 0.5, "kind": "parameters", **about})
    chance = random.Random(0)
    for number in range(first, last + 1):
        if number % 10 == 0:
            yield encode(gradients(number, chance))
        yield encode(step(number, 0) | shared(number))
        if number % 500 == 0:
            yield encode({"t": number * STEP_S, "kind": "eval", "step": number, "loss": 3.0})
            saved = {"step": number, "path": f"/runs/x/step-{number}", "seconds": 2.0}
            yield encode({"t": number * STEP_S, "kind": "checkpoint", **saved})


def gradients(number: int, chance: random.Random) -> dict[str, Any]:
    def column() -> list[float]:
        return [float(f"{chance.lognormvariate(-5, 2):.8g}") for _ in range(PARAMETERS)]

    columns = ("norm", "rms", "max_abs", "zero_fraction", "update_ratio")
    return {
        "t": number * STEP_S - 0.01,
        "kind": "gradients",
        "step": number,
        "global_norm": 1.2345678,
        "clipped_to": 1.0,
        "status": ["trained"] * PARAMETERS,
        "reason": {},
        "nonfinite": [0] * PARAMETERS,
        **{name: column() for name in columns},
    }


if __name__ == "__main__":
    main()
