"""What a save costs training: asynchronous against blocking, in turns, within one process group.

Rounds of a few steps each: without a save, with an asynchronous one at their beginning, with a
blocking one, and with torch's own blocking save of the same tensors to synced files, without
checksums. The stall of a save is what its round took more than the one without.
`python benchmarks/checkpoint.py [KEY=VALUE …]` trains llm-125m on two CPU ranks.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

STEPS = 6
"""Of a round: longer than a save takes in the background."""
ROUNDS = 3
MODES = ("none", "async", "blocking", "torch")
OVERRIDES = (
    "recipe=llm-125m",
    "data.tokenizer=bytes",
    "data.seq_len=16",
    "train.global_batch=2",
    "train.micro_batch=1",
    "train.eval_steps=1",
    "cluster.procs_per_node=2",
    "checkpoint.keep=1",
    "elastic.check_every=0",
    "observe.grads_every=0",
    "plugin=zero2",
    "name=save",
)


def main(overrides: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "colotrain", "run", *OVERRIDES, *overrides]
        environment = dict(os.environ)
        steps = f"train.max_steps={len(MODES) * (ROUNDS + 1) * STEPS + 1}"
        target = "train.on_gradients=benchmarks.checkpoint:in_turns"
        here = str(Path(__file__).parents[1])
        environment["PYTHONPATH"] = f"{here}{os.pathsep}{environment.get('PYTHONPATH', '')}"
        done = subprocess.run(
            [*command, steps, target], cwd=folder, env=environment, capture_output=True, text=True
        )
        report = Path(folder) / "measured.json"
        if not report.exists():
            sys.exit(done.stderr)
        show(json.loads(report.read_text()))


def show(measured: dict) -> None:
    rounds = measured["rounds"]
    print(f"{measured['bytes'] / 2**20:.0f} MiB of state per rank")
    stalls: dict[str, list[float]] = {mode: [] for mode in MODES[1:]}
    for number, times in enumerate(rounds):
        for mode, found in stalls.items():
            found.append(times[mode] - times["none"])
        words = ", ".join(f"{mode} {seconds:.2f} s" for mode, seconds in times.items())
        print(f"round {number + 1} of {STEPS} steps: {words}")
    for mode, found in stalls.items():
        within = median(measured["within"][mode])
        print(
            f"{mode:>9}: training lost {median(found):.2f} s a save by the clock of a round, "
            f"{within:.2f} s inside the call"
        )
    for mode in ("blocking", "torch"):
        print(f"async / {mode}: {median(stalls['async']) / median(stalls[mode]):.1%} by rounds")


class InTurns:
    """Called in every step by each rank; saves at the beginning of a round as its mode says."""

    def __init__(self) -> None:
        self.calls = 0
        self.began = 0.0
        self.rounds: list[dict[str, float]] = []
        self.within: dict[str, list[float]] = {mode: [] for mode in MODES[1:]}
        self.saver = None

    def __call__(self, model, step: int) -> None:  # type: ignore[no-untyped-def]
        import gc

        from colotrain.engine.loop import Run

        if self.calls % STEPS == 0:
            run = next(found for found in gc.get_objects() if isinstance(found, Run))
            self._turn(run, self.calls // STEPS)
        self.calls += 1

    def _turn(self, run, index: int) -> None:  # type: ignore[no-untyped-def]
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp

        from colotrain.engine import checkpoint

        if index:
            run.saver.wait()
            dist.barrier()
            before = MODES[(index - 1) % len(MODES)]
            if index > len(MODES):  # the first round warms up
                if before == "none":
                    self.rounds.append({})
                self.rounds[-1][before] = time.perf_counter() - self.began
            self._write(run)
        shutil.rmtree("torch", ignore_errors=True)
        dist.barrier()
        self.began = time.perf_counter()
        mode = MODES[index % len(MODES)]
        if mode == "none":
            return
        if mode == "torch":
            # of each rank alone, as colotrain writes them
            state = {f"{run.rank}/{p.name}": p.local for p in checkpoint.pieces(run)}
            dcp.save(state, storage_writer=dcp.FileSystemWriter("torch", sync_files=True))
            self._note(mode, index)
            return
        plan = dataclasses.replace(
            run.plan, checkpoint=dataclasses.replace(run.plan.checkpoint, async_=mode == "async")
        )
        run.saver.plan = plan
        run.saver.begin(checkpoint.pieces(run), checkpoint.manifest_of(run))
        self._note(mode, index)

    def _note(self, mode: str, index: int) -> None:
        if index >= len(MODES):
            self.within[mode].append(time.perf_counter() - self.began)

    def _write(self, run) -> None:  # type: ignore[no-untyped-def]
        full = [times for times in self.rounds if len(times) == len(MODES)]
        if run.rank == 0 and full:
            num_bytes = run.saver.image.nbytes
            document = {"rounds": full, "within": self.within, "bytes": num_bytes}
            Path("measured.json").write_text(json.dumps(document))


in_turns = InTurns()

if __name__ == "__main__":
    main(sys.argv[1:])
