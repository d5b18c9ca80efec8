"""Labelled texts: the samples of classification.

Sample i is `{"input_ids": int64[seq_len], "padding_mask": int64[seq_len], "labels": int64[]}`. The
token files have the number of the class behind the tokens of each text.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from colotrain.data.prepare import vocabulary
from colotrain.data.prepare.prepared import Prepared, Split
from colotrain.spec.objectives import PADDING_MASK


class LabelledSamples:
    """One text each, with its class. What is longer than `seq_len` is cut before its last tokens,
    those that the tokenizer puts behind every text."""

    def __init__(self, prepared: Prepared, split: Split, seq_len: int) -> None:
        ends = prepared.document_ends(split)
        assert ends is not None, "records are documents"
        self.seq_len, self._ends, self._tokens = seq_len, ends, prepared.tokens(split)
        file = prepared.tokenizer
        self._num_after = len(vocabulary.frame_of(vocabulary.load(file)).after) if file else 0

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        start = int(self._ends[index - 1]) if index else 0
        *text, label = self._tokens[start : int(self._ends[index])].astype(np.int64).tolist()
        if len(text) > self.seq_len:
            kept = max(0, self.seq_len - self._num_after)
            text = [*text[:kept], *text[len(text) - self._num_after :]][: self.seq_len]
        ids, mask = torch.zeros(2, self.seq_len, dtype=torch.int64)
        ids[: len(text)], mask[: len(text)] = torch.tensor(text), 1
        return {"input_ids": ids, PADDING_MASK: mask, "labels": torch.tensor(label)}
