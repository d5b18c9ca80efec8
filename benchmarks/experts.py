"""Ranks that divide experts, ranks that all have them, and transformers' own division, in turns.

A Qwen3-MoE with random weights is trained by colotrain with `mesh.ep` 1 and as many as there are
ranks, and by transformers (`DistributedConfig(ep_size=…)`, tokens exchanged by gloo) with the same
sizes. All are alive at once, and one trains while the others are halted. Printed are ratios of step
times within a turn: medians with quartiles, and the memory of the rank that has the most.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory

from compare import PEERS, WARM_STEPS, Contestant, System, free_port
from experts_workload import SEQ_LEN, write_model
from processes import Running
from workload import LR, Cell


def command(system: System, cell: Cell, steps: int, out: Path, model: Path) -> list[str]:
    if system.name == "colotrain":
        return [
            *(sys.executable, "-m", "colotrain", "run", f"plugin={system.variant}", "name=bench"),
            *(f"model.hf={model}", "data.corpus=stdlib", "data.tokenizer=bytes", "--force"),
            *(f"data.seq_len={SEQ_LEN}", f"train.max_steps={steps}", "train.eval_steps=0"),
            *(f"train.global_batch={cell.global_batch}", f"train.micro_batch={cell.micro_batch}"),
            *(f"optim.lr={LR}", "optim.schedule.name=constant", "checkpoint.every=0"),
            "train.grad_clip=null",  # torch's does not take tensors of two meshes
            *(f"cluster.procs_per_node={cell.ranks}", *system.settings),
        ]
    return [
        *(f"{Path(sys.executable).parent / 'python'}", "-m", "torch.distributed.run"),
        *(f"--nproc-per-node={cell.ranks}", "--master-port", str(free_port())),
        *(str(PEERS / system.script), "--variant", system.variant, "--out", str(out)),
        *("--steps", str(steps), "--micro-batch", str(cell.micro_batch)),
    ]


def report(found: list[Contestant], base: Contestant) -> None:
    for each in found:
        ratios = [a / b for a, b in zip(each.turns_s, base.turns_s, strict=True)]
        low, _, high = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        plan = f", {each.of_plan:.3f} of the plan" if each.of_plan else ""
        print(
            f"{each.system.label}: step time {median(ratios):.2f} ({low:.2f} to {high:.2f}) of "
            f"{base.system.label}'s, {each.peak_bytes / 2**20:.0f} MiB{plan}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps of a turn")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--plugin", default="zero3")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # halted systems end with this
    cell = Cell(ranks=asked.ranks, micro_batch=asked.micro_batch, accumulation=1)
    systems = [
        System("colotrain", asked.plugin, 0, settings=(f"mesh.ep={asked.ranks}",)),
        System("colotrain", asked.plugin, 0, settings=("mesh.ep=1",)),
        System("transformers", "ep", 0, "with_experts.py"),
        System("transformers", "fsdp", 0, "with_experts.py"),
    ]
    with ExitStack() as stack:
        model = Path(stack.enter_context(TemporaryDirectory(prefix="experts-")))
        write_model(model)
        environment = {
            "PYTHONPATH": os.pathsep.join([str(PEERS), os.environ.get("PYTHONPATH", "")]),
            **{"OMP_NUM_THREADS": "1", "CI": "1", "EXPERTS_MODEL": str(model)},
        }
        found = []
        for system in systems:
            out = Path(stack.enter_context(TemporaryDirectory(prefix="bench-")))
            words = command(system, cell, WARM_STEPS + asked.turns * asked.steps + 1, out, model)
            running = Running(words, out, environment=environment)
            found.append(Contestant(system, cell, stack.enter_context(running), out))
            found[-1].go_on(WARM_STEPS)
            print(f"{system.label} trains", file=sys.stderr, flush=True)
        for turn in range(asked.turns):
            for each in found[:: 1 if turn % 2 == 0 else -1]:
                each.turns_s.append(each.go_on(asked.steps))
            print(f"turn {turn + 1}: {[f'{e.turns_s[-1]:.1f}' for e in found]}", file=sys.stderr)
        for each in found:
            each.weigh()
    print(f"{cell}; load {os.getloadavg()[1]:.0f} on {os.cpu_count()} cores")
    report(found, found[0])


if __name__ == "__main__":
    main()
