"""Documents as tokens, and which of them count in the loss, by the rules of transformers and TRL.

No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from colotrain.data.prepare.conversations import Rendered
from colotrain.data.prepare.prepared import NUMPY_DTYPES, Note
from colotrain.data.prepare.token_rows import TokenRow
from colotrain.data.prepare.vocabulary import Encoder

Document = tuple[str, Rendered | TokenRow]
"""`FILE:LINE` of a record, and the record."""
Tokens = np.ndarray[Any, Any]
Targets = np.ndarray[Any, Any]
"""1 for every token that counts in the loss, else 0."""
SPANS_BEGINNING = (
    "a token spans the beginning of an answer and counts as the answer's: after the prompt alone "
    "the model sees other tokens (let prompts end before a space, not after it)"
)
SPANS_END = "a token spans the end of an answer, and is trained on"
BEGINS_TWICE = (
    "the text begins with the token that the tokenizer puts before every text: it stands there "
    "twice, as in transformers (remove it from the text)"
)


def encode_documents(
    documents: Sequence[Document], encoder: Encoder, notes: list[Note], *, pairs: bool
) -> list[tuple[Tokens, Targets]]:
    """Tokens and targets of documents; appends to `notes`.

    `pairs`: whether each two of them are the answers of a preference pair.
    """
    texts = [found for _, found in documents if isinstance(found, Rendered)]
    plain = iter(encoder.encode([r.text for r in texts if r.answers is None]))
    marked = iter(encoder.encode_with_offsets([r.text for r in texts if r.answers is not None]))
    prompts = iter(encoder.encode([p for r in texts if (p := _prompt_of(r)) is not None]))
    dtype = np.dtype(NUMPY_DTYPES[encoder.dtype])
    rows: list[tuple[Tokens, Targets]] = []
    for place, found in documents:
        if isinstance(found, TokenRow):
            rows.append((found.ids.astype(dtype), found.targets.astype(np.uint8)))
            continue
        ids, offsets = (next(plain), None) if found.answers is None else next(marked)
        row = np.asarray(ids, dtype=dtype)
        wanted, unusual = np.ones(len(row), np.uint8), dict[str, None]()
        if found.answers is not None:
            wanted = _targets_of(offsets, found.answers, unusual)
        if _prompt_of(found) is not None:
            _begin_answer_(wanted, row, np.asarray(next(prompts), dtype=dtype), unusual)
        if found.ends:
            before = encoder.frame.before
            if before and row[:1].tolist() == [before[-1]]:
                unusual[BEGINS_TWICE] = None
            row, wanted = _as_document(row, wanted, encoder, is_prompt=found.answers is not None)
        notes += [Note(text=text, count=1, first=place) for text in unusual]
        if len(row) or pairs:
            rows.append((row, wanted))
    if pairs:
        _begin_together_(rows)
    return rows


def _as_document(
    row: Tokens, wanted: Targets, encoder: Encoder, *, is_prompt: bool
) -> tuple[Tokens, Targets]:
    """A text's tokens with what the tokenizer adds to a text, and the separator.

    The beginning is not trained on where it is a prompt's; the end always is.
    """
    before = encoder.frame.before
    after = encoder.end_after(int(row[-1]) if len(row) else None)
    framed = np.concatenate([np.asarray(part, row.dtype) for part in (before, row, after)])
    begin = np.full(len(before), 0 if is_prompt else 1, np.uint8)
    return framed, np.concatenate([begin, wanted, np.ones(len(after), np.uint8)])


def _prompt_of(text: Rendered) -> str | None:
    """The prompt of a text that is prompt and completion, None of others."""
    if text.ends and text.answers is not None and len(text.answers) == 1:
        return text.text[: text.answers[0][0]]
    return None


def _targets_of(
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


def _begin_answer_(wanted: Targets, row: Tokens, prompt: Tokens, unusual: dict[str, None]) -> None:
    """Let the answer begin where the prompt's own tokens end to be those of the whole, as TRL does.

    Tokens may change before the answer: of "\\n\\n" alone GPT-2 makes one token, before a word two.
    """
    shared = min(len(row), len(prompt))
    differs = np.flatnonzero(row[:shared] != prompt[:shared])
    begin = int(differs[0]) if len(differs) else shared
    if begin < len(prompt):
        unusual[SPANS_BEGINNING] = None
        wanted[begin:] = 1


def _begin_together_(rows: list[tuple[Tokens, Targets]]) -> None:
    """Let both answers of a pair begin at the same token, the first at which one of them does."""
    for (_, chosen), (_, rejected) in zip(rows[::2], rows[1::2], strict=True):
        begins = [int(np.argmax(wanted)) for wanted in (chosen, rejected) if wanted.any()]
        for wanted in (chosen, rejected):
            if begins and wanted.any():
                wanted[min(begins) : int(np.argmax(wanted))] = 1
