"""Highest resident memory of DPO: colotrain on one CPU rank beside plain torch with two models.

A Llama with random weights, AdamW in float32, the same pairs. `python benchmarks/preferences.py`
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MIB = 1 << 20
STEPS, PAIRS, LAYERS = 3, 2, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocab", type=int, default=65_536)
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--plain", choices=("all", "lora"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.plain:
        print(json.dumps(two_models(args)))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(folder, args)
        for kind in ("all", "lora"):
            plain, own = plainly(kind, args), by_colotrain(folder, kind, args)
            sizes = f"two models {plain / MIB:6.0f} MiB   colotrain {own / MIB:6.0f} MiB"
            print(f"{kind:<5} {sizes}   ratio {own / plain:.2f}", flush=True)


def config(args: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=args.vocab,
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        max_position_embeddings=args.sequence,
    )


def make(folder: Path, args: Any) -> None:
    from transformers import LlamaForCausalLM

    LlamaForCausalLM(config(args)).save_pretrained(folder / "model")
    draw = random.Random(0)

    def text() -> str:
        return "".join(draw.choices("abcdefgh ", k=args.sequence - 40))

    with (folder / "pairs.jsonl").open("w") as file:
        for _ in range(4 * PAIRS):
            print(json.dumps({"prompt": "so: ", "chosen": text(), "rejected": text()}), file=file)


def by_colotrain(folder: Path, kind: str, args: Any) -> float:
    command = [
        *(sys.executable, "-m", "colotrain", "run", f"name={kind}", "plugin=zero2", "--json"),
        *("model.hf=model", "data.path=pairs.jsonl", "data.tokenizer=bytes"),
        *("train.objective=dpo", f"data.seq_len={args.sequence}", "data.validation_fraction=0"),
        *(f"train.max_steps={STEPS}", f"train.global_batch={PAIRS}", "cluster.procs_per_node=1"),
        *(f"train.micro_batch={PAIRS}", "train.eval_steps=0", "checkpoint.every=0", "--force"),
    ]
    if kind == "lora":
        command += ["adapter.name=lora", "adapter.targets=[q_proj,v_proj]"]
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    return float(json.loads(done.stdout)["memory"]["peak_by_rank"][0])


def plainly(kind: str, args: Any) -> float:
    command = [sys.executable, __file__, "--plain", kind]
    for option in ("hidden", "vocab", "sequence"):
        command += [f"--{option}", str(getattr(args, option))]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def two_models(args: Any) -> int:
    """Peak bytes of a plain loop; for `lora` the weights are frozen but for small matrices."""
    import torch
    from torch.nn.functional import logsigmoid
    from transformers import LlamaForCausalLM

    model, first = (LlamaForCausalLM(config(args)) for _ in range(2))
    first.requires_grad_(False)
    if args.plain == "lora":
        model.requires_grad_(False)
        for name, module in model.named_modules():
            if name.endswith(("q_proj", "v_proj")):
                add_adapter(module)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    ids = torch.randint(256, (2 * PAIRS, args.sequence))

    def log_probs(one: Any) -> Any:
        logits = one(input_ids=ids[:, :-1], use_cache=False).logits
        each = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        return each.sum(-1).view(PAIRS, 2)

    for _ in range(STEPS):
        with torch.no_grad():
            before = log_probs(first)
        gained = log_probs(model) - before
        loss = -logsigmoid(0.1 * (gained[:, 0] - gained[:, 1])).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    status = Path("/proc/self/status").read_text()
    return int(next(s for s in status.splitlines() if s.startswith("VmHWM")).split()[1]) << 10


def add_adapter(module: Any) -> None:
    from torch import nn

    down = nn.Linear(module.in_features, 8, bias=False)
    up = nn.Linear(8, module.out_features, bias=False)
    module.down, module.up = down, up
    module.register_forward_hook(lambda own, x, out: out + own.up(own.down(x[0])))


if __name__ == "__main__":
    main()
