"""What watching a run costs: events, memory, gradient records every ten steps and a live view.

Two ranks train llm-25m in turns of ten steps: with nothing recorded and the dashboard stopped, and
with everything recorded while the dashboard draws on a terminal. The cost is given in time, and in
processor time of ranks and dashboard together, which a busy machine disturbs less.
`python benchmarks/observing.py [plugin …]`
"""

from __future__ import annotations

import argparse
import os
import pty
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
from dataclasses import replace
from fcntl import ioctl
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from colotrain import resolve
from colotrain.engine.comms.process import StopRequest, connect
from colotrain.engine.step.recording import StepRecords
from colotrain.engine.step.train import train
from colotrain.engine.worker import announce, prepare
from colotrain.events.log import EventWriter
from colotrain.rundir import RunDir
from colotrain.spec.plan import RunPlan

TURN = 10  # steps, of which the last one is recorded in full
PLUGINS = ["zero1", "zero2", "zero3"]


class Nothing(EventWriter):
    """Drops what is written."""

    def write_record(self, kind: str, **fields: Any) -> None: ...


def plan_of(plugin: str, turns: int) -> RunPlan:
    steps = TURN * (turns * 2 + 1)
    plan = resolve(
        [
            *("recipe=llm-25m", f"plugin={plugin}", "cluster.procs_per_node=2", f"name={plugin}"),
            *("train.global_batch=8", f"train.max_steps={steps}", "train.eval_every=0"),
            *(f"observe.grads_every={TURN}", "checkpoint.every=0"),
        ]
    )
    return replace(plan, train=replace(plan.train, eval_steps=0))


def rank_main(rank: int, port: int, plan: RunPlan, folder: str, dashboard: int) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {"MASTER_PORT": str(port), "LOCAL_RANK": str(rank)}
    rundir, device = RunDir(folder), connect(plan)
    recorded = EventWriter(rundir.event_file(rank=rank, attempt=0))
    run = prepare(plan, rundir, device=device, events=recorded, stop=StopRequest(rundir))
    announce(run, 0)
    record_step, silent = StepRecords.after_step, Nothing(os.devnull)
    viewer = psutil.Process(dashboard)
    took: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for turn in range(plan.train.max_steps // TURN):
        watched = turn % 2 == 0
        run.events = recorded if watched else silent
        StepRecords.after_step = record_step if watched else lambda *_: None  # type: ignore[method-assign]
        observe = replace(plan.observe, grads_every=TURN if watched else 0)
        run.plan = replace(
            plan, observe=observe, train=replace(plan.train, max_steps=run.step + TURN)
        )
        if rank == 0:
            os.kill(dashboard, signal.SIGCONT if watched else signal.SIGSTOP)
        dist.barrier()
        started, busy = time.perf_counter(), used(viewer if rank == 0 else None)
        train(run)
        total = torch.tensor(used(viewer if rank == 0 else None) - busy)
        dist.all_reduce(total)
        if turn > 0:  # the first warms up
            took[watched].append((time.perf_counter() - started, total.item()))
    if rank == 0:
        show(plan.plugin.name, took[False], took[True])
    dist.destroy_process_group()


def used(viewer: psutil.Process | None) -> float:
    """Seconds of processor time of this process and of the dashboard."""
    beside = viewer.cpu_times() if viewer else None
    return time.process_time() + (beside.user + beside.system if beside else 0.0)


def show(
    plugin: str, without: list[tuple[float, float]], watched: list[tuple[float, float]]
) -> None:
    columns = []
    for i in (0, 1):
        ratios = [b[i] / a[i] - 1 for a, b in zip(without, watched, strict=True)]
        low, _, high = quantiles(ratios, n=4)
        columns.append(f"{median(ratios):>+7.2%} ({low:+.2%} to {high:+.2%})")
    step_s = median(seconds for seconds, _ in without) / TURN
    print(f"{plugin:<12} {step_s:>7.3f}s  {columns[0]:<28} {columns[1]}", flush=True)


def start_dashboard(rundir: RunDir) -> subprocess.Popen[bytes]:
    """`colotrain dashboard` on a terminal of 120 × 40, whose output is read and dropped."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    command = [sys.executable, "-m", "colotrain", "dashboard", str(rundir.path)]
    environment = {k: v for k, v in os.environ.items() if k not in ("CI", "NO_COLOR")}
    environment["TERM"] = "xterm-256color"
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, close_fds=True
    )
    os.close(theirs)
    threading.Thread(target=drop, args=(ours,), daemon=True).start()
    return process


def drop(handle: int) -> None:
    try:
        while os.read(handle, 65536):
            pass
    except OSError:  # the dashboard has ended
        pass


def measure(plugin: str, turns: int, folder: Path) -> None:
    plan = plan_of(plugin, turns)
    rundir = RunDir(folder / plan.name)
    rundir.create()
    rundir.write_plan(plan)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    dashboard = start_dashboard(rundir)
    try:
        time.sleep(2)
        mp.spawn(rank_main, (port, plan, str(rundir.path), dashboard.pid), nprocs=2)
    finally:
        dashboard.kill()
        dashboard.wait(timeout=10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("plugins", nargs="*", default=PLUGINS)
    parser.add_argument("--turns", type=int, default=6, help="pairs of ten steps")
    asked = parser.parse_args()
    print(f"{'plugin':<12} {'step':>8}  {'time (quartiles)':<28} processor time (quartiles)")
    for plugin in asked.plugins:
        with tempfile.TemporaryDirectory() as folder:
            measure(plugin, asked.turns, Path(folder))


if __name__ == "__main__":
    main()
