"""Plain torch under torchrun: ddp, with ZeroRedundancyOptimizer, and fully_shard."""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from workload import OPTIMIZER, Meter, Model, arguments, batches, ranks


def main() -> None:
    asked = arguments()
    meter = Meter(asked.out)
    rank, world_size = ranks()
    dist.init_process_group("gloo")
    model = Model()
    sharded = asked.variant.startswith("fully_shard")
    if sharded:
        keep = asked.variant.endswith("zero2")
        for block in model.llm.blocks:
            fully_shard(block, reshard_after_forward=not keep)
        fully_shard(model, reshard_after_forward=not keep)
    else:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if asked.variant == "ddp+zero":
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.AdamW, fused=True, **OPTIMIZER
        )
    else:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True, **OPTIMIZER)
    data = batches(asked.micro_batch, rank=rank, world_size=world_size)
    for _ in range(asked.steps):
        for index in range(asked.accumulation):
            last = index == asked.accumulation - 1
            if sharded:
                model.set_requires_gradient_sync(last)
            with nullcontext() if last or sharded else model.no_sync():
                (model(**next(data)) / asked.accumulation).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        meter.step()
    meter.finish(rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
