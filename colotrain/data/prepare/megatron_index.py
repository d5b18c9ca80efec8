"""The `.idx` of Megatron-LM's pair of files: positions of sequences and documents in the `.bin`.

The index (see megatron/core/datasets/indexed_dataset.py) has a magic number, a version, a code of
the tokens' type, and the numbers of sequences and of document marks; then every sequence's length
(int32) and first byte (int64), and the first sequence of each document (int64).
"""

from __future__ import annotations

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
    data = index.read_bytes()
    try:
        magic, version, code, num_sequences, num_marks = HEADER.unpack_from(data)
        lengths = np.frombuffer(data, "<i4", num_sequences, HEADER.size)
        at = HEADER.size + lengths.nbytes
        starts = np.frombuffer(data, "<i8", num_sequences, at)
        marks = np.frombuffer(data, "<i8", num_marks, at + starts.nbytes)
        whole = magic == MEGATRON_MAGIC and version == 1
        whole = whole and (marks[-1:] <= num_sequences).all() and (lengths >= 0).all()
    except (struct.error, ValueError):
        whole = False
    if not whole:
        expected = "an index of Megatron's, version 1, that is whole"
        raise wrong_path(str(index), expected, "copy it again")
    return code, lengths, starts, marks
