"""Hugging Face Accelerate under `accelerate launch`: ddp, and FSDP2 as zero2 and zero3."""

from __future__ import annotations

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from workload import OPTIMIZER, Meter, Model, Tokens, arguments


def main() -> None:
    asked = arguments()
    meter = Meter(asked.out)
    plugin = None
    if asked.variant.startswith("fsdp2"):
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=asked.variant.endswith("zero3"),
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Block"],
        )
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=asked.accumulation, fsdp_plugin=plugin
    )
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **OPTIMIZER)
    loader = torch.utils.data.DataLoader(Tokens(), asked.micro_batch)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    steps = 0
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            meter.step()
            steps += 1
        if steps == asked.steps:
            break
    meter.finish(accelerator.process_index)
    accelerator.end_training()


if __name__ == "__main__":
    main()
