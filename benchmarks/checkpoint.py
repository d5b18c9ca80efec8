"""What a save costs training: asynchronous against blocking, in turns, within one process group.

Rounds of a few steps each: without a save, with an asynchronous one at their beginning, with a
blocking one, and with torch's own blocking save of the same tensors to synced files, without
checksums. The stall of a save is what its round took more than the one without.
`python benchmarks/checkpoint.py [KEY=VALUE …]` trains llm-125m on two CPU ranks; the shorter the
steps (`data.seq_len=16`), the more has to be copied before the next update.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

STEPS = 2
"""Of a round: longer than a save takes in the background."""
ROUNDS = 8
MODES = ("none", "async", "blocking", "torch")
OVERRIDES = (
    "recipe=llm-125m",
    "data.tokenizer=bytes",
    "data.seq_len=128",
    "train.global_batch=2",
    "train.micro_batch=1",
    "train.eval_steps=1",
    "cluster.procs_per_node=2",
    f"checkpoint.every={STEPS}",
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
        steps = f"train.max_steps={len(MODES) * (ROUNDS + 1) * STEPS + STEPS}"
        target = "train.on_gradients=benchmarks.checkpoint:take_turns"
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
    step_s = median(times["none"] for times in rounds) / STEPS
    print(f"{measured['bytes'] / 2**20:.0f} MiB of state per rank, {step_s:.2f} s a step")
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
            f"{within:.2f} s of it standing still"
        )
    for mode in ("blocking", "torch"):
        print(f"async / {mode}: {median(stalls['async']) / median(stalls[mode]):.1%} by rounds")


class Turns:
    """Takes the place of `Saver.begin`: each save as its turn says, when the real one would be."""

    def __init__(self, begin) -> None:  # type: ignore[no-untyped-def]
        self.begin_saving = begin
        self.calls = 0
        self.began = 0.0
        self.rounds: list[dict[str, float]] = []
        self.within: dict[str, list[float]] = {mode: [] for mode in MODES[1:]}

    def begin(self, saver, state, *, background: bool) -> None:  # type: ignore[no-untyped-def]
        import torch.distributed as dist

        index, self.calls = self.calls, self.calls + 1
        last = saver.current
        saver.wait()
        dist.barrier()
        if index > len(MODES):  # the first round warms up
            before = MODES[(index - 1) % len(MODES)]
            if before == "none":
                self.rounds.append({})
            self.rounds[-1][before] = time.perf_counter() - self.began
            if before == "async":
                self.within[before].append(last.stall_s)
        self._write(sum(piece.local.nbytes for piece in state.pieces))
        shutil.rmtree("torch", ignore_errors=True)
        dist.barrier()
        self.began = time.perf_counter()
        mode = MODES[index % len(MODES)]
        if mode == "torch":
            self._as_torch_does(state.pieces)
        elif mode != "none":
            self.begin_saving(saver, state, background=mode == "async")
        if index >= len(MODES) and mode in ("blocking", "torch"):
            self.within[mode].append(time.perf_counter() - self.began)

    def _as_torch_does(self, pieces) -> None:  # type: ignore[no-untyped-def]
        """Of each rank alone, as colotrain writes them."""
        import torch.distributed as dist
        import torch.distributed.checkpoint as dcp

        state = {f"{dist.get_rank()}/{piece.part.name}": piece.local for piece in pieces}
        dcp.save(state, storage_writer=dcp.FileSystemWriter("torch", sync_files=True))

    def _write(self, num_bytes: int) -> None:
        import torch.distributed as dist

        full = [times for times in self.rounds if len(times) == len(MODES)]
        if dist.get_rank() == 0 and full:
            document = {"rounds": full, "within": self.within, "bytes": num_bytes}
            Path("measured.json").write_text(json.dumps(document))


def take_turns(model, step: int) -> None:  # type: ignore[no-untyped-def]
    """Called in every step; the first puts `Turns` in place."""
    from colotrain.engine.state.saving import Saver

    if not getattr(Saver.begin, "takes_turns", False):
        turns = Turns(Saver.begin)

        def begin(saver, state, *, background: bool = True) -> None:  # type: ignore[no-untyped-def]
            turns.begin(saver, state, background=background)

        begin.takes_turns = True  # type: ignore[attr-defined]
        Saver.begin = begin  # type: ignore[method-assign]


if __name__ == "__main__":
    main(sys.argv[1:])
