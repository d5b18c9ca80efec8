"""Time and memory of the cross-entropy of a large vocabulary, on the CPU.

transformers' own loss, which holds all logits, and colotrain's, which holds those of a few rows:
forward and backward from hidden states to the gradients of states and head. Each turn is a new
process, and the contestants take turns. `python benchmarks/loss.py --hidden 256 1024`
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

OWN, PEER = "colotrain", "transformers"
MIB = 1 << 20


def main() -> None:
    args = parse()
    if args.one is not None:
        print(json.dumps(measure(args.one, args.hidden[0], args)))
        return
    print(f"{'hidden':>6} {'loss':<22} {'seconds':>8} {'ratio':>6} {'peak MiB':>9}")
    for hidden in args.hidden:
        found: dict[str, list[dict[str, float]]] = defaultdict(list)
        names = [PEER, OWN, *(f"{OWN}, {rows} rows" for rows in args.rows)]
        for turn in range(args.rounds):
            for name in names if turn % 2 == 0 else reversed(names):
                found[name].append(in_a_new_process(name, hidden, args))
        peer = [one["seconds"] for one in found[PEER]]
        for name in names:
            seconds = [one["seconds"] for one in found[name]]
            ratio = median(a / b for a, b in zip(seconds, peer, strict=True))
            peak = median(one["peak"] for one in found[name]) / MIB
            took = median(seconds)
            print(f"{hidden:>6} {name:<22} {took:>8.2f} {ratio:>6.2f} {peak:>9.0f}", flush=True)


def parse() -> Any:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--rows", type=int, nargs="*", default=[], help="rows to try as well")
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    return parser.parse_args()


def in_a_new_process(name: str, hidden: int, args: Any) -> dict[str, float]:
    command = [sys.executable, __file__, "--one", name, "--hidden", str(hidden)]
    for option in ("vocab", "sequence", "threads"):
        command += [f"--{option}", str(getattr(args, option))]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def measure(name: str, hidden: int, args: Any) -> dict[str, float]:
    """Seconds of a forward and backward, and the bytes that they added at most.

    The gradient of the head, which stays, is among the bytes.
    """
    import torch
    import torch.nn.functional as F
    from transformers.loss.loss_utils import ForCausalLMLoss

    from colotrain.models import loss

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    x = torch.randn(args.sequence, hidden, requires_grad=True)
    weight = torch.randn(args.vocab, hidden).mul_(hidden**-0.5).requires_grad_()
    labels = torch.randint(args.vocab, (args.sequence,))
    (x[:8] @ weight[:8].T).sum().backward()  # threads and kernels are there
    x.grad = weight.grad = None
    if ", " in name:
        rows = int(name.split()[1])
        loss.rows_at_once = lambda *args: rows
    before, started = memory("VmRSS"), time.perf_counter()
    if name == PEER:
        logits = F.linear(x, weight)
        ForCausalLMLoss(logits, None, args.vocab, shift_labels=labels).backward()
        del logits
    else:
        (loss.cross_entropy(x, weight, labels) / args.sequence).backward()
    return {"seconds": time.perf_counter() - started, "peak": memory("VmHWM") - before}


def memory(field: str) -> int:
    """Bytes of this process that /proc names so."""
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith(field))
    return int(line.split()[1]) << 10


if __name__ == "__main__":
    main()
