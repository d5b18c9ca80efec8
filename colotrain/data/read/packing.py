"""Packing prepared tokens into samples: windows of a stream, whole documents, or one each.

Sample i is `{"input_ids": int64[seq_len], "labels": int64[seq_len]}`; with `isolate` also
`"document_ids"`, which number the documents of a sample from 0 (padding is -1). Labels are
already shifted: a model does not shift them again. For `data.read.masking` they are not shifted,
and rows with padding have `document_ids`. Everything is read from memory maps.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from colotrain.data.prepare import vocabulary
from colotrain.data.prepare.prepared import OF_BAD_ANSWER, Prepared, Split
from colotrain.errors import ConfigError, Problem
from colotrain.spec.objectives import GOOD, IGNORE_INDEX, MARGIN, PADDING_MASK, RelatedPlan
from colotrain.spec.plan import DataPlan

PAIRING = 44
"""Key of the order in which answers are paired with other prompts."""


class TokenSamples:
    """Consecutive windows of `seq_len` tokens, with the next tokens as labels.

    With `isolate` a document's last token has no label, because the next document cannot be
    predicted.
    """

    def __init__(
        self,
        prepared: Prepared,
        split: Split,
        seq_len: int,
        *,
        isolate: bool = False,
        shift: int = 1,
    ) -> None:
        self.seq_len, self.isolate, self.shift = seq_len, isolate, shift
        self._tokens = prepared.tokens(split)
        self._targets = prepared.targets(split)
        self._ends = prepared.document_ends(split) if isolate else None
        self._separator = prepared.separator

    def __len__(self) -> int:
        return max(0, (len(self._tokens) - self.shift) // self.seq_len)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        start = index * self.seq_len
        stop = start + self.seq_len + self.shift
        window = torch.from_numpy(self._tokens[start:stop].astype(np.int64))
        labels = window[self.shift :]
        if self._targets is not None:
            in_loss = torch.from_numpy(self._targets[start + self.shift : stop].astype(bool))
            labels = torch.where(in_loss, labels, IGNORE_INDEX)
        if not self.isolate:
            return {"input_ids": window[: self.seq_len], "labels": labels}
        documents = self._documents(start, stop)
        same = documents[1:] == documents[:-1]
        return {
            "input_ids": window[:-1],
            "labels": torch.where(same, labels, IGNORE_INDEX),
            "document_ids": documents[:-1],
        }

    def _documents(self, start: int, stop: int) -> Tensor:
        """Number of each token's document, counted from 0 in this window."""
        if self._ends is not None:
            found = np.searchsorted(self._ends, np.arange(start, stop), side="right")
        else:
            is_end = self._tokens[start : stop - 1] == self._separator
            found = np.concatenate([[0], np.cumsum(is_end)])
        return torch.from_numpy((found - found[0]).astype(np.int64))


class DocumentSamples:
    """Samples of whole documents in order, one (`most=1`) or as many as fit, then padding.

    A document longer than `seq_len` is truncated. A document's last token has no label.
    """

    def __init__(
        self,
        prepared: Prepared,
        split: Split,
        seq_len: int,
        *,
        isolate: bool = False,
        most: int | None = None,
        shift: int = 1,
        marks_padding: bool = False,
    ) -> None:
        ends = prepared.document_ends(split)
        if ends is None:
            raise _no_documents("whole documents")
        self.seq_len, self.isolate, self.shift = seq_len, isolate, shift
        self.marks_padding = marks_padding and not isolate
        self._tokens, self._targets = prepared.tokens(split), prepared.targets(split)
        self._ends = ends
        self._first = _rows(ends, seq_len, most)

    def __len__(self) -> int:
        return len(self._first) - 1

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        inputs = torch.zeros(self.seq_len, dtype=torch.int64)
        labels = torch.full((self.seq_len,), IGNORE_INDEX)
        documents = torch.full((self.seq_len,), -1)
        at = 0
        first = int(self._first[index])
        for document in range(first, int(self._first[index + 1])):
            ids, targets = self._document(document)
            stop = at + len(ids)
            inputs[at:stop] = ids
            shifted = torch.where(targets, ids, IGNORE_INDEX)[self.shift :]
            labels[at : at + len(shifted)] = shifted
            documents[at:stop] = document - first
            at = stop
        sample = {"input_ids": inputs, "labels": labels}
        if self.marks_padding:
            sample[PADDING_MASK] = (documents >= 0).long()
        return {**sample, "document_ids": documents} if self.isolate else sample

    def _document(self, index: int) -> tuple[Tensor, Tensor]:
        """The tokens of a document, as many as fit, and whether each counts in the loss."""
        start = int(self._ends[index - 1]) if index else 0
        stop = min(int(self._ends[index]), start + self.seq_len)
        ids = torch.from_numpy(self._tokens[start:stop].astype(np.int64))
        if self._targets is None:
            return ids, torch.ones(len(ids), dtype=torch.bool)
        return ids, torch.from_numpy(self._targets[start:stop].astype(bool))


class PairSamples:
    """Preference pairs: the values are [2, seq_len], the chosen document and the rejected one.

    Where pairs have margins, `margin` is one [].
    """

    def __init__(
        self, documents: DocumentSamples, margins: np.ndarray[Any, Any] | None = None
    ) -> None:
        self.documents, self._margins = documents, margins

    def __len__(self) -> int:
        return len(self.documents) // 2

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        chosen, rejected = self.documents[2 * index], self.documents[2 * index + 1]
        pair = {name: torch.stack([chosen[name], rejected[name]]) for name in chosen}
        if self._margins is not None:
            pair[MARGIN] = torch.tensor(float(self._margins[index]))
        return pair


class Documents:
    """The documents of a split, whole: the tokens of each, and what `targets` has of them."""

    def __init__(self, prepared: Prepared, split: Split) -> None:
        ends = prepared.document_ends(split)
        if ends is None:
            raise _no_documents("whole documents")
        self._tokens, self._targets = prepared.tokens(split), prepared.targets(split)
        self._ends = ends

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        start = int(self._ends[index - 1]) if index else 0
        stop = int(self._ends[index])
        ids = self._tokens[start:stop].astype(np.int64)
        if self._targets is None:
            return ids, np.ones(len(ids), np.uint8)
        return ids, self._targets[start:stop]


class RatedSamples:
    """Answers that are good or bad, each with another record's answer to the same prompt.

    The rows of `input_ids` and `labels` [2, seq_len] are a record's prompt with its own answer, and
    with that of the record before it in an order which depends on the number of records alone. So
    each answer stands with one other prompt, in every epoch, and however batches are divided.
    """

    def __init__(self, documents: Any, seq_len: int) -> None:
        assert len(documents) != 1, "refused when the data was prepared"
        self.documents, self.seq_len = documents, seq_len
        order = np.argsort(np.random.Philox(key=PAIRING).random_raw(len(documents)), kind="stable")
        self._others = np.empty(len(documents), np.int64)
        self._others[order] = np.roll(order, 1)

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        ids, targets = self.documents[index]
        other_ids, other_targets = self.documents[int(self._others[index])]
        prompt, before = _first_target(targets), _first_target(other_targets)
        other_ids = np.concatenate([ids[:prompt], other_ids[before:]])
        other_targets = np.concatenate([targets[:prompt], other_targets[before:]])
        rows = [self._row(ids, targets), self._row(other_ids, other_targets)]
        sample = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        is_good = not (targets == OF_BAD_ANSWER).any()
        return {**sample, GOOD: torch.tensor(int(is_good))}

    def _row(self, ids: np.ndarray[Any, Any], targets: np.ndarray[Any, Any]) -> dict[str, Tensor]:
        """A document, cut at `seq_len` or padded, with the next tokens as labels."""
        ids, targets = ids[: self.seq_len], targets[: self.seq_len]
        inputs, labels = np.zeros(self.seq_len, np.int64), np.full(self.seq_len, IGNORE_INDEX)
        inputs[: len(ids)] = ids
        labels[: len(ids) - 1] = np.where(targets > 0, ids, IGNORE_INDEX)[1:]
        return {"input_ids": torch.from_numpy(inputs), "labels": torch.from_numpy(labels)}


class RelatedSamples:
    """Texts that belong together: `input_ids` and `attention_mask` [texts, seq_len].

    A text that is cut keeps the tokens that the tokenizer puts after it.
    """

    def __init__(self, documents: Any, seq_len: int, plan: RelatedPlan) -> None:
        self.documents, self.seq_len, self.plan = documents, seq_len, plan

    def __len__(self) -> int:
        return len(self.documents) // len(self.plan.columns)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        num = len(self.plan.columns)
        ids = torch.full((num, self.seq_len), self.plan.pad_id)
        seen = torch.zeros((num, self.seq_len), dtype=torch.int64)
        for row in range(num):
            text = torch.from_numpy(self._cut(self.documents[num * index + row][0]))
            ids[row, : len(text)], seen[row, : len(text)] = text, 1
        return {"input_ids": ids, "attention_mask": seen}

    def _cut(self, ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        end = np.array(self.plan.end_ids, np.int64)
        if len(ids) <= self.seq_len:
            return ids
        return np.concatenate([ids[: self.seq_len - len(end)], end])


class LabelledSamples:
    """Texts for classification: `input_ids` and `padding_mask` [seq_len], and `labels` [].

    The token files have the number of the class behind the tokens of each text. What is longer than
    `seq_len` is cut before its last tokens, those that the tokenizer puts behind every text.
    """

    def __init__(self, prepared: Prepared, split: Split, seq_len: int) -> None:
        ends = prepared.document_ends(split)
        assert ends is not None, "records are documents"
        self.seq_len, self._ends, self._tokens = seq_len, ends, prepared.tokens(split)
        self._targets = prepared.targets(split)
        file = prepared.tokenizer
        self._num_after = len(vocabulary.frame_of(vocabulary.load(file)).after) if file else 0

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        *text, label = self._of(self._tokens, index)
        return {**self._padded(text), "labels": torch.tensor(label)}

    def _of(self, numbers: np.ndarray[Any, Any], index: int) -> list[int]:
        start = int(self._ends[index - 1]) if index else 0
        found: list[int] = numbers[start : int(self._ends[index])].astype(np.int64).tolist()
        return found

    def _cut(self, text: list[int]) -> list[int]:
        if len(text) <= self.seq_len:
            return text
        kept = max(0, self.seq_len - self._num_after)
        return [*text[:kept], *text[len(text) - self._num_after :]][: self.seq_len]

    def _padded(self, text: list[int]) -> dict[str, Tensor]:
        text = self._cut(text)
        ids, mask = torch.zeros(2, self.seq_len, dtype=torch.int64)
        ids[: len(text)], mask[: len(text)] = torch.tensor(text), 1
        return {"input_ids": ids, PADDING_MASK: mask}


class LabelledWords(LabelledSamples):
    """Words for classification: `input_ids`, `padding_mask` and `labels` [seq_len].

    A word's first token has its class as its label, all others have -100.
    """

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        assert self._targets is not None, "words have classes"
        classes = torch.tensor(self._cut(self._of(self._targets, index)))
        labels = torch.full((self.seq_len,), IGNORE_INDEX)
        labels[: len(classes)] = torch.where(classes > 0, classes - 1, IGNORE_INDEX)
        return {**self._padded(self._of(self._tokens, index)), "labels": labels}


def _first_target(targets: np.ndarray[Any, Any]) -> int:
    """Position of the first token that counts in the loss; the length where none does."""
    return int(np.argmax(targets > 0)) if targets.any() else len(targets)


class Concatenation:
    """Several datasets, one after the other, as one."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = [part for part in parts if len(part)]
        self._starts = [0]
        for part in self.parts:
            self._starts.append(self._starts[-1] + len(part))

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        part = bisect_right(self._starts, index) - 1
        return self.parts[part][index - self._starts[part]]


def pack(shards: Sequence[Prepared], plan: DataPlan, split: Split) -> Any:
    """The samples of a split, packed by `data.packing` and `data.isolate`."""
    packing = packing_of(shards, plan)
    if plan.isolate and packing == "stream":
        for shard in shards:
            if not shard.has_documents and shard.index is None and shard.separator is None:
                raise _no_documents("documents with known ends")
    parts = [_pack_one(shard, plan, split, packing) for shard in shards if shard.count(split)]
    packed = parts[0] if len(parts) == 1 else Concatenation(parts)
    if plan.related is not None:
        return RelatedSamples(packed, plan.seq_len, plan.related)
    return RatedSamples(packed, plan.seq_len) if plan.rated else packed


def packing_of(shards: Sequence[Prepared], plan: DataPlan) -> str:
    """Resolve `data.packing=auto`: one document per sample where records have answers."""
    if plan.packing != "auto" or plan.counts_samples:
        return "none" if plan.counts_samples else plan.packing
    return "none" if plan.classes or any(shard.has_targets for shard in shards) else "stream"


def _pack_one(shard: Prepared, plan: DataPlan, split: Split, packing: str) -> Any:
    shift = 1 if plan.masked is None else 0
    if packing == "stream":
        return TokenSamples(shard, split, plan.seq_len, isolate=plan.isolate, shift=shift)
    if plan.classes:
        kind = LabelledWords if plan.classes_of_words else LabelledSamples
        return kind(shard, split, plan.seq_len)
    most = 1 if packing == "none" else None
    if plan.rated or plan.related is not None:
        return Documents(shard, split)
    if plan.pairs:
        return PairSamples(
            DocumentSamples(shard, split, plan.seq_len, most=1, marks_padding=plan.marks_padding),
            shard.margins(split),
        )
    return DocumentSamples(
        shard,
        split,
        plan.seq_len,
        isolate=plan.isolate or not shift,
        most=most,
        shift=shift,
        marks_padding=plan.marks_padding,
    )


def _lengths(ends: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.diff(ends, prepend=0)


def _rows(ends: np.ndarray[Any, Any], seq_len: int, most: int | None) -> np.ndarray[Any, Any]:
    """Index of the first document of each sample, and at the end the number of documents."""
    if most == 1:
        return np.arange(len(ends) + 1)
    first, room = [0], seq_len
    for index, length in enumerate(np.minimum(_lengths(ends), seq_len).tolist()):
        if length > room:
            first.append(index)
            room = seq_len
        room -= length
    return np.array([*first, len(ends)] if len(ends) else [0])


def _no_documents(what: str) -> ConfigError:
    expected = f"{what} (these token files do not say where documents end)"
    fix = "set data.tokenizer to the one that made them, or data.packing=stream data.isolate=false"
    return ConfigError([Problem(key="data.packing", expected=expected, fix=fix)])
