"""torch's own tensor parallelism: parallelize_module, with fully_shard over the other ranks.

Variants: `tp`, and `tp+sp`, where norms and residuals are divided by tokens, too.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from workload import OPTIMIZER, Meter, Model, arguments, batches, ranks


def divide_(model: Model, mesh: dist.DeviceMesh, *, by_tokens: bool) -> None:
    """Divide matrices, vocabulary and loss among the ranks of `mesh`."""
    stream = Shard(1) if by_tokens else Replicate()
    norm = {"norm": SequenceParallel()} if by_tokens else {}
    parallelize_module(
        model.llm,
        mesh,
        {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=stream),
            **norm,
            "head": ColwiseParallel(
                input_layouts=stream, output_layouts=Shard(-1), use_local_output=False
            ),
        },
    )
    columns, rows = ColwiseParallel(), RowwiseParallel(output_layouts=stream)
    plan = {
        **{f"attention.{name}": columns for name in ("query", "key", "value")},
        **{"attention.output": rows, "mlp.gate": columns, "mlp.up": columns, "mlp.down": rows},
    }
    if by_tokens:
        inputs = (Shard(1), None, None, None), (Replicate(), None, None, None)
        plan |= {
            **{"attention_norm": SequenceParallel(), "mlp_norm": SequenceParallel()},
            "attention": PrepareModuleInput(
                input_layouts=inputs[0], desired_input_layouts=inputs[1]
            ),
            "mlp": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            ),
        }
    for block in model.llm.blocks:
        parallelize_module(block, mesh, plan)
    if not by_tokens:  # the optimizer takes no tensors beside DTensors
        for module in model.modules():
            if isinstance(module, nn.RMSNorm):
                replicate_(module, mesh)


def replicate_(module: nn.Module, mesh: dist.DeviceMesh) -> None:
    """Make DTensors of a module's parameters that all ranks hold whole."""
    distribute_module(
        module,
        mesh,
        input_fn=lambda _, x, on: (DTensor.from_local(x[0], on, (Replicate(),)),),
        output_fn=lambda _, y, on: y.to_local(),
    )


def mean_loss(model: Model, input_ids: Tensor, labels: Tensor) -> Tensor:
    logits = model.llm(input_ids)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def main() -> None:
    asked = arguments()
    meter = Meter(asked.out)
    rank, world_size = ranks()
    dist.init_process_group("gloo")
    copies = world_size // asked.tp
    mesh = init_device_mesh("cpu", (copies, asked.tp), mesh_dim_names=("dp", "tp"))
    model = Model()
    divide_(model, mesh["tp"], by_tokens=asked.variant.endswith("+sp"))
    if copies > 1:
        for block in model.llm.blocks:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model.llm, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **OPTIMIZER)
    data = batches(asked.micro_batch, rank=rank // asked.tp, world_size=copies)
    for _ in range(asked.steps):
        for _ in range(asked.accumulation):
            with loss_parallel():
                (mean_loss(model, **next(data)) / asked.accumulation).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        meter.step()
    meter.finish(rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
