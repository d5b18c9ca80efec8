"""Marks of a chat template that look like special tokens, and what a tokenizer makes of them."""

from __future__ import annotations

import re
from pathlib import Path

from colotrain.data.prepare import vocabulary
from colotrain.data.prepare.conversations import renderer_of
from colotrain.spec.plan import DataPlan

MARK = re.compile(
    r"<\|[^|<>\s'\"{}]+\|>|<｜[^｜<>\s]+｜>|<(?:start|end)_of_\w+>|\[/?(?:INST|SYSTEM_PROMPT)\]"
)
"""What only special tokens look like: `<|im_end|>`, `<start_of_turn>`, `[INST]`."""


def trained_template(data: DataPlan) -> str | None:
    """The chat template that the run renders conversations with; None: none, or no such data."""
    return None if data.source == "target" else renderer_of(data).template


def unknown_marks(template: str, tokenizer: str | Path) -> list[str]:
    """The template's marks that are no tokens of a tokenizer; it is `bytes`, or as in a plan."""
    marks = list(dict.fromkeys(MARK.findall(template)))
    file = vocabulary.tokenizer_file(str(tokenizer))
    if file is None or not marks:
        return marks
    known = vocabulary.load(file)
    return [mark for mark in marks if known.token_to_id(mark) is None]


def described(marks: list[str]) -> str:
    """Say that the marks are no tokens, and what follows."""
    names, one = ", ".join(marks), len(marks) == 1
    return (
        f"{names} of the chat template {'is' if one else 'are'} no token{'s' * (not one)} of the "
        f"tokenizer: {'it is' if one else 'each is'} read and trained on as several pieces of text"
    )
