"""torch's own pipeline: `torch.distributed.pipelining` (1F1B) over stages under `fully_shard`."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from workload import OPTIMIZER, Meter, Model, arguments, batches, ranks

from colotrain.models.llm import rotary_tables


class Part(nn.Module):
    """One stage's blocks, with the embedding before the first and the loss after the last."""

    def __init__(self, index: int, count: int) -> None:
        super().__init__()
        whole, each = Model().llm, len(Model().llm.blocks) // count
        self.embed = whole.embed if index == 0 else None
        self.blocks = whole.blocks[index * each : (index + 1) * each]
        self.norm, self.head = (whole.norm, whole.head) if index == count - 1 else (None, None)
        self.head_dim, self.rope_theta = whole.head_dim, whole.rope_theta

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        positions = torch.arange(x.shape[1])
        if self.embed is not None:
            x = self.embed(x)
        rope = rotary_tables(positions, self.head_dim, self.rope_theta, x)
        for block in self.blocks:
            x = block(x, *rope)
        if self.head is None:
            return x
        return self.head(self.norm(x), labels).reshape(1)


def clip_(parameters: list[Tensor], group: dist.ProcessGroup) -> None:
    """Clip by the norm over all stages to 1."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    squared = norm**2
    dist.all_reduce(squared, group=group)
    torch.nn.utils.clip_grads_with_norm_(parameters, 1.0, squared**0.5)


def main() -> None:
    asked = arguments()
    meter = Meter(asked.out)
    rank, world_size = ranks()
    dist.init_process_group("gloo")
    copies, num = world_size // asked.pp, asked.accumulation
    mesh = init_device_mesh("cpu", (asked.pp, copies), mesh_dim_names=("pp", "dp"))
    index, group = rank // copies, mesh.get_group("pp")
    part = Part(index, asked.pp)
    if copies > 1:
        for block in part.blocks:
            fully_shard(block, mesh=mesh["dp"], reshard_after_forward=False)
        fully_shard(part, mesh=mesh["dp"], reshard_after_forward=False)
    stage = PipelineStage(part, index, asked.pp, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, num, loss_fn=lambda loss, target: loss.sum() / target.numel())
    parameters = list(part.parameters())
    optimizer = torch.optim.AdamW(parameters, fused=True, **OPTIMIZER)
    data = batches(asked.micro_batch, rank=rank % copies, world_size=copies)
    for _ in range(asked.steps):
        own = [next(data) for _ in range(num)]
        whole = {name: torch.cat([batch[name] for batch in own]) for name in own[0]}
        inputs = (whole["input_ids"],) if index == 0 else ()
        if index == asked.pp - 1:
            labels = whole["labels"]
            schedule.step(*inputs, target=labels, labels=labels, return_outputs=False)
        else:
            schedule.step(*inputs, return_outputs=False)
        clip_(parameters, group)
        optimizer.step()
        optimizer.zero_grad()
        meter.step()
    meter.finish(rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
