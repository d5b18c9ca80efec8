"""Lightning's Trainer: ddp, and `fully_shard` through ModelParallelStrategy as zero2 and zero3."""

from __future__ import annotations

import os
from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from workload import OPTIMIZER, Meter, Model, Tokens, arguments


class Module(lightning.LightningModule):
    def __init__(self, variant: str) -> None:
        super().__init__()
        self.variant, self.model = variant, Model()

    def configure_model(self) -> None:
        if not self.variant.startswith("fsdp2"):
            return
        mesh, reshard = self.device_mesh["data_parallel"], self.variant.endswith("zero3")
        for block in self.model.llm.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(self.model, mesh=mesh, reshard_after_forward=reshard)

    def training_step(self, batch: dict[str, Any]) -> torch.Tensor:
        return self.model(**batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), fused=True, **OPTIMIZER)


class Timed(lightning.Callback):
    def __init__(self, meter: Meter, accumulation: int) -> None:
        self.meter, self.accumulation = meter, accumulation

    def on_train_batch_end(self, *_: Any) -> None:
        batch_index = _[-1]
        if (batch_index + 1) % self.accumulation == 0:
            self.meter.step()


def main() -> None:
    asked = arguments()
    meter = Meter(asked.out)
    ranks = int(os.environ["PEER_RANKS"])
    fsdp = asked.variant.startswith("fsdp2")
    # by default it would split tensors over the ranks, not data
    sharded = ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=sharded if fsdp else "ddp",
        max_steps=asked.steps,
        accumulate_grad_batches=asked.accumulation,
        gradient_clip_val=1.0,
        callbacks=[Timed(meter, asked.accumulation)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=asked.out,
    )
    trainer.fit(Module(asked.variant), torch.utils.data.DataLoader(Tokens(), asked.micro_batch))
    meter.finish(trainer.global_rank)


if __name__ == "__main__":
    main()
