"""Conversations with images: samples with what the model directory's own processor makes of them.

A sample is `{"input_ids": int64[seq_len], "labels": int64[seq_len]}`, the processor's other rows of
tokens, such as `attention_mask`, and its entries of images. Labels are already shifted. The first
dimension of an entry of images is of images, or of their patches, of which samples have different
numbers; a batch pads it. Where the processor would join those of all samples, `rows_of_ENTRY` has
the number of a sample's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from colotrain.data.prepare.images import Document, open_processor, unpacked
from colotrain.data.prepare.prepared import Prepared, Split, image_documents
from colotrain.errors import ColotrainError, ConfigError, Problem
from colotrain.spec.objectives import IGNORE_INDEX, ROWS_OF
from colotrain.spec.plan import DataPlan

MOST_DESCRIBED = 1000
"""Samples whose images `ImageSamples.described` looks at."""


class ImageSamples:
    """One conversation each, cut at `seq_len` behind its last image, or padded."""

    def __init__(self, prepared: Prepared, split: Split, plan: DataPlan) -> None:
        ends, targets = prepared.document_ends(split), prepared.targets(split)
        assert ends is not None, "records are documents"
        assert targets is not None, "conversations have answers"
        assert prepared.joins is not None, "records have images"
        self.seq_len, self.folder, self.joins = plan.seq_len, plan.tokenizer, prepared.joins
        self._ends, self._targets, self._tokens = ends, targets, prepared.tokens(split)
        self._file, self._image_ends = image_documents(prepared, split)
        self._check_lengths()

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        document, processor = self.document(index), open_processor(self.folder)
        found = processor(
            text=[document.text],
            images=[document.decoded(self._file.parent)],
            add_special_tokens=False,
            return_tensors="pt",
        )
        ids = found["input_ids"][0]
        start = int(self._ends[index - 1]) if index else 0
        stop = int(self._ends[index])
        if not np.array_equal(ids.numpy(), self._tokens[start:stop]):
            problem = f"sample {index}: the processor makes other tokens than in the preparation"
            raise ColotrainError(problem, f"prepare the data again: remove {self._file.parent}")
        targets = torch.from_numpy(self._targets[start:stop].astype(bool))
        labels = torch.full_like(ids, IGNORE_INDEX)
        labels[:-1] = torch.where(targets, ids, IGNORE_INDEX)[1:]
        rows = {n: t[0] for n, t in found.items() if n not in self.joins}
        pad = int(processor.tokenizer.pad_token_id)
        sample = {
            name: self._fitted(row, pad * (name == "input_ids")) for name, row in rows.items()
        }
        sample["labels"] = self._fitted(labels, IGNORE_INDEX)
        for name, joins in self.joins.items():
            sample[name] = found[name] if joins else found[name][0]
            if joins:
                sample[ROWS_OF + name] = torch.tensor(len(found[name]))
        return sample

    def _fitted(self, row: Tensor, padding: int) -> Tensor:
        fitted = torch.full((self.seq_len,), padding, dtype=row.dtype)
        fitted[: len(row)] = row[: self.seq_len]
        return fitted

    def document(self, index: int, *, whole: bool = True) -> Document:
        """The text and the images of a sample; without `whole`, without the bytes of images."""
        start = int(self._image_ends[index - 1]) if index else 0
        with self._file.open("rb") as file:
            file.seek(start)
            size = int(self._image_ends[index]) - start
            return unpacked(file.read(size) if whole else file.readline(size))

    def described(self) -> dict[str, Any]:
        """Facts about the images of the first `MOST_DESCRIBED` samples."""
        chosen = range(min(len(self), MOST_DESCRIBED))
        found = [self.document(index, whole=False) for index in chosen]
        sizes = [size for document in found for size in document.sizes]
        counts = [document.placeholders for document in found]
        return {
            "samples": len(found),
            "images": len(sizes),
            "smallest": min(sizes, key=math.prod, default=None),
            "largest": max(sizes, key=math.prod, default=None),
            "placeholders": {"min": min(counts, default=0), "max": max(counts, default=0)},
        }

    def _check_lengths(self) -> None:
        """Refuse samples that would be cut within their images."""
        longer = np.flatnonzero(np.diff(self._ends, prepend=0) > self.seq_len)
        needed = [self.document(int(index), whole=False).needed for index in longer]
        cut = [number for number in needed if number > self.seq_len]
        if cut:
            expected = f"at least {max(cut)}: {len(cut)} samples would be cut within their images"
            fix = "raise it, or let the processor make fewer placeholders (its files say how)"
            value = self.seq_len
            raise ConfigError(
                [Problem(key="data.seq_len", value=value, expected=expected, fix=fix)]
            )


def open_images(shards: Sequence[Prepared], plan: DataPlan, split: Split) -> Any:
    """The samples of a split."""
    (shard,) = shards
    return ImageSamples(shard, split, plan)


def pad_together(samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch of samples, whose entries are padded with zeros at their ends to one shape."""
    return {name: _padded([sample[name] for sample in samples]) for name in samples[0]}


def _padded(tensors: Sequence[Tensor]) -> Tensor:
    shape = [max(sizes) for sizes in zip(*(t.shape for t in tensors), strict=True)]
    whole = tensors[0].new_zeros((len(tensors), *shape))
    for row, tensor in zip(whole, tensors, strict=True):
        row[tuple(slice(size) for size in tensor.shape)] = tensor
    return whole
