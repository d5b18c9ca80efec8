"""Verify products of mesh axes on eight ranks: `scripts/verify_axes.py [MODEL…] [--optimizer …]`.

Three tiny models (the llm, and two Hugging Face directories with random weights, one of them tied)
× mesh.tp 1, 2, 4 × mesh.cp 1, 2 × all plugins × accumulation 1, 4 × a frozen prefix or none, with
clipped gradients: each case is compared with one process in float64, as `colotrain verify` does.
A parameter may also be what the reference's optimizer makes, in float64, of the case's own
gradients, which are within the limit of gradients: such cases are counted apart.
Prints a row per model and product, and ends with 1 if a case differs.
All 720 cases take an hour on two busy cores. With `--pp` models have four blocks, and mesh.pp
is one more axis; `--set mesh.pp_schedule=interleaved` gives each stage two chunks of them.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from colotrain.cli.verify import SGD  # noqa: E402
from colotrain.data.prepare.tokens import prepare_all  # noqa: E402
from colotrain.runs.resolving import resolve_config  # noqa: E402
from colotrain.spec.plan import RunPlan  # noqa: E402
from colotrain.spec.plugins import ROWS  # noqa: E402
from colotrain.verify.cases import Case  # noqa: E402
from colotrain.verify.compare import CaseResult  # noqa: E402
from colotrain.verify.runner import verify  # noqa: E402
from tests.families import GROUPED, Family  # noqa: E402
from tests.running import SMALL  # noqa: E402

RANKS, GLOBAL_BATCH, STEPS = 8, 32, 2
TPS, CPS, ACCUMULATION = (1, 2, 4), (1, 2), (1, 4)
TINY = ("model.args.num_layers=2", "data.seq_len=16", "model.args.num_heads=4")
FOUR_BLOCKS = ("model.args.num_layers=4", "model.args.num_hidden_layers=4")
"""For stages: of `llm`, and of a model of transformers."""
HEADS = {
    **GROUPED,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 4,
}
FAMILIES = {
    "qwen3": Family("Qwen3", "Qwen3ForCausalLM", "qwen3", HEADS),
    "llama": Family("Llama", "LlamaForCausalLM", "llama", {**HEADS, "tie_word_embeddings": True}),
}
NAMES = {"llm": "llm", "qwen3": "Qwen3, untied", "llama": "Llama, tied"}
PREFIX = {"llm": ("embed*", "blocks.0.*")}
"""Patterns of a frozen prefix, by model; of Hugging Face models' by default."""


def options_of(model: str, folder: Path, *, staged: bool) -> list[str]:
    """Return the arguments that name a model and its data."""
    if model == "llm":  # with tp=4 ranks hold parts of a head of keys
        return [*SMALL, *TINY, "model.args.num_kv_heads=2", *FOUR_BLOCKS[:1] * staged]
    family = FAMILIES[model]
    if staged:
        family = replace(family, settings={**family.settings, "num_hidden_layers": 4})
    made = family.make(folder / model)
    return [f"model.hf={made}", "data.target=tests.families:causal", "train.micro_batch=1"]


def cases_of(
    model: str, optimizer: str, arguments: argparse.Namespace, folder: Path
) -> Iterator[RunPlan]:
    staged = max(arguments.pp) > 1
    options = [*options_of(model, folder, staged=staged), "train.grad_clip=0.1", *arguments.set]
    resolved = resolve_config(options)
    if resolved.plan.data.source != "target":
        prepare_all(resolved.plan.data)
    config: dict[str, Any] = resolved.config
    if optimizer == "sgd":
        config = {**config, "optim": SGD}
    prefix = PREFIX.get(model, ("*embed_tokens*", "*layers.0.*"))
    for pp, tp, cp, plugin, steps, frozen in itertools.product(
        arguments.pp, arguments.tp, arguments.cp, ROWS, arguments.accumulation, ((), prefix)
    ):
        if RANKS % (pp * tp * cp):
            continue
        # replicas of two shards, which one node has only if it is told so
        shards = 2 if RANKS // (pp * tp) > 1 else 1
        hybrid = {**config, "plugin": {"name": "fsdp-hybrid", "shard_size": shards}}
        case = Case(
            plugin=plugin,
            world_size=RANKS,
            pp=pp,
            cp=cp,
            tp=tp,
            accumulation_steps=steps,
            freeze=frozen,
        )
        changed = case.apply(
            hybrid if plugin == "fsdp-hybrid" else config, global_batch=GLOBAL_BATCH, steps=STEPS
        )
        changed["train"]["eval_steps"] = 0
        yield resolved.resolve(changed)


def run(model: str, optimizer: str, arguments: argparse.Namespace) -> list[CaseResult]:
    with tempfile.TemporaryDirectory() as name:
        plans = list(cases_of(model, optimizer, arguments, Path(name)))
        return list(verify(plans, Path(name, "cases"), progress=show))


def show(what: str, done: int, total: int) -> None:
    print(f"\r{what} {done}/{total}", end="", file=sys.stderr, flush=True)


def rows(model: str, optimizer: str, results: Sequence[CaseResult]) -> Iterator[str]:
    for (pp, tp, cp), group in itertools.groupby(results, key=lambda r: (r.pp, r.tp, r.cp)):
        found = list(group)
        same = sum(r.passed for r in found)
        largest = (
            f"{max(getattr(r, f'max_abs_{kind}') for r in found):.0e}"
            for kind in ("loss", "gradient", "parameter")
        )
        axes = f"{RANKS // tp // cp // pp} | {pp} | {cp} | {tp}"
        cells = NAMES[model], optimizer, axes, f"{same} of {len(found)}", *largest
        yield f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", choices=[*NAMES, []], default=[*NAMES])
    parser.add_argument("--optimizer", nargs="+", choices=("sgd", "recipe"), default=["sgd"])
    parser.add_argument("--pp", nargs="+", type=int, default=[1])
    parser.add_argument("--accumulation", nargs="+", type=int, default=ACCUMULATION)
    parser.add_argument("--tp", nargs="+", type=int, default=TPS)
    parser.add_argument("--cp", nargs="+", type=int, default=CPS)
    parser.add_argument("--set", nargs="+", default=[], help="further settings, as KEY=VALUE")
    arguments = parser.parse_args()
    wrong = 0
    for model, optimizer in itertools.product(arguments.models, arguments.optimizer):
        results = run(model, optimizer, arguments)
        print(file=sys.stderr)
        print("\n".join(rows(model, optimizer, results)), flush=True)
        for r in results:
            if not r.passed:
                wrong += 1
                print(f"{model} {optimizer} pp={r.pp} tp={r.tp} cp={r.cp} {r.plugin}", end=" ")
                print(f"accumulation {r.accumulation_steps} {r.freeze}: {r.difference}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
