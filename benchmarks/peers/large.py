"""A billion parameters (recipe llm-1b) under the peers that offload; started by gemini.py --peers.

fully_shard with `CPUOffloadPolicy`, and DeepSpeed ZeRO-3 with its optimizer state offloaded to
the CPU or to files. Weights are made without a whole copy first, and blocks recomputed, as
colotrain does both.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import yaml
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from workload import OPTIMIZER, Meter, arguments, ranks

from colotrain.models.llm import LLM

SEQ_LEN = 128
RECIPE = Path(__file__).parents[2] / "recipes" / "llm-1b.yaml"


class Model(nn.Module):
    """The recipe's decoder with a forward that returns the mean loss, its blocks recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.args = yaml.safe_load(RECIPE.read_text())["model"]["args"]
        self.llm = LLM(**self.args)
        for block in self.llm.blocks:
            block.forward = Recomputed(block.forward)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        loss_sum, count = self.llm(input_ids, labels)
        return loss_sum / count


class Recomputed:
    def __init__(self, forward) -> None:  # type: ignore[no-untyped-def]
        self.forward = forward

    def __call__(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        return checkpoint(self.forward, *args, use_reentrant=False, **kwargs)


def batches(model: Model, rank: int) -> Iterator[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    while True:
        row = torch.randint(0, model.args["vocab_size"], (1, SEQ_LEN + 1), generator=generator)
        yield {"input_ids": row[:, :-1], "labels": row[:, 1:]}


def with_fully_shard(steps: int, rank: int, meter: Meter, *, offload: bool) -> None:
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    dist.init_process_group("gloo")
    with torch.device("meta"):
        model = Model()
    policy = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offload else {}
    for block in model.llm.blocks:
        fully_shard(block, **policy)
    fully_shard(model, **policy)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **OPTIMIZER)
    data = batches(model, rank)
    for _ in range(steps):
        model(**next(data)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        meter.step()
    meter.finish(rank)
    dist.destroy_process_group()


def with_deepspeed(steps: int, rank: int, meter: Meter, *, device: str) -> None:
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    with tempfile.TemporaryDirectory(dir=".") as folder:
        offload = {"device": device} | ({"nvme_path": folder} if device == "nvme" else {})
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": 3, "offload_optimizer": offload},
            "zero_force_ds_cpu_optimizer": False,
            "optimizer": {"type": "AdamW", "params": OPTIMIZER | {"torch_adam": True}},
            "steps_per_print": 10**9,
        }
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = Model()
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=config
        )
        data = batches(model, rank)
        for _ in range(steps):
            engine.backward(engine(**next(data)))
            engine.step()
            meter.step()
    meter.finish(rank)


def main() -> None:
    asked = arguments()
    meter, (rank, _) = Meter(asked.out), ranks()
    system, _, how = asked.variant.partition("-")
    if system == "fully_shard":
        with_fully_shard(asked.steps, rank, meter, offload=how == "offload")
    else:
        with_deepspeed(asked.steps, rank, meter, device=how)


if __name__ == "__main__":
    main()
