"""Which tokens of a text are its answer's: transformers' and TRL's rules. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from colotrain.data.prepare.conversations import Rendered

Tokens = np.ndarray[Any, Any]
Targets = np.ndarray[Any, Any]
"""1 for every token that counts in the loss, else 0."""
SPANS_BEGINNING = (
    "a token spans the beginning of an answer and counts as the answer's: after the prompt alone "
    "the model sees other tokens (let prompts end before a space, not after it)"
)
SPANS_END = "a token spans the end of an answer, and is trained on"


def prompt_of(text: Rendered) -> str | None:
    """The prompt of a text that is prompt and completion, None of others."""
    if text.ends and text.answers is not None and len(text.answers) == 1:
        return text.text[: text.answers[0][0]]
    return None


def targets_of(
    offsets: Any, answers: Sequence[tuple[int, int]], unusual: dict[str, None]
) -> Targets:
    """1 for every token with text of an answer, else 0."""
    places = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
    starts, ends = places[:, 0], places[:, 1]
    found = np.zeros(len(places), np.uint8)
    for start, stop in answers:
        first, after = np.searchsorted(ends, start, "right"), np.searchsorted(starts, stop, "left")
        found[first:after] = 1
        if first < after and starts[first] < start:
            unusual[SPANS_BEGINNING] = None
        if first < after and ends[after - 1] > stop:
            unusual[SPANS_END] = None
    return found


def begin_answer_(wanted: Targets, row: Tokens, prompt: Tokens, unusual: dict[str, None]) -> None:
    """Let the answer begin where the prompt's own tokens end to be those of the whole, as TRL does.

    Tokens may change before the answer: of "\\n\\n" alone GPT-2 makes one token, before a word two.
    """
    shared = min(len(row), len(prompt))
    differs = np.flatnonzero(row[:shared] != prompt[:shared])
    begin = int(differs[0]) if len(differs) else shared
    if begin < len(prompt):
        unusual[SPANS_BEGINNING] = None
        wanted[begin:] = 1


def begin_together_(rows: list[tuple[Tokens, Targets]]) -> None:
    """Let both answers of a pair begin at the same token, the first at which one of them does."""
    for (_, chosen), (_, rejected) in zip(rows[::2], rows[1::2], strict=True):
        begins = [int(np.argmax(wanted)) for wanted in (chosen, rejected) if wanted.any()]
        for wanted in (chosen, rejected):
            if begins and wanted.any():
                wanted[min(begins) : int(np.argmax(wanted))] = 1
