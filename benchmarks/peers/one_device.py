"""What `gpu.py` runs on a single device: a plain torch loop, the samples, and what the device is.

The loop is what a careful user writes without a framework: weights and AdamW's state in float32, a
copy of the weights in the precision that is computed in, gradients added up in float32.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import platform
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from colotrain.engine.blocks import checkpoint_blocks_
from colotrain.engine.probes import matmul_peak_flops, memory_now
from colotrain.models.llm import LLM
from colotrain.runs.resolving import resolve_config
from colotrain.spec.plan import RunPlan

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STATE_BYTES = 16
"""Per parameter: itself, its gradient and AdamW's two moments, in float32."""


class Tokens(torch.utils.data.Dataset):
    """Random tokens, the same in every run."""

    def __init__(self, vocab_size: int, seq_len: int, length: int = 4096) -> None:
        self.vocab_size, self.seq_len, self.length = vocab_size, seq_len, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self.length:
            raise IndexError(index)
        generator = torch.Generator().manual_seed(index)
        row = torch.randint(0, self.vocab_size, (self.seq_len + 1,), generator=generator)
        return {"input_ids": row[:-1], "labels": row[1:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["describe", "train"])
    parser.add_argument("--out", type=Path, required=True, help="a JSON file")
    parser.add_argument("--device", required=True)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--words", nargs="+", required=True, help="colotrain's overrides")
    asked = parser.parse_args()
    plan = resolve_config(asked.words, here=False).plan
    document = describe(plan, asked.device) if asked.what == "describe" else train(plan, asked)
    asked.out.write_text(json.dumps(document))


def describe(plan: RunPlan, device: str) -> dict[str, Any]:
    """The device, the versions, and what a step of the model is."""
    peak = matmul_peak_flops(torch.device(device), DTYPES[plan.train.precision])
    return {
        "device": describe_device(device),
        "peak_flops": peak,
        "parameters": plan.parameters.total,
        "state_bytes": STATE_BYTES * plan.parameters.total,
        "flops_per_token": plan.flops_per_token,
        "tokens_per_step": plan.batch.global_batch * plan.data.seq_len,
        "micro_batch": plan.batch.micro_batch,
        "accumulation_steps": plan.batch.accumulation_steps,
        "seq_len": plan.data.seq_len,
        "precision": plan.train.precision,
        "activation_checkpointing": plan.train.activation_checkpointing,
    }


def describe_device(device: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": f"CPU ({platform.processor() or platform.machine()})",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "colotrain": version("colotrain"),
    }
    with suppress(PackageNotFoundError):
        found["triton"] = version("triton")
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found["name"] = properties.name
        found["memory_bytes"] = properties.total_memory
        found["cuda"] = torch.version.cuda
        found["cudnn"] = torch.backends.cudnn.version()
    return found


def train(plan: RunPlan, asked: argparse.Namespace) -> dict[str, Any]:
    """Steps of the plain loop: when each ended, the losses, and the highest use of memory."""
    device, dtype = torch.device(asked.device), DTYPES[plan.train.precision]
    torch.manual_seed(plan.train.seed)
    with device:
        masters = LLM(**plan.model.args)
        masters.init_weights()
    working = masters if dtype == torch.float32 else copy.deepcopy(masters).to(dtype)
    pairs = list(zip(masters.parameters(), working.parameters(), strict=True))
    if working is not masters:
        for master, own in pairs:
            own.register_post_accumulate_grad_hook(functools.partial(add_up, master))
    prepare_(working, plan, compiled=asked.compile)
    optimizer = torch.optim.AdamW(
        masters.parameters(),
        lr=plan.optim.lr,
        betas=plan.optim.betas,  # type: ignore[arg-type]
        eps=plan.optim.eps,
        weight_decay=plan.optim.weight_decay,
        fused=True,
    )
    batches = micro_batches(plan, device)
    ends, losses = [], []
    for _ in range(asked.steps):
        total = torch.zeros((), device=device)
        for _ in range(plan.batch.accumulation_steps):
            loss_sum, count = working(**next(batches))
            loss = loss_sum / count / plan.batch.accumulation_steps
            loss.backward()
            total += loss.detach()
        losses.append(total.item())  # waits for the device, as a loop that logs its loss does
        if plan.train.grad_clip is not None:
            torch.nn.utils.clip_grad_norm_(masters.parameters(), plan.train.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if working is not masters:
            with torch.no_grad():
                torch._foreach_copy_([own for _, own in pairs], [master for master, _ in pairs])
        ends.append(time.time())
    return {"ends": ends, "losses": losses, "peak_bytes": memory_now()[1]}


def add_up(master: nn.Parameter, own: nn.Parameter) -> None:
    """The gradient of a micro-batch into the sum in float32."""
    assert own.grad is not None
    if master.grad is None:
        master.grad = own.grad.to(master.dtype)
    else:
        master.grad.add_(own.grad)
    own.grad = None


def prepare_(model: LLM, plan: RunPlan, *, compiled: bool) -> None:
    """Recompute and compile each block, as the plan does."""
    recompute = plan.train.activation_checkpointing
    if recompute == "selective":
        checkpoint_blocks_(model, recompute)
    for block in model.blocks:
        if compiled:
            block.forward = torch.compile(block.forward)  # type: ignore[method-assign]
        if recompute == "full":
            again = functools.partial(checkpoint, block.forward, use_reentrant=False)
            block.forward = again  # type: ignore[method-assign]


def micro_batches(plan: RunPlan, device: torch.device) -> Iterator[dict[str, Tensor]]:
    samples, size = Tokens(**plan.data.args), plan.batch.micro_batch
    while True:
        for start in range(0, len(samples) - size + 1, size):
            rows = [samples[start + offset] for offset in range(size)]
            yield {name: torch.stack([row[name] for row in rows]).to(device) for name in rows[0]}


if __name__ == "__main__":
    main()
