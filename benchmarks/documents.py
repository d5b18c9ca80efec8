"""Time and memory of attention within documents, on the CPU.

Layers of attention, forward and backward: with a mask of all pairs of a sample's tokens, and
document by document. Each turn is a new process, and the contestants take turns.
`python benchmarks/documents.py --sequence 2048 --documents 8`
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import defaultdict
from statistics import median
from typing import Any

MASK, OWN = "mask", "by document"
MIB = 1 << 20
HEADS, KV_HEADS, SIZE = 8, 4, 64


def main() -> None:
    args = parse()
    if args.one is not None:
        print(json.dumps(measure(args.one, args)))
        return
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    for turn in range(args.rounds):
        for name in (MASK, OWN) if turn % 2 == 0 else (OWN, MASK):
            command = [sys.executable, __file__, "--one", name]
            for option in ("sequence", "documents", "layers", "threads"):
                command += [f"--{option}", str(getattr(args, option))]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            found[name].append(json.loads(done.stdout))
    for name, turns in found.items():
        seconds, peak = (median(one[key] for one in turns) for key in ("seconds", "peak"))
        print(f"{name:<12} {seconds:>8.3f} s {peak / MIB:>8.0f} MiB")


def parse() -> Any:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(name: str, args: Any) -> dict[str, float]:
    """Processor seconds of a forward and backward, the second of two, and the bytes they added."""
    import torch
    import torch.nn.functional as F

    from colotrain.models.documents import attend_within, documents_in

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    cuts = torch.randperm(args.sequence - 1)[: args.documents - 1] + 1
    ids = torch.zeros(1, args.sequence, dtype=torch.int64).index_fill_(1, cuts, 1).cumsum(1)
    x = torch.randn(1, args.sequence, HEADS * SIZE, requires_grad=True)
    width = (HEADS + 2 * KV_HEADS) * SIZE
    weights = [torch.randn(width, HEADS * SIZE).div_(HEADS * SIZE) for _ in range(args.layers)]

    def step() -> None:
        hidden, documents, mask = x, documents_in(ids), None
        if name == MASK:
            same = (ids[:, :, None] == ids[:, None, :]).tril()
            mask = torch.zeros_like(same, dtype=x.dtype).masked_fill_(~same, -torch.inf)[:, None]
        for weight in weights:
            heads = F.linear(hidden, weight).unflatten(-1, (-1, SIZE)).transpose(1, 2)
            parts = heads.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
            if mask is None:
                mixed = attend_within(*parts, documents, enable_gqa=True)
            else:
                mixed = F.scaled_dot_product_attention(*parts, attn_mask=mask, enable_gqa=True)
            hidden = hidden + mixed.transpose(1, 2).flatten(2)
        hidden.square().mean().backward()

    before = peak_bytes()
    step()
    began = time.process_time()
    step()
    return {"seconds": time.process_time() - began, "peak": peak_bytes() - before}


def peak_bytes() -> int:
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
