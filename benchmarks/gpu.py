"""colotrain's plugins beside a plain torch loop on one GPU: tokens/s, MFU, peak device memory.

    python benchmarks/gpu.py [--models llm-500m llm-1b llm-2b] [--budgets] [--set KEY=VALUE …]

Every variant is a process of its own, with a bound on its time. Within a round all of them run one
after the other; what is compared are the ratios to the plain loop of the same round. A variant that
fails is listed with its error, and the others go on. Writes OUT.json and OUT.md. `--budgets` runs
gemini with device budgets that are shares of what the model's states need. `--set` takes
colotrain's overrides, for every variant. Without a GPU it ends with exit code 2; `--device cpu`
shows that it works.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from processes import carry_out

from colotrain.events.fold import follow
from colotrain.events.log import EventReader
from colotrain.rundir import RunDir, write_atomically
from colotrain.spec.plugins import ROWS
from colotrain.spec.quantities import format_size

PEERS = Path(__file__).parent / "peers"
PLAIN = PEERS / "one_device.py"
MODELS = ("llm-500m", "llm-1b", "llm-2b")
SHARES = (1.0, 0.5, 0.25)
WARM_UP = 2
"""Steps that are not timed: compiling, the first allocations, gemini's settling."""


@dataclass(frozen=True)
class Variant:
    """One way to train a model."""

    system: str
    compiled: bool
    words: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return f"{self.system}, compiled" if self.compiled else self.system


@dataclass(frozen=True)
class Measured:
    """One run of one variant."""

    tokens_per_s: float
    """Of the median step after the warm-up."""
    peak_bytes: int
    """Allocated on the device (resident, on CPU)."""
    first_step_s: float
    """From the start of the command to the end of the first step."""
    losses: list[float]


@dataclass
class Found:
    """What is known of a variant."""

    runs: list[Measured] = field(default_factory=list)
    error: str | None = None


def words_of(model: str, asked: argparse.Namespace) -> list[str]:
    """The workload as colotrain's overrides; the plain loop takes its plan from them, too."""
    vocabulary = ["data.args.vocab_size=${model.args.vocab_size}"]
    return [
        *(f"recipe={model}", f"train.precision={asked.precision}", "data.corpus=null"),
        *("data.target=one_device:Tokens", *vocabulary, "data.args.seq_len=${data.seq_len}"),
        *("data.tokenizer=auto", "train.global_batch=null"),
        *(f"accumulate.steps={asked.accumulation}", f"train.max_steps={asked.steps}"),
        *("train.eval_every=0", "train.eval_steps=1", "checkpoint.every=0"),
        *("optim.schedule.name=constant", "optim.schedule.warmup_steps=0"),
        *(f"cluster.device={asked.device}", "cluster.procs_per_node=1", "elastic.max_restarts=0"),
        *asked.set,
    ]


def variants(asked: argparse.Namespace, state_bytes: int) -> list[Variant]:
    """Plain torch first, and everything with and without compiling."""
    found = []
    for compiled in (False, True) if asked.compile else (False,):
        found.append(Variant("torch", compiled))
        found += [Variant(name, compiled, (f"plugin={name}",)) for name in asked.plugins]
        for share in SHARES if asked.budgets else ():
            budget = f"plugin.budget.device={int(share * state_bytes)}"
            found.append(Variant(f"gemini {share:.0%}", compiled, ("plugin=gemini", budget)))
    return found


def describe(model: str, asked: argparse.Namespace) -> dict[str, Any]:
    """What a process of its own says of device and model: here nothing may touch the device."""
    words = [word for word in words_of(model, asked) if not word.startswith("plugin")]
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        out = Path(folder)
        command = plain("describe", out, asked, [*words, "plugin=zero1"])
        carry_out(command, out, environment=environment(), timeout_s=asked.timeout)
        document: dict[str, Any] = json.loads((out / "found.json").read_text("utf-8"))
    return document


def measure(variant: Variant, model: str, asked: argparse.Namespace, tokens: int) -> Measured:
    """Run a variant once; raises `RuntimeError` with its last words where it fails."""
    words = words_of(model, asked)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        out = Path(folder)
        started = time.time()
        if variant.system == "torch":
            words = [word for word in words if not word.startswith("plugin")]
            settings = ["--steps", str(asked.steps), *(["--compile"] * variant.compiled)]
            command = plain("train", out, asked, [*words, "plugin=zero1"], *settings)
            carry_out(command, out, environment=environment(), timeout_s=asked.timeout)
            found = json.loads((out / "found.json").read_text("utf-8"))
        else:
            words += [*variant.words, f"train.compile={str(variant.compiled).lower()}"]
            command = [sys.executable, "-m", "colotrain", "run", *words, "name=bench", "--force"]
            carry_out(command, out, environment=environment(), timeout_s=asked.timeout)
            found = read_run(RunDir(out / "runs" / "bench"))
    ends = found["ends"]
    gaps = [b - a for a, b in pairwise(ends[WARM_UP - 1 :])]
    first = ends[0] - started
    return Measured(tokens / median(gaps), found["peak_bytes"], first, found["losses"])


def plain(
    what: str, out: Path, asked: argparse.Namespace, words: list[str], *settings: str
) -> list[str]:
    where = ["--out", str(out / "found.json"), "--device", asked.device]
    return [sys.executable, str(PLAIN), what, *where, *settings, "--words", *words]


def read_run(rundir: RunDir) -> dict[str, Any]:
    steps = [e for e in EventReader(rundir).drain() if e.kind == "step" and e.rank == 0]
    return {
        "ends": [event.t for event in steps],
        "losses": [event.fields["loss"] for event in steps],
        "peak_bytes": max(follow(rundir).peak_by_rank),
    }


def environment() -> dict[str, str]:
    paths = os.pathsep.join([str(PEERS), os.environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": paths, "CI": "1"}


def benchmark(
    model: str, about: dict[str, Any], asked: argparse.Namespace, save: Callable[..., None]
) -> dict[str, Found]:
    """Every variant once per round; one that fails is not run again. `save` follows each run."""
    every = variants(asked, about["state_bytes"])
    found = {variant.label: Found() for variant in every}
    for number in range(asked.rounds):
        for variant in every:
            entry = found[variant.label]
            if entry.error is not None:
                continue
            where = f"{model}: round {number + 1}/{asked.rounds}: {variant.label}"
            print(where, file=sys.stderr, flush=True)
            try:
                entry.runs.append(measure(variant, model, asked, about["tokens_per_step"]))
            except (RuntimeError, OSError, ValueError, IndexError, KeyError) as error:
                entry.error = f"{type(error).__name__}: {error}"
                print(f"{variant.label}: {entry.error}", file=sys.stderr, flush=True)
            save(found)
    return found


def table(model: str, about: dict[str, Any], found: dict[str, Found]) -> list[str]:
    """Markdown: medians over the rounds; ratios are to the plain loop of the same round."""
    tokens = about["micro_batch"] * about["seq_len"]
    lines = [
        f"### {model}",
        "",
        f"{about['parameters']:,} parameters, states of {format_size(about['state_bytes'])}; "
        f"{about['precision']}, micro-batches of {about['micro_batch']} × {about['seq_len']} = "
        f"{tokens:,} tokens, {about['accumulation_steps']} per step, recomputation: "
        f"{about['activation_checkpointing']}.",
        "",
        "| | tokens/s | ÷ torch | MFU | peak memory | ÷ torch | first step after |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for label, entry in found.items():
        if entry.runs and entry.error is None:
            base = found["torch, compiled" if label.endswith(", compiled") else "torch"]
            lines.append(row(label, entry, base, about))
    lines += ["", *(f"- {k}: failed: `{e.error}`" for k, e in found.items() if e.error), ""]
    return lines


def row(label: str, entry: Found, base: Found, about: dict[str, Any]) -> str:
    speed = median(run.tokens_per_s for run in entry.runs)
    peak = median(run.peak_bytes for run in entry.runs)
    first = median(run.first_step_s for run in entry.runs)
    ideal = about["peak_flops"]
    mfu = f"{about['flops_per_token'] * speed / ideal:.1%}" if ideal else "-"
    of_speed = of_peak = "-"
    if base.error is None:
        pairs = list(zip(entry.runs, base.runs, strict=False))
        of_speed = f"{median(a.tokens_per_s / b.tokens_per_s for a, b in pairs):.2f}"
        of_peak = f"{median(a.peak_bytes / b.peak_bytes for a, b in pairs):.2f}"
    name = label if label.startswith("torch") else f"**{label}**"
    cells = (f"{speed:,.0f}", of_speed, mfu, format_size(int(peak)), of_peak, f"{first:.1f} s")
    return f"| {name} | {' | '.join(cells)} |"


def machine(about: dict[str, Any]) -> str:
    device = about["device"]
    memory = f" with {format_size(device['memory_bytes'])}" if "memory_bytes" in device else ""
    names = ("torch", "cuda", "cudnn", "triton", "python", "colotrain")
    known = [f"{name} {device[name]}" for name in names if device.get(name)]
    peak = f"{about['peak_flops'] / 1e12:.4g} TFLOP/s, measured in {about['precision']}"
    return f"{device['name']}{memory}; {', '.join(known)}. MFU is of {peak}."


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="recipes")
    parser.add_argument("--plugins", nargs="*", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--precision", default="bf16", choices=["fp32", "bf16"])
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches per step")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--timeout", type=float, default=900, help="seconds for each process")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--budgets", action="store_true", help="gemini within device budgets, too")
    parser.add_argument("--out", type=Path, default=Path("gpu"), help="OUT.json and OUT.md")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="overrides")
    asked = parser.parse_args()
    if asked.steps < WARM_UP + 1:
        parser.error(f"--steps={asked.steps}: expected at least {WARM_UP + 1}")
    if asked.budgets and asked.device != "cuda":
        parser.error("--budgets: expected a GPU: on CPU there is no device budget")
    return asked


def main() -> int:
    asked = arguments()
    if asked.device == "cuda":
        import torch

        if not torch.cuda.is_available():
            print("error: no GPU that torch can use; --device cpu tries it out", file=sys.stderr)
            return 2
    try:
        abouts = {model: describe(model, asked) for model in asked.models}
    except (RuntimeError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    everything: dict[str, dict[str, Found]] = {}
    for model, about in abouts.items():

        def save(found: dict[str, Found], model: str = model) -> None:
            everything[model] = found
            write(asked.out, abouts, everything)

        found = benchmark(model, about, asked, save)
        print("\n".join([machine(about), "", *table(model, about, found)]), flush=True)
    failed = [e for found in everything.values() for e in found.values() if e.error is not None]
    return 1 if failed else 0


def write(out: Path, abouts: dict[str, Any], everything: dict[str, dict[str, Found]]) -> None:
    """What is known so far, as JSON and as Markdown."""
    document = {}
    lines = [machine(next(iter(abouts.values()))), ""]
    for model, found in everything.items():
        entries = {label: asdict(entry) for label, entry in found.items()}
        document[model] = {**abouts[model], "variants": entries}
        lines += table(model, abouts[model], found)
    write_atomically(out.with_suffix(".json"), json.dumps(document, indent=1))
    write_atomically(out.with_suffix(".md"), "\n".join(lines))


if __name__ == "__main__":
    sys.exit(main())
