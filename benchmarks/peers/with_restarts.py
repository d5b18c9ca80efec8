"""llm-tiny in plain torch, which writes a checkpoint after each step and resumes from it.

What people write who use `torchrun --max-restarts`. Each rank appends what it does to a file.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from colotrain.models.llm import LLM

MODEL = {"vocab_size": 256, "d_model": 128, "num_layers": 4, "num_heads": 4, "d_hidden": 384}
SEQ_LEN = 256


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--global-batch", type=int, required=True)
    asked = parser.parse_args()
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = LLM(**MODEL)  # type: ignore[arg-type]
    model.init_weights()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    file, done = Path("newest.pt"), 0
    if file.exists():
        state = torch.load(file, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["step"]
    note(rank, {"kind": "started", "attempt": attempt, "step": done, "pid": os.getpid()})
    for step in range(done + 1, asked.steps + 1):
        generator = torch.Generator().manual_seed(step)
        rows = torch.randint(0, 256, (asked.global_batch, SEQ_LEN + 1), generator=generator)
        mine = rows[rank :: dist.get_world_size()]
        loss_sum, count = wrapped(mine[:, :-1], mine[:, 1:])
        loss = loss_sum / count
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        shared = loss.detach().clone()
        dist.all_reduce(shared)
        if rank == 0:
            save(file, {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, step)
        dist.barrier()
        note(rank, {"kind": "step", "attempt": attempt, "step": step, "loss": shared.item()})
    dist.destroy_process_group()


def save(file: Path, state: dict[str, Any], step: int) -> None:
    with (partial := file.with_suffix(".partial")).open("wb") as output:
        torch.save(state | {"step": step}, output)
        output.flush()
        os.fsync(output.fileno())
    partial.rename(file)


def note(rank: int, what: dict[str, Any]) -> None:
    with Path(f"rank-{rank}.jsonl").open("a") as file:
        file.write(json.dumps(what | {"rank": rank, "t": time.time()}) + "\n")


if __name__ == "__main__":
    main()
