"""Operations that a step launches on a GPU, counted on the simulated device of the tests.

    python benchmarks/launches.py [--plugin zero2] [key=value…]

A step of llm-1b with all its layers, heads, rows and logits, but narrow ones: what is launched does
not depend on their width. Values are computed on the CPU, so this takes a minute and counts no
time. To compare with another commit, run it in a work tree of that commit too.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.simulated.build import compile_guard  # noqa: E402
from tests.simulated.case import Case  # noqa: E402
from tests.simulated.running import carry_out  # noqa: E402

STEPS = 2
LLM_1B = (
    "recipe=llm-tiny",
    "model.args.vocab_size=32768",
    "model.args.d_model=64",
    "model.args.num_layers=20",
    "model.args.num_heads=16",
    "model.args.num_kv_heads=4",
    "model.args.d_hidden=176",
    "model.args.tie_embeddings=true",
    "data.seq_len=2048",
    "train.global_batch=2",
    "train.micro_batch=2",
    "train.precision=bf16",
    "train.activation_checkpointing=full",
    "train.eval_every=0",
    "train.eval_steps=0",
    "checkpoint.every=0",
    "cluster.memory=80GiB",
)
SHOWN = 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plugin", default="zero2")
    parser.add_argument("words", nargs="*")
    arguments = parser.parse_args()
    words = (*LLM_1B, f"plugin={arguments.plugin}", f"train.max_steps={STEPS}", *arguments.words)
    with tempfile.TemporaryDirectory() as folder:
        guard = compile_guard(Path(folder))
        found = carry_out(
            [Case(name="step", words=words, looks=False)], Path(folder) / "run", guard
        )
        seen = found["step"]
        print(f"launches per step: {seen.num_launches / STEPS:,.0f}")
        print(f"waits of the host per step: {sum(seen.waits.values()) / STEPS:.1f}")
        for what, counts in (("operation", seen.kinds), ("line", seen.launches)):
            for name, number in Counter(counts).most_common(SHOWN):
                print(f"{number / STEPS:8,.0f}  {what} {name}")


if __name__ == "__main__":
    main()
