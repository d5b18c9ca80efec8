"""A new recipe as text, with comments that say what was found and offer what is often wanted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from colotrain.migrate.recipes import nested

BATCHES = (32, 16, 8)
"""Global batches that a recipe is given."""
COMMENTS = {
    "plugin": "the fastest that fits; or zero1, zero2, zero3, fsdp-hybrid, gemini",
    "plugin.name": "the fastest that fits; or zero1, zero2, zero3, fsdp-hybrid, gemini",
    "train.epochs": "or max_steps",
    "train.global_batch": "samples of a step, however many ranks read them",
    "train.micro_batch": "samples of a rank at a time: the most that surely fit",
}
ORDER = ("plugin", "model", "data", "adapter", "freeze", "train", "optim", "checkpoint")
OFFERS = {
    "data": "validation_path: validation.jsonl   # instead of a share of data.path",
    "adapter": "{name: lora, rank: 16, alpha: 32, targets: all-linear}   # with optim.lr: 2e-4",
    "freeze": '{patterns: ["*embed*"]}',
    "train": "eval_every: 50   # steps",
    "checkpoint": "{every: 200}   # steps",
}
"""What else is often wanted, by section: written as comments, which may be taken away."""


def render(settings: Mapping[str, Any], comments: Sequence[str]) -> str:
    """Return a recipe as text, with `comments` above all and `OFFERS` as comments."""
    lines = [f"# {' '.join(_printable(text).split())}" for text in comments]
    sections = nested(settings)
    for section in sorted({*sections, *OFFERS}, key=_place):
        offer = OFFERS.get(section, "") if section != "data" or "data.path" in settings else ""
        lines.append("")
        if section not in sections:
            lines.append(f"# {section}: {offer}")
            continue
        content = sections[section]
        if not isinstance(content, dict):
            lines.append(_line(section, content, section))
            continue
        lines.append(f"{section}:")
        lines += [f"  {_line(name, value, f'{section}.{name}')}" for name, value in content.items()]
        is_offered = offer and not offer.startswith("{") and offer.partition(":")[0] not in content
        lines += [f"  # {offer}"] if is_offered else []
    return "\n".join([*lines, ""])


def _place(section: str) -> tuple[int, str]:
    return (ORDER.index(section) if section in ORDER else len(ORDER), section)


def _line(name: str, value: Any, key: str) -> str:
    import yaml

    text = yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("...\n")
    is_chosen = key in COMMENTS and value in ("auto", *BATCHES, 1)
    return f"{name}: {text.strip()}" + (f"   # {COMMENTS[key]}" if is_chosen else "")


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)
