"""Samples for masked language modelling: tokens of which some are hidden.

Sample i is `{"input_ids", "labels", "attention_mask": int64[seq_len]}`; labels are the tokens where
some are hidden, at their own places.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from colotrain.data.prepare.prepared import Prepared, Split
from colotrain.data.read.packing import pack
from colotrain.spec.objectives import IGNORE_INDEX, MaskedPlan
from colotrain.spec.plan import DataPlan

MASK, RANDOM = 0.8, 0.1
"""Shares of the targets that the mask token and a random token replace; the others stay."""


def open_masked(shards: Sequence[Prepared], plan: DataPlan, split: Split) -> Any:
    """The samples of a split, packed as always; those of text get the tokenizer's frame.

    Files of tokens are taken as they are: they have the special tokens that their maker wanted.
    """
    masked = plan.masked
    assert masked is not None
    if any(shard.num_bytes_train is None for shard in shards):
        masked = dataclasses.replace(masked, begin_id=None, end_id=None)
    rows = pack(shards, dataclasses.replace(plan, seq_len=room_in(plan.seq_len, masked)), split)
    return MaskedTokens(rows, masked, plan.seq_len)


def room_in(seq_len: int, plan: MaskedPlan) -> int:
    """Number of tokens of text in a sample."""
    return seq_len - (plan.begin_id is not None) - (plan.end_id is not None)


class MaskedTokens:
    """Rows of tokens, framed, padded and partly hidden.

    The draws are those of numpy's global generator, which `loader.read_batch` seeds for every
    position, and whose stream is the same in every version (NEP 19).
    """

    def __init__(self, rows: Any, plan: MaskedPlan, seq_len: int) -> None:
        self.rows, self.plan, self.seq_len = rows, plan, seq_len
        self._special = torch.tensor(plan.special_ids, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row, plan = self.rows[index], self.plan
        documents = row.get("document_ids")
        length = len(row["input_ids"]) if documents is None else int((documents >= 0).sum())
        text, targets = row["input_ids"][:length], row["labels"][:length]
        begin = [] if plan.begin_id is None else [plan.begin_id]
        ended = plan.end_id is None or (length > 0 and int(text[-1]) == plan.end_id)
        end = [] if ended else [plan.end_id]
        ids = torch.tensor([*begin, *text.tolist(), *end])
        labels = torch.full((self.seq_len,), IGNORE_INDEX)
        labels[len(begin) : len(begin) + length] = targets
        padded = torch.full((self.seq_len,), plan.pad_id)
        padded[: len(ids)] = ids
        seen = (torch.arange(self.seq_len) < len(ids)).long()
        hidden, labels = self._hide(padded, labels)
        return {"input_ids": hidden, "labels": labels, "attention_mask": seen}

    def _hide(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Hide some of the tokens that have a label; the others lose theirs.

        The rule is that of BERT (Devlin et al. 2019), drawn for each token by itself.
        """
        plan = self.plan
        chance, kind, other = torch.from_numpy(np.random.random_sample((3, len(ids))))
        may = (labels != IGNORE_INDEX) & ~torch.isin(ids, self._special)
        chosen = may & (chance < plan.probability)
        instead = ids.where(kind >= MASK + RANDOM, (other * plan.vocab_size).long())
        instead[kind < MASK] = plan.mask_id
        return instead.where(chosen, ids), labels.where(chosen, IGNORE_INDEX)
