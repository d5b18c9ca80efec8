"""Records that are tokens already: `input_ids`, with `labels` or masks beside them. No torch here.

They are what `datasets.map(tokenize)` and TRL's preparation leave behind. Their tokens are taken as
they are: nothing is added, neither a beginning nor a separator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from colotrain.data.prepare.records import BadRecord

MASKS = ("completion_mask", "assistant_masks")
"""Columns with 1 for each token of an answer (TRL's name, and transformers')."""
COLUMNS = ("input_ids", "labels", "attention_mask", *MASKS)
TEXTS = ("text", "prompt", "completion", "messages", "conversations")
"""Columns that tokens are usually made of; beside `input_ids` they are not read."""
NO_LABEL = -100

Numbers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRow:
    """A document of tokens."""

    ids: Numbers
    targets: Numbers
    """1 for each token that counts in the loss, else 0."""
    has_answers: bool
    """Whether the record says which tokens are trained on, even if all are."""
    notes: tuple[str, ...]
    unread: tuple[str, ...]
    """Names of columns that are not read."""
    images: bytes = b""
    """Text and images of a document with images (`images.packed`)."""


def holds_tokens(record: Mapping[str, Any]) -> bool:
    return record.get("input_ids") is not None


def token_row(
    record: Mapping[str, Any], *, vocab_size: int, tokenizer: str, loss_on: str
) -> TokenRow:
    """The tokens of a record that `holds_tokens`, without padding. Raises `BadRecord`.

    Labels are transformers': the tokens themselves, or -100. `loss_on=all` ignores masks, but not
    labels; under `last` the last run of a mask's ones counts.
    """
    ids = _numbers(record, "input_ids")
    if not len(ids):
        raise BadRecord("input_ids: it is empty")
    wrong = ids[(ids < 0) | (ids >= vocab_size)]
    if len(wrong) or tokenizer.startswith("bpe-"):
        fix = "set data.tokenizer to the tokenizer that made them"
        has = f"token {wrong[0]}" if len(wrong) else "tokens"
        raise BadRecord(
            f"input_ids: it has {has}, but data.tokenizer={tokenizer} has {vocab_size:,} tokens "
            f"of its own ({fix})"
        )
    targets = np.ones(len(ids), np.int64)
    beside = {name: _numbers(record, name) for name in COLUMNS[1:] if record.get(name) is not None}
    for name, numbers in beside.items():
        if len(numbers) != len(ids):
            raise BadRecord(f"{name}: it has {len(numbers)} entries, input_ids has {len(ids)}")
    if "labels" in beside:
        targets &= _labelled(ids, beside["labels"])
    for name in MASKS:
        if name in beside and loss_on != "all":
            targets &= _last_run(beside[name]) if loss_on == "last" else beside[name] != 0
    kept = _without_padding(beside.get("attention_mask", np.ones(len(ids), np.int64)))
    if not targets[kept][1:].any():
        raise BadRecord("none of its tokens is trained on")
    texts = [name for name in TEXTS if record.get(name) is not None]
    notes = [f"input_ids is trained on; {', '.join(texts)} beside it is not read"] if texts else []
    others = {name for name, value in record.items() if value is not None}
    return TokenRow(
        ids=ids[kept],
        targets=targets[kept],
        has_answers="labels" in beside or any(name in beside for name in MASKS),
        notes=tuple(notes),
        unread=tuple(sorted(others - {*COLUMNS, *TEXTS})),
    )


def _numbers(record: Mapping[str, Any], name: str) -> Numbers:
    try:
        found = np.asarray(record[name])
    except ValueError:
        found = np.empty((0, 0))
    if found.size == 0 and found.ndim == 1:
        return np.empty(0, np.int64)
    if found.ndim != 1 or found.dtype.kind not in "iub":
        raise BadRecord(f"{name}: expected a list of whole numbers")
    return found.astype(np.int64)


def _labelled(ids: Numbers, labels: Numbers) -> Numbers:
    """1 for each token that has itself as its label; other labels are refused."""
    has_label = labels != NO_LABEL
    other = np.flatnonzero(has_label & (labels != ids))
    if len(other):
        shifted = np.all((labels[:-1] == ids[1:]) | ~has_label[:-1])
        what = (
            "labels: they are shifted already; a token's label is the token itself, or -100"
            if shifted
            else f"labels: entry {other[0]} is {labels[other[0]]}, neither -100 nor the token "
            f"{ids[other[0]]} of input_ids"
        )
        raise BadRecord(what)
    return has_label.astype(np.int64)


def _last_run(mask: Numbers) -> Numbers:
    """The mask with its last run of ones alone."""
    ones = np.flatnonzero(mask)
    if not len(ones):
        return np.zeros(len(mask), np.int64)
    zeros = np.flatnonzero(mask[: ones[-1]] == 0)
    begin = zeros[-1] + 1 if len(zeros) else 0
    places = np.arange(len(mask))
    return ((places >= begin) & (places <= ones[-1])).astype(np.int64)


def _without_padding(mask: Numbers) -> slice:
    """The tokens that attention sees: padding may be at both ends."""
    seen = np.flatnonzero(mask)
    if not len(seen):
        raise BadRecord("attention_mask: it hides every token")
    kept = slice(int(seen[0]), int(seen[-1]) + 1)
    if len(seen) != kept.stop - kept.start:
        raise BadRecord("attention_mask: it hides tokens between others")
    return kept
