"""Write the table at the end of docs/objectives.md: `scripts/verified_objectives.py [OBJECTIVE…]`.

Each objective trains a tiny model with random weights on random records, with `colotrain verify`:
every plugin on one and two ranks, with accumulation 1 and 4. With objectives only their rows are
written anew.
"""

from __future__ import annotations

import json
import random
import shutil
import string
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import BertConfig, BertForMaskedLM

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.dist.hf import make_directory  # noqa: E402
from tests.embedders import make_embedder  # noqa: E402

PAGE = ROOT / "docs" / "objectives.md"
MARK = "<!-- Below: made by scripts/verified_objectives.py; do not edit. -->\n"
HEADER = (
    "| objective | reference | cases that are the same | largest gradient difference |\n"
    "| --- | --- | --- | --- |\n"
)
EVERY_CASE = ("--world-sizes", "1,2", "--accumulation", "1,4", "--freeze", "none")


@dataclass(frozen=True)
class Objective:
    name: str
    reference: str
    fields: tuple[str, ...]
    """Fields of a record: those in CHOICES take one of a few values, others random text; `tokens`
    and `labels` have words and a class for each."""
    model: str = "decoder"
    settings: tuple[str, ...] = ()


CLASSES = ("bad", "fair", "good")
CHOICES: dict[str, tuple[Any, ...]] = {"label": (True, False), "class": CLASSES}
PAIR = ("prompt", "chosen", "rejected")
OBJECTIVES = (
    Objective("none: answers alone count", "one model", ("prompt", "completion")),
    Objective("dpo", "two models", PAIR),
    Objective("kto", "two models", ("prompt", "completion", "label")),
    Objective("orpo", "one model", PAIR),
    Objective("simpo", "one model", PAIR),
    Objective("reward", "one model", PAIR),
    Objective("classify", "one model", ("text", "class"), "encoder", ("data.columns.label=class",)),
    Objective("classify_tokens", "one model", ("tokens", "labels"), "encoder"),
    Objective("masked", "one model", ("text",), "encoder"),
    Objective(
        "embed",
        "the whole batch at once",
        ("query", "positive", "negative"),
        "embedder",
        ("train.embed.negatives=true", "model.args.dtype=float64"),
    ),
    Objective(
        "distill",
        "two models",
        ("prompt", "completion"),
        settings=("train.distill.teacher=teacher", "train.distill.top_k=8"),
    ),
)


def write_records(path: Path, fields: tuple[str, ...], count: int = 64) -> None:
    """Random records, by another seed each time."""
    draw = random.Random()

    def value(field: str, words: int) -> Any:
        if field in CHOICES:
            return draw.choice(CHOICES[field])
        if field == "labels":
            return draw.choices(CLASSES, k=words)
        if field == "tokens":
            return ["".join(draw.choices(string.ascii_lowercase, k=4)) for _ in range(words)]
        return "".join(draw.choices(string.ascii_lowercase + " ", k=draw.randint(4, 20)))

    lengths = [draw.randint(1, 9) for _ in range(count)]
    records = [{field: value(field, words) for field in fields} for words in lengths]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def make_models(folder: Path) -> None:
    sizes = {"vocab_size": 256, "max_position_embeddings": 64}
    make_directory("llama", folder / "decoder", **sizes)
    make_directory("llama", folder / "teacher", **sizes, intermediate_size=64)
    make_embedder(folder / "embedder", "bert")
    config = BertConfig.from_pretrained(folder / "embedder")
    shutil.copytree(folder / "embedder", folder / "encoder")
    BertForMaskedLM(config).save_pretrained(folder / "encoder")


def verified(objective: Objective, folder: Path) -> dict[str, Any]:
    """What `colotrain verify` says of an objective."""
    write_records(folder / "records.jsonl", objective.fields)
    settings = [f"model.hf={objective.model}", "data.path=records.jsonl", "data.seq_len=48"]
    if objective.model == "decoder":
        settings += ["data.tokenizer=bytes", "+model.args.pad_token_id=0"]
    if not objective.name.startswith("none"):
        settings.append(f"train.objective={objective.name}")
    settings += [*objective.settings, "train.global_batch=8"]
    command = [sys.executable, "-m", "colotrain", "verify", *settings, *EVERY_CASE, "--json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1800)
    if not done.stdout:
        raise SystemExit(f"{objective.name}: {done.stderr}")
    return json.loads(done.stdout)


def row(objective: Objective) -> str:
    with tempfile.TemporaryDirectory() as name:
        make_models(Path(name))
        cases = verified(objective, Path(name))["cases"]
    same = sum(case["passed"] for case in cases)
    largest = max(case["max_abs_gradient"] for case in cases)
    named = objective.name if ":" in objective.name else f"`{objective.name}`"
    return f"| {named} | {objective.reference} | {same} of {len(cases)} | {largest:.1e} |\n"


def main() -> None:
    for objective in OBJECTIVES:
        if sys.argv[1:] and objective.name not in sys.argv[1:]:
            continue
        new = row(objective)
        text, _, table = PAGE.read_text("utf-8").partition(MARK)
        known = {line.split(" | ")[0]: f"{line}\n" for line in table.splitlines()}
        known[new.split(" | ")[0]] = new
        firsts = [f"| {o.name}" if ":" in o.name else f"| `{o.name}`" for o in OBJECTIVES]
        rows = "".join(known.get(first, "") for first in firsts)
        PAGE.write_text(f"{text}{MARK}\n{HEADER}{rows}", "utf-8")
        print(new, end="", flush=True)


if __name__ == "__main__":
    main()
