"""Kills of workers at random: steps lost, and seconds from a kill to the next finished step.

`python tests/faults/recovery.py --minutes 10 --seed 0` runs every plugin on 2 and on 4 ranks, in
turns with copies of the state in memory and with checkpoints alone (every fifth step), and kills
workers of each run at random. Losses must be those of the same run without kills.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.faults.kills import environment, events, history, wait_until_gone  # noqa: E402
from tests.running import SMALL, Colotrain  # noqa: E402

STEPS, KILLS = 40, 4
PLUGINS = ("zero1", "zero2", "zero3", "fsdp-hybrid", "gemini")
MODES = {"memory": "elastic.memory_copy=1GiB", "checkpoints": "elastic.memory_copy=off"}


def plan(plugin: str, ranks: int, name: str, mode: str) -> tuple[str, ...]:
    sizes = (f"cluster.procs_per_node={ranks}", f"train.max_steps={STEPS}", f"name={name}")
    hybrid = ("plugin.shard_size=1",) if plugin == "fsdp-hybrid" else ()
    more = ("train.micro_batch=1", "checkpoint.every=5", "elastic.max_restarts=99", *hybrid)
    return (*SMALL, *sizes, *more, f"plugin={plugin}", MODES[mode])


def killed(colotrain: Colotrain, name: str, words: tuple[str, ...], chance: random.Random) -> list:
    """Run with kills; returns (steps lost, seconds to the next finished step) of each."""
    process = colotrain.start("run", *words, env=environment())
    kills: list[tuple[float, int]] = []
    while len(kills) < KILLS and process.poll() is None:
        since = kills[-1][0] if kills else 0.0
        fresh = [e for e in events(colotrain, name) if e.kind == "step" and e.t > since]
        if not any(e.attempt == len(kills) for e in fresh):
            time.sleep(0.02)
            continue
        time.sleep(chance.uniform(0, 0.5))
        known = events(colotrain, name)
        pids = [e.fields["pid"] for e in known if e.kind == "started" and e.attempt == len(kills)]
        steps = [e.fields["step"] for e in events(colotrain, name) if e.kind == "step"]
        if max(steps) >= STEPS - 1:
            break
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(chance.choice(pids)), signal.SIGKILL)
            kills.append((time.time(), 0))
    _, err = process.communicate(timeout=1200)
    assert process.returncode == 0, err
    wait_until_gone(colotrain.cwd)
    return outcome(colotrain, name, [t for t, _ in kills])


def outcome(colotrain: Colotrain, name: str, times: list[float]) -> list[tuple[int, float]]:
    known = events(colotrain, name)
    found = []
    for number, killed_at in enumerate(times):
        before = [e for e in known if e.kind == "step" and e.attempt == number]
        done = max(e.fields["step"] for e in before if e.rank == 0)
        after = [e for e in known if e.attempt == number + 1]
        base = min(e.fields["step"] for e in after if e.kind == "started")
        # a step that another rank had finished alone was in flight
        first = min(e.t for e in after if e.kind == "step" and e.rank == 0)
        whole = min(done, *(max(e.fields["step"] for e in before if e.rank == r) for r in (0, 1)))
        found.append((whole - base, first - killed_at))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance, until = random.Random(options.seed), time.monotonic() + 60 * options.minutes
    found: dict[str, list[tuple[int, float]]] = {mode: [] for mode in MODES}
    shared = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory(prefix="recovery-") as folder:
        colotrain, expected = Colotrain(Path(folder)), {}
        cases = itertools.cycle([(p, r) for p in PLUGINS for r in (2, 4)])
        for number, (plugin, ranks) in enumerate(cases):
            if time.monotonic() > until:
                break
            if (plugin, ranks) not in expected:
                name = f"straight-{plugin}-{ranks}"
                result = colotrain("run", *plan(plugin, ranks, name, "checkpoints"))
                assert result.code == 0, result.err
                expected[plugin, ranks] = history(colotrain, name)
            for mode in MODES:
                name = f"{mode}-{number}"
                words = plan(plugin, ranks, name, mode)
                each = killed(colotrain, name, words, chance)
                assert history(colotrain, name) == expected[plugin, ranks], name
                found[mode] += each
                lost = [steps for steps, _ in found[mode]]
                median_s = statistics.median(s for _, s in found[mode] or [(0, 0.0)])
                print(
                    f"{plugin} on {ranks}, {mode}: {each}; {len(lost)} kills so far, steps lost: "
                    f"{sum(lost)} (most {max(lost, default=0)}), median {median_s:.2f} s",
                    flush=True,
                )
    assert set(os.listdir("/dev/shm")) <= shared, "something is left in /dev/shm"


if __name__ == "__main__":
    main()
