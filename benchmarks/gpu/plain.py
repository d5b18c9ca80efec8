"""A plain training loop of llm-1b, against which colotrain's speed is set.

    python plain.py OUT.json [--compile] [--recompute] [--micro 8 --accumulate 2] [--loss compiled]

One process, no framework around the blocks: a bf16 copy that computes and masters in float32,
gradients added up in float32, fused AdamW, clipping on the device, inputs from page-locked memory,
the loss read once per step. The loss is colotrain's own, in chunks, or one compiled function.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from colotrain.models.llm import LLM

LARGE = {"vocab_size": 32768, "d_model": 2048, "num_heads": 16, "num_kv_heads": 4, "d_hidden": 5632}
SMALL = {"vocab_size": 256, "d_model": 64, "num_heads": 4, "num_kv_heads": 2, "d_hidden": 128}
WARM_UP = 3
"""Steps that are not timed."""


def build(asked: argparse.Namespace, device: torch.device) -> tuple[LLM, LLM]:
    """Masters in float32, and the copy in bf16 that computes."""
    sizes = LARGE if device.type == "cuda" else SMALL
    torch.manual_seed(0)
    with device:
        masters, working = (
            LLM(num_layers=asked.layers, tie_embeddings=True, **sizes) for _ in range(2)
        )
        masters.init_weights()
    working.to(torch.bfloat16)
    for block in working.blocks:
        if asked.compile:
            block.forward = torch.compile(block.forward)  # type: ignore[method-assign]
        if asked.recompute:
            again = functools.partial(checkpoint, block.forward, use_reentrant=False)
            block.forward = again  # type: ignore[method-assign]
    if asked.loss == "compiled":
        weight = working.head.weight

        @torch.compile
        def loss_of(x: Tensor, labels: Tensor) -> Tensor:
            logits = (x.flatten(0, 1) @ weight.T).float()
            return F.cross_entropy(logits, labels.flatten(), reduction="sum")

        working.head.forward = loss_of  # type: ignore[method-assign]
    return masters, working


def train(asked: argparse.Namespace) -> dict[str, object]:
    device = torch.device(asked.device)
    masters, working = build(asked, device)
    copies = [parameter.detach() for parameter in working.parameters()]
    sources = [parameter.detach() for parameter in masters.parameters()]
    for master in masters.parameters():
        master.grad = torch.zeros_like(master)
    torch._foreach_copy_(copies, sources)
    optimizer = torch.optim.AdamW(
        masters.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    rows = samples(asked, masters.head.weight.shape[0], pinned=device.type == "cuda")
    tokens, ends, losses = asked.micro * asked.seq * asked.accumulate, [], []
    for step in range(asked.steps):
        total = torch.zeros((), device=device)
        for index in range(asked.accumulate):
            row = rows[(step * asked.accumulate + index) % len(rows)].to(device, non_blocking=True)
            loss_sum, _ = working(row[:, :-1], row[:, 1:])
            loss = loss_sum / tokens
            loss.backward()
            add_up(masters, working, first=index == 0)
            total += loss.detach()
        nn.utils.clip_grad_norm_(masters.parameters(), 1.0, foreach=True)
        optimizer.step()
        torch._foreach_copy_(copies, sources)
        losses.append(total.item())
        ends.append(time.perf_counter())
    step_s = statistics.median(b - a for a, b in pairwise(ends[WARM_UP - 1 :]))
    on_gpu = device.type == "cuda"
    return {
        "step_s": step_s,
        "tokens_per_s": tokens / step_s,
        "mfu": flops_per_token(masters, asked) * tokens / step_s / 989e12,
        "peak_MiB": torch.cuda.max_memory_allocated() >> 20 if on_gpu else 0,
        "losses": losses,
    }


def samples(asked: argparse.Namespace, vocabulary: int, *, pinned: bool) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    shape = (asked.micro, asked.seq + 1)
    rows = [torch.randint(0, vocabulary, shape, generator=draw) for _ in range(4)]
    return [row.pin_memory() for row in rows] if pinned else rows


def add_up(masters: nn.Module, working: nn.Module, *, first: bool) -> None:
    """The gradients of a micro-batch into the sums in float32."""
    sums = [parameter.grad for parameter in masters.parameters()]
    own = [parameter.grad for parameter in working.parameters()]
    (torch._foreach_copy_ if first else torch._foreach_add_)(sums, own)
    for parameter in working.parameters():
        parameter.grad = None


def flops_per_token(model: LLM, asked: argparse.Namespace) -> float:
    """Six per weight of a matrix product, and attention's twelve per layer, width and position."""
    weights = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    width = model.head.weight.shape[1]
    return 6.0 * weights + 12.0 * asked.layers * width * asked.seq


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--micro", type=int, default=4)
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--loss", default="chunks", choices=("chunks", "compiled"))
    parser.add_argument("--compile", action="store_true")
    asked = parser.parse_args()
    asked.out.write_text(json.dumps(train(asked)))


if __name__ == "__main__":
    main()
