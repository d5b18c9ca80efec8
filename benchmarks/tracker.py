"""The plan's memory beside that of torch's own tracker, for models and numbers of ranks on paper.

`python benchmarks/tracker.py [--out tracker.json] [--models llm-1b,llm-7b] [--ranks 8,64,1024]`
runs what `colotrain plan --trace` runs for each cell of the table, and prints the table. Cells that
are in the file already are not made again. A cell takes 10 to 60 seconds on two cores.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from colotrain.rundir import write_atomically

PLUGINS = ("zero2", "zero3", "fsdp-hybrid")
FROZEN = "freeze.patterns=[embed*,blocks.0.*,blocks.1.*,blocks.2.*,blocks.3.*]"
RANKS_PER_NODE = 8
EXACT = ("parameters", "gradients", "optimizer")
NEAR = ("activations", "gathered", "peak")


def words_of(model: str, ranks: int, plugin: str, frozen: bool, recompute: bool) -> list[str]:
    found = [
        f"recipe={model}",
        f"plugin={plugin}",
        "hardware=h200",
        f"cluster.nodes={ranks // RANKS_PER_NODE}",
        f"cluster.procs_per_node={RANKS_PER_NODE}",
        "train.micro_batch=1",
        "train.global_batch=null",
        "accumulate.steps=1",
        "train.precision=bf16",
        f"train.activation_checkpointing={'blocks' if recompute else 'none'}",
    ]
    return [*found, FROZEN] if frozen else found


def check(words: list[str]) -> dict[str, Any]:
    """Bytes by category, of the plan and the tracker."""
    command = [sys.executable, "-m", "colotrain", "plan", *words, "--trace", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if not done.stdout:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)["trace"]["categories"]
    return found


def main(models: list[str], ranks: list[int], out: Path) -> None:
    known: dict[str, Any] = json.loads(out.read_text("utf-8")) if out.is_file() else {}
    ways = ((True, True), (False, True), (False, False), (True, False))
    for (frozen, recompute), size, plugin, model in itertools.product(ways, ranks, PLUGINS, models):
        key = f"{model} {size} {plugin} {'frozen' if frozen else '-'}"
        key += f" {'recomputed' if recompute else '-'}"
        if key not in known:
            known[key] = check(words_of(model, size, plugin, frozen, recompute))
            write_atomically(out, json.dumps(known, indent=1))
            print(row(key, known[key]), flush=True)
    print(
        "\n| model | ranks | plugin | frozen | recomputed | " + " | ".join((*EXACT, *NEAR)) + " |"
    )
    print("| --- | ---: | --- | --- | --- |" + " ---: |" * len((*EXACT, *NEAR)))
    for key, pairs in known.items():
        print(row(key, pairs))


def row(key: str, pairs: dict[str, Any]) -> str:
    """Of a table in Markdown: `exact`, or how far the plan is off."""
    return f"| {' | '.join([*key.split(), *(off(pairs[name]) for name in (*EXACT, *NEAR))])} |"


def off(pair: dict[str, int]) -> str:
    if pair["plan"] == pair["tracker"]:
        return "exact"
    return f"{pair['plan'] / pair['tracker'] - 1:+.1%}" if pair["tracker"] else str(pair["plan"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default="llm-1b,llm-7b")
    parser.add_argument("--ranks", default="8,64,1024")
    parser.add_argument("--out", type=Path, default=Path("tracker.json"))
    asked = parser.parse_args()
    main(asked.models.split(","), [int(size) for size in asked.ranks.split(",")], asked.out)
