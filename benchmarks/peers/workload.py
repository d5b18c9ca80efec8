"""What every system trains: the same decoder, batches, optimizer and clock."""

from __future__ import annotations

import argparse
import json
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from colotrain.models.llm import LLM

MODEL = {"vocab_size": 256, "d_model": 512, "num_layers": 8, "num_heads": 8}
SEQ_LEN = 256
LR = 1e-3
OPTIMIZER = {"lr": LR, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@dataclass(frozen=True)
class Cell:
    """One way to cut a step."""

    ranks: int
    micro_batch: int
    accumulation: int
    tp: int = 1
    """Ranks that divide each matrix, and have the same samples."""
    pp: int = 1
    """Stages of the model, which work on the same samples."""

    @property
    def global_batch(self) -> int:
        return self.ranks // (self.tp * self.pp) * self.micro_batch * self.accumulation

    def __str__(self) -> str:
        cut = f"micro-batch {self.micro_batch}, accumulation {self.accumulation}"
        axes = {"tp": self.tp, "pp": self.pp}
        return f"{self.ranks} ranks, {cut}" + "".join(
            f", {name} {size}" for name, size in axes.items() if size > 1
        )


class Model(nn.Module):
    """The decoder with a forward that returns the mean loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.llm = LLM(**MODEL)  # type: ignore[arg-type]
        self.llm.init_weights()

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        loss_sum, count = self.llm(input_ids, labels)
        return loss_sum / count


class Tokens(torch.utils.data.Dataset):
    """Random tokens, enough for any run of the benchmark."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        row = torch.randint(0, MODEL["vocab_size"], (SEQ_LEN + 1,), generator=generator)
        return {"input_ids": row[:-1], "labels": row[1:]}


def batches(micro_batch: int, *, rank: int, world_size: int) -> Iterator[dict[str, Tensor]]:
    sampler = torch.utils.data.DistributedSampler(Tokens(), world_size, rank, shuffle=False)
    while True:
        yield from torch.utils.data.DataLoader(Tokens(), micro_batch, sampler=sampler)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--variant", default="")
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--local_rank", type=int, default=0)  # some launchers add it
    return parser.parse_args()


class Meter:
    """Notes the end of each optimizer step, and at the end writes what this rank saw."""

    def __init__(self, out: Path) -> None:
        self.out, self.ends = out, [time.time()]
        # a byte for each step: how far this rank is
        self.marks = (out / f"steps-{os.getpid()}").open("ab", buffering=0)

    def step(self) -> None:
        self.ends.append(time.time())
        self.marks.write(b".")

    def finish(self, rank: int) -> None:
        text = Path("/proc/self/status").read_text()
        peak = int(re.findall(r"VmHWM:\s*(\d+)", text)[0]) * 1024
        document = {"first_step_at": self.ends[1], "ends": self.ends[1:], "peak": peak}
        (self.out / f"rank{rank}.json").write_text(json.dumps(document))


def ranks() -> tuple[int, int]:
    """(rank, world size), as torchrun and its like name them."""
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
