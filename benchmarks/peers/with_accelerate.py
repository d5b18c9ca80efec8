"""Hugging Face Accelerate on CPU, under torchrun: ddp."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from workload import OPTIMIZER, Meter, Model, Tokens, arguments


def main() -> None:
    asked = arguments()
    meter = Meter(asked.out)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=asked.accumulation)
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
