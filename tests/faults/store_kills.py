"""Kills at random moments of runs whose checkpoints go to an S3 server, and what is true after.

`python tests/faults/store_kills.py --count 50 --seed 0` kills launchers, workers and uploaders, and
breaks the connections to the server. After a launcher's end the run goes on in its folder or, as on
another machine, in an empty one, from the server alone. After each, every checkpoint on the server
is read past colotrain, with boto3, and compared with its checksums; in the end the losses must be
those of a run that nothing happens to, bit by bit. With `--delay` and `--failing`, requests take
longer and fail. `--slow-server` compares the times of steps instead, in turns: without a store, and
with one whose requests take 500 ms and fail in 5 of 100.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import boto3
import psutil
import xxhash

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.faults.kills import events, is_gone, wait_until_gone  # noqa: E402
from tests.faults.s3 import BUCKET, HOST, KEY_ID, SECRET, Proxy, environment, server  # noqa: E402
from tests.processes import Process  # noqa: E402
from tests.running import SMALL, Colotrain, losses  # noqa: E402

RUNS_DIR = f"s3://{BUCKET}/runs"
STEP_S = 0.1
TIMEOUT_S = 300
WHOM = ("launcher", "launcher", "rank 0", "rank 1", "uploader", "server", "server")
LONGEST_CUT_S = 4.0


def slowly(model: object, step: int) -> None:
    """Called with the gradients of every step: makes it as long as `STEP_S`."""
    time.sleep(STEP_S)


def plan(steps: int, *options: str) -> tuple[str, ...]:
    """A run that saves every fourth step."""
    return (
        *SMALL,
        f"train.max_steps={steps}",
        "plugin=zero2",
        "checkpoint.every=4",
        "elastic.max_restarts=100",
        "optim.schedule.name=constant",
        "train.on_gradients=tests.faults.store_kills:slowly",
        *options,
    )


class Server:
    """What is on the server, read with boto3."""

    def __init__(self, port: int) -> None:
        self._client = boto3.client(
            "s3",
            endpoint_url=f"http://{HOST}:{port}",
            aws_access_key_id=KEY_ID,
            aws_secret_access_key=SECRET,
            region_name="us-east-1",
        )

    def names(self, prefix: str) -> list[str]:
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return [item["Key"] for page in pages for item in page.get("Contents", ())]

    def read(self, name: str) -> bytes:
        return bytes(self._client.get_object(Bucket=BUCKET, Key=name)["Body"].read())

    def checkpoints(self, name: str) -> list[int]:
        """Steps of the run's committed checkpoints; AssertionError where one is damaged."""
        steps = []
        for key in self.names(f"runs/{name}/checkpoints/"):
            folder, _, file = key.rpartition("/")
            if file == "manifest.json":
                manifest = json.loads(self.read(key))
                steps.append(int(manifest["step"]))
                assert folder.endswith(f"step-{steps[-1]:08d}")
                for part, entry in manifest["files"].items():
                    found = xxhash.xxh3_128_hexdigest(self.read(f"{folder}/{part}"))
                    assert found == entry["xxh128"], f"{folder}/{part} is damaged"
        return sorted(steps)


def inflict(
    folder: Path,
    name: str,
    chance: random.Random,
    *,
    kills: int,
    steps: int,
    proxy: Proxy,
    on_server: Server,
) -> tuple[list[float], list[str], Counter[str]]:
    """Run to the end with kills; return the losses, what happened, and how much was checked."""
    env = environment(proxy.port) | {"PYTHONPATH": str(ROOT)}
    command = ("run", *plan(steps), f"name={name}", f"runs_dir={RUNS_DIR}")
    words, machine, happened = command, 0, list[str]()
    counts: Counter[str] = Counter()
    for _ in range(4 * kills + 1):
        colotrain = Colotrain(folder / f"{name}-{machine}")
        colotrain.cwd.mkdir(parents=True, exist_ok=True)
        process = colotrain.start(*words, env=env)
        try:
            happened += _kill(colotrain, name, process, chance, kills - len(happened), proxy)
            _, err = process.communicate(timeout=TIMEOUT_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        wait_until_gone(colotrain.cwd)
        counts["checkpoints checked"] += len(on_server.checkpoints(name))
        counts["fetched to an empty folder"] += err.count("fetched step-")
        if process.returncode == 0:
            break
        assert process.returncode in (-signal.SIGKILL, 1), err
        machine += chance.random() < 0.5
        words = command
        if (folder / f"{name}-{machine}" / "runs" / name / "plan.json").is_file():
            words = ("resume", name)
        elif f"runs/{name}/plan.json" in on_server.names(f"runs/{name}/") and chance.random() < 0.5:
            words = ("resume", f"{RUNS_DIR}/{name}")
    assert process.returncode == 0, err
    assert on_server.checkpoints(name)[-1] == steps
    check_no_secret(folder)
    summary = json.loads(on_server.read(f"runs/{name}/summary.json"))
    return losses(summary), happened, counts


def _kill(
    colotrain: Colotrain,
    name: str,
    process: Process | subprocess.Popen[str],
    chance: random.Random,
    most: int,
    proxy: Proxy,
) -> list[str]:
    """Inflict up to `most` faults, each after a step and a random time; end with the launcher's."""
    happened, begun = list[str](), time.time()
    while len(happened) < most:
        while not any(e.kind == "step" and e.t > begun for e in events(colotrain, name)):
            if process.poll() is not None:
                return happened
            time.sleep(0.02)
        time.sleep(chance.uniform(0, 1.5))
        if process.poll() is not None:
            return happened
        whom, begun = chance.choice(WHOM), time.time()
        if whom == "server":
            proxy.cut(chance.uniform(0.2, LONGEST_CUT_S))
            happened.append(whom)
            continue
        started = [e for e in events(colotrain, name) if e.kind == "started"]
        pids = {f"rank {event.rank}": int(event.fields["pid"]) for event in started}
        pid = uploader_of(process.pid) if whom == "uploader" else pids.get(whom, process.pid)
        if pid is None:
            continue
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            happened.append(whom)
        if whom == "launcher":
            return happened
        while whom != "uploader" and process.poll() is None and not is_gone(pid):
            time.sleep(0.01)
    return happened


def uploader_of(launcher: int) -> int | None:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if b"colotrain.runs.uploader" in words and str(launcher).encode() in words:
                return int(path.parent.name)
    return None


def processor_time_of_uploader(launcher: Process | subprocess.Popen[str]) -> float:
    """Wait for the end of a run; return the seconds that its uploader computed."""
    found, pid = 0.0, None
    while launcher.poll() is None:
        time.sleep(0.5)
        pid = pid or uploader_of(launcher.pid)
        with contextlib.suppress(OSError, psutil.Error):
            found = sum(psutil.Process(pid).cpu_times()[:2]) if pid else found
    return found


def check_no_secret(folder: Path) -> None:
    """Neither part of the credentials is in any file of the run."""
    for file in folder.rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            assert SECRET.encode() not in content, f"{file} has the secret"
            assert KEY_ID.encode() not in content, f"{file} has the key's id"


def straight(folder: Path, steps: int) -> list[float]:
    """The losses of the run without a store, which nothing happens to."""
    folder.mkdir(parents=True)
    result = Colotrain(folder)(
        "run", *plan(steps), "name=straight", "--json", env={"PYTHONPATH": str(ROOT)}
    )
    assert result.code == 0, result.err
    return losses(result.json)


def kill_many(count: int, *, seed: int, per_run: int, delay_s: float, failing: float) -> None:
    chance, steps, number = random.Random(seed), 12 * per_run, 0
    faults: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    with (
        tempfile.TemporaryDirectory(prefix="store-kills-") as place,
        server() as port,
        Proxy(port, delay_s=delay_s, failing=failing, seed=seed) as proxy,
    ):
        folder, on_server = Path(place), Server(port)
        expected = straight(folder / "straight", steps)
        while faults.total() < count:
            name, began = f"kills-{number}", time.monotonic()
            found, happened, seen = inflict(
                folder,
                name,
                chance,
                kills=min(per_run, count - faults.total()),
                steps=steps,
                proxy=proxy,
                on_server=on_server,
            )
            assert found == expected, f"losses differ: {found} instead of {expected}"
            number += 1
            faults.update(happened)
            counts.update(seen)
            took = time.monotonic() - began
            print(f"{len(happened)} faults in {took:.0f} s: {', '.join(happened)}", flush=True)
            print(
                f"{faults.total()} so far {dict(faults)}; {dict(counts)}, none damaged; "
                f"losses bit-equal; {proxy.requests} requests, {proxy.failed} failed",
                flush=True,
            )


def compare_steps(runs: int, *, steps: int, delay_s: float, failing: float) -> None:
    """Print the median times of steps without a store and with a slow one, in turns."""
    medians: dict[str, list[float]] = {"none": [], "slow": []}
    with (
        tempfile.TemporaryDirectory(prefix="store-steps-") as place,
        server() as port,
        Proxy(port, delay_s=delay_s, failing=failing) as proxy,
    ):
        colotrain = Colotrain(Path(place))
        env = environment(proxy.port) | {"PYTHONPATH": str(ROOT)}
        for number in range(runs):
            for kind in medians:
                name = f"{kind}-{number}"
                options = [f"runs_dir={RUNS_DIR}"] if kind == "slow" else []
                command = ("run", *plan(steps, *options), f"name={name}", "--json")
                began = time.monotonic()
                own_s, process = time.process_time(), colotrain.start(*command, env=env)
                uploader_s = processor_time_of_uploader(process)
                _, err = process.communicate(timeout=TIMEOUT_S)
                assert process.returncode == 0, err
                times = [e.t for e in colotrain.events(name) if e.kind == "step" and e.rank == 0]
                gaps = sorted(b - a for a, b in itertools.pairwise(times))
                medians[kind].append(statistics.median(gaps))
                took_s, proxy_s = time.monotonic() - began, time.process_time() - own_s
                print(
                    f"{name}: median step {1000 * medians[kind][-1]:.1f} ms, 95 of 100 below "
                    f"{1000 * gaps[int(0.95 * len(gaps))]:.1f} ms, first to last step "
                    f"{times[-1] - times[0]:.2f} s, whole command {took_s:.1f} s; "
                    f"processor time: uploader {uploader_s:.1f} s, proxy {proxy_s:.1f} s",
                    flush=True,
                )
        print(f"{proxy.requests} requests, {proxy.failed} failed")
        for kind, found in medians.items():
            print(f"{kind}: median of medians {1000 * statistics.median(found):.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--per-run", type=int, default=5)
    parser.add_argument("--delay", type=float, default=0.0, help="seconds of each request")
    parser.add_argument("--failing", type=float, default=0.0, help="share of requests that fail")
    parser.add_argument("--slow-server", action="store_true", help="compare the times of steps")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    if options.slow_server:
        delay_s, failing = options.delay or 0.5, options.failing or 0.05
        compare_steps(options.runs, steps=options.steps, delay_s=delay_s, failing=failing)
        return
    kill_many(
        options.count,
        seed=options.seed,
        per_run=options.per_run,
        delay_s=options.delay,
        failing=options.failing,
    )


if __name__ == "__main__":
    main()
