"""A training script of plain torch, DDP or `fully_shard` that the tests audit.

`python audited.py [FAULT]` or `torchrun … audited.py [FAULT [fully_shard]]`; it has one
fault or none, and knows nothing of colotrain.
"""

import contextlib
import copy
import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
SHARDED = sys.argv[2:] == ["fully_shard"]
ACCUMULATION = 4
STEPS = 3
WORLD = int(os.environ.get("WORLD_SIZE", 1))
BY_HAND = ("different-weights", "never-exchanged", "summed", "local-clip", "reentrant")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 32)
        self.second = nn.Linear(32, 32)
        self.drop = nn.Dropout(0.1)
        self.last = nn.Linear(32, 4)
        self.spare = nn.Linear(4, 4) if FAULT == "idle" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if FAULT == "reentrant":
            hidden = checkpoint(self.first, x, use_reentrant=True).relu()
        else:
            hidden = self.first(x).relu()
        return self.last(self.drop(self.second(hidden)).relu())


def main() -> None:
    torch.manual_seed(0)
    rank = 0
    if WORLD > 1:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
    model = Net()
    if FAULT == "different-weights":
        for parameter in model.parameters():
            parameter.data += 0.1 * rank
    if FAULT == "frozen-decays":
        model.first.requires_grad_(False)
    if FAULT != "same-dropout":
        torch.manual_seed(1 + rank)
    net = model
    other = copy.deepcopy(model)
    if SHARDED:
        fully_shard(model.second)
        fully_shard(model)
    elif WORLD > 1 and FAULT not in BY_HAND:
        find = FAULT == "idle"
        net = nn.parallel.DistributedDataParallel(model, find_unused_parameters=find)
    if FAULT == "frozen-decays":
        for parameter in model.first.parameters():
            parameter.grad = torch.zeros_like(parameter)
    parameters = list(model.parameters())
    if FAULT == "missing":
        parameters = parameters[2:]
    if FAULT == "twice":
        parameters = [*parameters, parameters[-1]]
    if FAULT == "other-model":
        parameters = list(other.parameters())
    decay = 0.1 if FAULT == "frozen-decays" else 0.0
    if FAULT == "adamw":
        optimizer = torch.optim.AdamW(parameters, lr=0.01)
    else:
        optimizer = torch.optim.SGD(parameters, lr=0.1, weight_decay=decay)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
    scaled = FAULT in ("clip-before-unscale", "scaler")
    scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=1024.0)
    draw = torch.Generator().manual_seed(100 + (0 if FAULT == "same-data" else rank))
    if FAULT == "schedule-first":
        scheduler.step()
    for step in range(STEPS):
        for micro_batch in range(ACCUMULATION):
            if FAULT == "zeroed-each":
                optimizer.zero_grad()
            x = torch.randn(6, 8, generator=draw)
            y = torch.randint(0, 4, (6,), generator=draw)
            if FAULT == "mean-of-means" and micro_batch == 1:
                y[:4] = -100
            last = micro_batch == ACCUMULATION - 1
            late = isinstance(net, nn.parallel.DistributedDataParallel) and not last
            with net.no_sync() if late else contextlib.nullcontext():
                loss = F.cross_entropy(net(x), y)
                if FAULT == "weighted":
                    loss = loss * 0.7
                if FAULT != "undivided":
                    loss = loss / ACCUMULATION
                if FAULT == "divided-twice":
                    loss = loss / ACCUMULATION
                if FAULT == "divided-by-ranks":
                    loss = loss / WORLD
                scaler.scale(loss).backward()
            if FAULT == "clip-each":
                nn.utils.clip_grad_norm_(parameters, 0.5)
            if FAULT == "schedule-each":
                scheduler.step()
            if FAULT == "step-each":
                optimizer.step()
                optimizer.zero_grad()
        if FAULT == "step-each":
            continue
        if FAULT == "local-clip":
            nn.utils.clip_grad_norm_(parameters, 0.01)
        if WORLD > 1 and not SHARDED and FAULT in ("summed", "local-clip", "reentrant"):
            for parameter in parameters:
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
                    if FAULT != "summed":
                        parameter.grad /= WORLD
        if FAULT == "scaler":
            scaler.unscale_(optimizer)
        if FAULT == "zeroed-before":
            optimizer.zero_grad()
        if FAULT not in ("clip-each", "clip-after", "local-clip"):
            nn.utils.clip_grad_norm_(parameters, 0.5)
        scaler.step(optimizer)
        scaler.update()
        if FAULT == "stepped-twice":
            optimizer.step()
        if FAULT == "clip-after":
            nn.utils.clip_grad_norm_(parameters, 0.5)
        if FAULT != "schedule-each":
            scheduler.step()
        if FAULT != "never-zeroed":
            optimizer.zero_grad()
        if FAULT == "rank-skips" and rank == 1 and step == STEPS - 2:
            break
    print('{"trained": true}')
    if WORLD > 1 and FAULT != "rank-skips":
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
