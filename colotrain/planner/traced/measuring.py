"""A rank that measures this machine: it times real steps of small models, with all ranks at once.

Wall time is measured, because ranks wait for one another and share cores. Other load on the machine
must not count, so each model's median step is taken from the fastest of several rounds.

Run `python -m colotrain.planner.traced.measuring FILE RANK` once per rank; FILE holds a `Task`.
Rank 0 prints its progress as `NUMBER of NUMBER`, and at the end a `Measurement` as JSON.
"""

from __future__ import annotations

import datetime
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from colotrain import module_tree
from colotrain.engine.allocator import configure_malloc_for_build, configure_malloc_for_steps
from colotrain.engine.build.transforms import Build, transform_
from colotrain.engine.comms.groups import Groups
from colotrain.engine.comms.process import loopback_store
from colotrain.engine.gradients import gradients
from colotrain.engine.gradients.accumulation import StepTotals, accumulate
from colotrain.engine.model.precision import dtype_of
from colotrain.engine.model.probes import matmul_peak_flops
from colotrain.engine.optim.shard_optimizer import ShardOptimizer
from colotrain.models.loading import build
from colotrain.planner.hardware import Costs
from colotrain.planner.rates import Measurement
from colotrain.records import from_plain, to_plain
from colotrain.rundir import RunDir
from colotrain.spec.plan import RunPlan

TIMEOUT_S = 120.0
ROUNDS, CASE_S = 4, 0.3
"""Number of rounds, and seconds of a case in each: a short load from elsewhere spoils one round."""
GUESS_WEIGHT, LEAST = 0.03, 0.01
"""Weight of the typical costs in the fit, and the least fitted cost as a share of the typical."""
AFTER = ("element_s", "step_s")
"""Costs of the part of a step after the last backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    plan: RunPlan
    amounts: dict[str, float]
    """Amounts of work in a step, from `planner.time.amounts_of`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    port: int
    ranks: int
    threads: int
    precision: str
    cases: tuple[Case, ...]
    guess: dict[str, float]


def measure(task: Task, tell: Callable[[int, int], None]) -> Measurement:
    """Measure a rank's costs while all ranks work. All must call, and get the same result."""
    total = ROUNDS + 1
    tell(0, total)
    peak = matmul_peak_flops(torch.device("cpu"), dtype_of(task.precision))
    alone = {"replicated_byte_s": _all_reduce_s(4 << 20, task.ranks)} if task.ranks > 1 else {}
    tell(1, total)
    configure_malloc_for_build()
    timed = [Timed(case.plan) for case in task.cases]
    configure_malloc_for_steps()
    for index in range(ROUNDS):
        for model in timed:
            model.run(CASE_S)
        tell(index + 2, total)
    typical = torch.tensor([(t.computing_s, t.ending_s) for t in timed], dtype=torch.float64)
    dist.all_reduce(typical, dist.ReduceOp.MAX)
    steps, ends = typical.t().tolist()
    measured = [dict(case.amounts) for case in task.cases]
    inside = [{n: a for n, a in amounts.items() if n not in AFTER} for amounts in measured]
    after = [{n: amounts[n] for n in AFTER} for amounts in measured]
    costs = task.guess | fit(inside, steps, task.guess) | fit(after, ends, task.guess) | alone
    peak = max(peak, 1 / costs["flop_s"])
    both = zip(measured, steps, ends, strict=True)
    errors = [
        sum(a * costs[n] for n, a in amounts.items()) / (step + end) - 1
        for amounts, step, end in both
    ]
    shared = torch.tensor([*costs.values(), peak, *errors], dtype=torch.float64)
    dist.broadcast(shared, 0)
    values = shared.tolist()
    return Measurement(
        costs=Costs(**dict(zip(costs, values, strict=False))),
        peak_flops=values[len(costs)],
        errors=tuple(values[len(costs) + 1 :]),
    )


def fit(
    amounts: Sequence[dict[str, float]],
    seconds: Sequence[float],
    guess: dict[str, float],
) -> dict[str, float]:
    """Fit costs to the amounts of work and the seconds of each case, by least squares.

    Errors are relative to a case's time. `guess`, the typical costs, decides where the cases do not
    determine a cost. No cost is below a hundredth of the guess.
    """
    names = [n for n in amounts[0] if any(a[n] for a in amounts) and guess[n] > 0]
    rows, sides = [], []
    for case, took in zip(amounts, seconds, strict=True):
        rows.append([case[n] * guess[n] / took for n in names])
        sides.append(1.0)
    for index in range(len(names)):
        rows.append([GUESS_WEIGHT * (index == other) for other in range(len(names))])
        sides.append(GUESS_WEIGHT)
    matrix = torch.tensor(rows, dtype=torch.float64)
    side = torch.tensor(sides, dtype=torch.float64)
    held: dict[int, float] = {}
    while True:  # fix costs that are below the least, and solve again for the others
        free = [i for i in range(len(names)) if i not in held]
        rest = side - sum((matrix[:, i] * value for i, value in held.items()), torch.zeros(()))
        found = torch.linalg.lstsq(matrix[:, free], rest.unsqueeze(1)).solution[:, 0].tolist()
        low = [i for i, value in zip(free, found, strict=True) if value < LEAST]
        if not low:
            shares = held | dict(zip(free, found, strict=True))
            return {name: guess[name] * shares[i] for i, name in enumerate(names)}
        held |= dict.fromkeys(low, LEAST)


class Timed:
    """A small sharded model, and its median step in the fastest round so far."""

    def __init__(self, plan: RunPlan) -> None:
        model = build(plan.model, seed=0)
        shape = (plan.batch.micro_batch, plan.data.seq_len)
        tokens = torch.randint(0, int(plan.model.args["vocab_size"]), shape)
        self.batch = {"input_ids": tokens, "labels": tokens}
        building = Build(
            plan=plan,
            rundir=RunDir("."),
            comms=Groups(plan.ranks, "cpu"),
            model=model,
            trial=self.batch,
            tell=lambda text: None,
        )
        transform_(building)
        self.sharded = building.sharded
        sharded = self.sharded
        self.optimizer = ShardOptimizer(
            plan.optim, max_steps=1_000_000, parts=sharded.parts, comms=sharded.comms
        )
        self.optimizer.add(dict(module_tree.named_parameters(model)))
        self.state = gradients.watch(self.sharded)
        self.computing_s = self.ending_s = float("inf")

    def run(self, seconds: float) -> None:
        """Run steps for about `seconds`, at least two. All ranks must call."""
        begun, over = time.perf_counter(), False
        parts: list[tuple[float, float]] = []
        while not over:
            ready = len(parts) > 0 and time.perf_counter() - begun > seconds
            computing_s, ending_s, over = self._step(ready)
            parts.append((computing_s, ending_s))
        computing_s, ending_s = (median(part) for part in zip(*parts, strict=True))
        if computing_s + ending_s < self.computing_s + self.ending_s:
            self.computing_s, self.ending_s = computing_s, ending_s

    def _step(self, ready: bool) -> tuple[float, float, bool]:
        """Run a training step; returns seconds of both parts, and whether any rank is ready."""
        started = time.perf_counter()
        gradients.clear_(self.sharded.module)
        nominal = float(self.batch["labels"].numel())
        accumulate(self.state, [self.batch], num=1, totals=StepTotals(nominal=nominal))
        computed = time.perf_counter()
        statistics = gradients.local_statistics(self.state, torch.device("cpu"))
        shared = torch.cat((torch.tensor([float(ready)], dtype=torch.float64), *statistics))
        dist.all_reduce(shared)
        gradients.store_statistics_(self.state, shared[1:], factor=1.0)
        self.optimizer.step(factor=1.0)
        ended = time.perf_counter()
        return computed - started, ended - computed, shared[0].item() > 0


def _all_reduce_s(num_bytes: int, ranks: int) -> float:
    """Seconds of an all-reduce over the process group per byte that a ring sends."""
    tensor = torch.zeros(num_bytes // 4)
    took = []
    for _ in range(6):
        started = time.perf_counter()
        dist.all_reduce(tensor)
        took.append(time.perf_counter() - started)
    return min(took) / (2 * (ranks - 1) / ranks * num_bytes)


def main(words: list[str]) -> int:
    task, rank = from_plain(Task, json.loads(Path(words[0]).read_text("utf-8"))), int(words[1])
    gc.freeze()  # as workers do
    torch.set_num_threads(task.threads)
    torch.manual_seed(rank)
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    store = loopback_store(task.port, is_master=rank == 0, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=task.ranks, timeout=timeout)
    out = sys.stdout if rank == 0 else None

    def tell(done: int, of: int) -> None:
        if out is not None:
            print(f"{done} of {of}", file=out, flush=True)

    found = measure(task, tell)
    if out is not None:
        print(json.dumps(to_plain(found)), file=out, flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
