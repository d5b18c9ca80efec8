"""One small training by the framework that the first argument names, for the tests to audit.

`python audited_peers.py KIND ACCUMULATION [FAULT]`; it knows nothing of colotrain.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

KIND, ACCUMULATION = sys.argv[1], int(sys.argv[2])
FAULT = sys.argv[3] if len(sys.argv) > 3 else ""
STEPS = 3


class Net(nn.Module):
    """53 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(25))
        self.head = nn.Linear(16, 4)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + 0.2 * torch.tanh(layer(x))
        return self.head(x * self.scale)


class Samples(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        draw = torch.Generator().manual_seed(index)
        return torch.randn(16, generator=draw), torch.randint(0, 4, (1,), generator=draw)[0]


def own_part() -> DataLoader:
    """This rank's samples."""
    return DataLoader(Samples(), 4, sampler=list(range(dist.get_rank(), 64, dist.get_world_size())))


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1)


def accelerate() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATION)
    net = Net()
    net, optimizer, loader = accelerator.prepare(net, sgd(net), DataLoader(Samples(), 4))
    for x, y in loader:
        with accelerator.accumulate(net):
            loss = F.cross_entropy(net(x), y)
            if FAULT == "divided-twice":
                loss = loss / ACCUMULATION
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def lightning() -> None:
    import lightning as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            return loss / ACCUMULATION if FAULT == "divided-twice" else loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self)

    world = 2 if KIND == "lightning-ddp" else 1
    strategy: object = "ddp" if KIND == "lightning-ddp" else "auto"
    if KIND == "lightning-deepspeed":
        from lightning.pytorch.accelerators import CPUAccelerator
        from lightning.pytorch.strategies import DeepSpeedStrategy
        from lightning.pytorch.strategies import deepspeed as module

        module.CUDAAccelerator = CPUAccelerator  # it refuses CPUs
        module._validate_device_index_selection = lambda devices: None

        class OnCpu(DeepSpeedStrategy):
            root_device = torch.device("cpu", 0)

        strategy = OnCpu(stage=1, process_group_backend="gloo", logging_batch_size_per_gpu=4)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world,
        use_distributed_sampler=False,  # it would shuffle
        strategy=strategy,
        max_steps=STEPS,
        accumulate_grad_batches=ACCUMULATION,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    own = list(range(int(os.environ.get("LOCAL_RANK", 0)), 64, world))
    trainer.fit(Module(), DataLoader(Samples(), 4, sampler=own))


def transformers() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    class Tokens(Dataset):
        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            draw = torch.Generator().manual_seed(index)
            tokens = torch.randint(0, 64, (16,), generator=draw)
            labels = tokens.clone()
            labels[: index % 9] = -100
            return {"input_ids": tokens, "labels": labels}

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2))
    arguments = TrainingArguments(
        "trained",
        use_cpu=True,
        max_steps=STEPS,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=ACCUMULATION,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        optim="sgd",
        learning_rate=0.1,
        lr_scheduler_type="constant",
    )
    Trainer(model, arguments, train_dataset=Tokens()).train()


def deepspeed() -> None:
    import deepspeed as library

    library.init_distributed(dist_backend="gloo")
    net = Net()
    engine, *_ = library.initialize(
        model=net,
        optimizer=sgd(net),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": ACCUMULATION,
            "zero_optimization": {"stage": int(KIND[-1])},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
        },
    )
    batches = iter(own_part())
    for _ in range(STEPS * ACCUMULATION):
        x, y = next(batches)
        loss = F.cross_entropy(engine(x), y)
        if FAULT == "divided-twice":
            loss = loss / ACCUMULATION
        engine.backward(loss)
        engine.step()


def sharded() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    dist.init_process_group("gloo")
    net: nn.Module = Net()
    if KIND == "fully_shard":
        for layer in net.layers:
            fully_shard(layer)
        fully_shard(net)
    else:
        net = FullyShardedDataParallel(net, use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = sgd(net)
    batches = iter(own_part())
    for _ in range(STEPS):
        for _ in range(ACCUMULATION):
            x, y = next(batches)
            (F.cross_entropy(net(x), y) / ACCUMULATION).backward()
        optimizer.step()
        if FAULT != "never-zeroed":
            optimizer.zero_grad()


if __name__ == "__main__":
    os.environ["DS_ACCELERATOR"] = "cpu"
    torch.manual_seed(0)
    kinds = {"accelerate": accelerate, "lightning": lightning, "transformers": transformers}
    kinds |= {"zero": deepspeed}
    next((kinds[name] for name in kinds if KIND.startswith(name)), sharded)()
