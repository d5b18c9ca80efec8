"""The `.idx` of Megatron-LM's pair of files: positions of sequences and documents in the `.bin`.

The index (see megatron/core/datasets/indexed_dataset.py) has a magic number, a version, a code of
the tokens' type, and the numbers of sequences and of document marks; then every sequence's length
(int32) and first byte (int64), and the first sequence of each document (int64).
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import numpy as np

from colotrain.data.prepare.corpora import wrong_path
from colotrain.data.prepare.formats import MEGATRON_MAGIC

HEADER = struct.Struct("<9sQBQQ")


def document_ends(index: Path) -> np.ndarray[Any, Any]:
    """Return the position in the `.bin`, in tokens, of each document's end."""
    _, lengths, _, marks = read_index(index)
    before = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    ends: np.ndarray[Any, Any] = before[marks[1:]]
    return np.unique(ends[ends > 0])


def read_index(index: Path) -> tuple[int, Any, Any, Any]:
    """Return the token type's code, the sequences' lengths and first bytes, and document marks."""
    wrong = wrong_path(
        str(index), "an index of Megatron's, version 1, that is whole", "copy it again"
    )
    with index.open("rb") as file:
        head, size = file.read(HEADER.size), os.fstat(file.fileno()).st_size
        if len(head) < HEADER.size:
            raise wrong
        magic, version, code, num_sequences, num_marks = HEADER.unpack(head)
        num_bytes = 12 * num_sequences + 8 * num_marks
        if (magic, version) != (MEGATRON_MAGIC, 1) or num_bytes > size - HEADER.size:
            raise wrong
        data = file.read(num_bytes)
    lengths = np.frombuffer(data, "<i4", num_sequences)
    starts = np.frombuffer(data, "<i8", num_sequences, lengths.nbytes)
    marks = np.frombuffer(data, "<i8", num_marks, lengths.nbytes + starts.nbytes)
    if (lengths < 0).any() or (marks < 0).any() or (marks > num_sequences).any():
        raise wrong
    return code, lengths, starts, marks
