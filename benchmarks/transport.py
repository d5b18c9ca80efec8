"""What shared memory between ranks brings: all-gathers, and whole training steps.

    python benchmarks/transport.py gathers --ranks 2 4
    python benchmarks/transport.py steps --micro-batch 1 4

All variants run in turns in the same processes; what is printed are medians, and ratios of medians.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from colotrain.engine.comms.all_gather import Channel
from colotrain.engine.comms.groups import Groups
from colotrain.engine.gradients import gradients
from colotrain.engine.gradients.accumulation import StepTotals, accumulate
from colotrain.engine.optim.shard_optimizer import ShardOptimizer
from colotrain.engine.sharding.grouping import find_groups
from colotrain.engine.sharding.sharded_model import materialise_, shard_
from colotrain.engine.sharding.transport import SharedAllGather, install
from colotrain.models.loading import build
from colotrain.runs.resolving import plan_from
from colotrain.spec.plan import RunPlan

CPU = torch.device("cpu")
SIZES_MIB = (1, 16, 64)
Action = Callable[[], None]


def connect(rank: int, num_ranks: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def take_turns(actions: dict[str, Action], rounds: int) -> dict[str, list[float]]:
    """Seconds of each action in each round, measured from a barrier before to one after it."""
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for turn in range(rounds + 1):
        for name, action in actions.items():
            dist.barrier()
            started = time.perf_counter()
            action()
            dist.barrier()
            if turn:  # the first is a warm-up
                seconds[name].append(time.perf_counter() - started)
    return seconds


def show(title: str, seconds: dict[str, list[float]], base: str) -> None:
    """Median, the quartiles in percent of it, and the median of the ratios within each round."""
    for name, values in seconds.items():
        median = statistics.median(values)
        low, _, high = (100 * quartile / median for quartile in statistics.quantiles(values, n=4))
        ratio = statistics.median(b / v for b, v in zip(seconds[base], values, strict=True))
        spread = f"{low:4.0f} to {high:3.0f} %"
        print(f"{title:20} {name:22} {1e3 * median:8.2f} ms  {spread}  {ratio:6.2f} × {base}")


def gathers(rank: int, port: int, num_ranks: int, rounds: int) -> None:
    """All-gathers with the copies that `fully_shard` makes into their buffers."""
    connect(rank, num_ranks, port)
    largest = max(SIZES_MIB) << 20
    channel = Channel(dist.distributed_c10d._get_default_group(), buffer_bytes=largest)
    for mib in SIZES_MIB:
        actions = gather_actions(channel, (mib << 18) // num_ranks * num_ranks)
        seconds = take_turns(actions, rounds)
        if rank == 0:
            show(f"{num_ranks} ranks, {mib} MiB", seconds, "gloo")
    dist.destroy_process_group()


def gather_actions(channel: Channel, numel: int) -> dict[str, Action]:
    shard, comm = torch.randn(numel // channel.size), SharedAllGather(channel)

    def filled(output: Tensor) -> tuple[Tensor, Tensor]:
        part = output.chunk(channel.size)[channel.rank]
        return output, part.copy_(shard)

    def shared() -> None:
        comm(*filled(comm.allocate((numel,), dtype=shard.dtype, device=CPU)), channel.group)

    return {
        "gloo": lambda: dist.all_gather_single(*filled(torch.empty(numel))),
        "shared": shared,
        "window": lambda: channel.all_gather(*filled(torch.empty(numel))),
    }


def plan_of(plugin: str, num_ranks: int, micro_batch: int) -> RunPlan:
    return plan_from(
        [
            "recipe=llm-25m",
            f"plugin={plugin}",
            f"cluster.procs_per_node={num_ranks}",
            f"train.micro_batch={micro_batch}",
            f"train.global_batch={num_ranks * micro_batch}",
        ]
    )


def batches_of(plan: RunPlan) -> Iterator[dict[str, Tensor]]:
    shape = (plan.batch.micro_batch, plan.data.seq_len)
    while True:
        tokens = torch.randint(0, 256, shape)
        yield {"input_ids": tokens, "labels": tokens}


def engine_step(plan: RunPlan, *, shared: bool) -> Action:
    """A step as `engine.step` makes it, without data, events and checkpoints."""
    model = build(plan.model, seed=0)
    batches = batches_of(plan)
    groups = find_groups(model, chunk_bytes=plan.plugin.chunk_bytes, batch=next(batches))
    sharded = shard_(model, plan, Groups(plan.ranks, "cpu"), groups)
    transport = install(sharded) if shared else None
    materialise_(sharded, device="cpu", seed=0)
    optimizer = ShardOptimizer(plan.optim, max_steps=1000)
    optimizer.add(dict(model.named_parameters()))
    state = gradients.watch(sharded)

    def step(_: Any = transport) -> None:
        gradients.clear_(model)
        totals = StepTotals(nominal=float(plan.batch.tokens_per_step))
        accumulate(state, [next(batches)], num=1, totals=totals)
        statistics = torch.cat(
            (torch.zeros(4, dtype=torch.float64), gradients.local_statistics(state))
        )
        dist.all_reduce(statistics)
        gradients.store_statistics_(state, statistics[4:], factor=1.0)
        optimizer.step(factor=1.0)

    return step


def ddp_step(plan: RunPlan) -> Action:
    model = build(plan.model, seed=0)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.optim.lr, fused=True)
    batches = batches_of(plan)

    def step() -> None:
        optimizer.zero_grad()
        loss, count = model(**next(batches))
        (loss / count).backward()
        optimizer.step()

    return step


def steps(rank: int, port: int, num_ranks: int, plans: dict[str, RunPlan], rounds: int) -> None:
    connect(rank, num_ranks, port)
    actions = {"ddp": ddp_step(next(iter(plans.values())))}
    for plugin, plan in plans.items():
        actions[f"{plugin} gloo"] = engine_step(plan, shared=False)
        actions[f"{plugin} shared"] = engine_step(plan, shared=True)
    seconds = take_turns(actions, rounds)
    if rank == 0:
        micro_batch = next(iter(plans.values())).batch.micro_batch
        show(f"{num_ranks} ranks, micro {micro_batch}", seconds, "ddp")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("gathers", "steps"))
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--micro-batch", type=int, nargs="+", default=[1])
    parser.add_argument("--plugins", nargs="+", default=["zero1", "zero2", "zero3"])
    parser.add_argument("--rounds", type=int, default=11)
    asked = parser.parse_args()
    for num_ranks in asked.ranks:
        if asked.what == "gathers":
            run = (free_port(), num_ranks, asked.rounds)
            mp.spawn(gathers, run, nprocs=num_ranks)
            continue
        for micro_batch in asked.micro_batch:
            plans = {name: plan_of(name, num_ranks, micro_batch) for name in asked.plugins}
            mp.spawn(steps, (free_port(), num_ranks, plans, asked.rounds), nprocs=num_ranks)


if __name__ == "__main__":
    main()
