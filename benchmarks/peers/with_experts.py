"""transformers' own expert parallelism under torchrun: all-to-all, `fully_shard` for all else.

Variants: `ep`, in which all ranks divide the experts, and `fsdp`, in which each computes all of
them. The model's directory is $EXPERTS_MODEL.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from experts_workload import SEQ_LEN, VOCABULARY
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from workload import OPTIMIZER, Meter, arguments, ranks


def main() -> None:
    asked = arguments()
    meter = Meter(asked.out)
    rank, world_size = ranks()
    dist.init_process_group("gloo")
    config = DistributedConfig(
        fsdp_size=world_size, ep_size=world_size if asked.variant == "ep" else 1
    )
    model = AutoModelForCausalLM.from_pretrained(
        os.environ["EXPERTS_MODEL"], dtype=torch.float32, distributed_config=config
    )
    model.train()
    # fused AdamW takes no tensors of two meshes at once
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False, **OPTIMIZER)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(asked.steps):
        for _ in range(asked.accumulation):
            shape = (asked.micro_batch, SEQ_LEN)
            tokens = torch.randint(0, VOCABULARY, shape, generator=generator)
            loss = model(input_ids=tokens, labels=tokens).loss
            (loss / asked.accumulation).backward()
        optimizer.step()
        optimizer.zero_grad()
        meter.step()
    meter.finish(rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
