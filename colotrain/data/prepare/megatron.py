"""Megatron-LM's pair of files: tokens in `.bin`, positions of documents in `.idx`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from colotrain.data.prepare import corpora
from colotrain.data.prepare.megatron_index import read_index
from colotrain.data.prepare.prepared import NUMPY_DTYPES, Prepared, count_tokens

DTYPES = {1: "uint8", 4: "int32", 5: "int64", 8: "uint16"}


def open_pair(file: Path) -> Prepared:
    """The whole pair as training tokens; `ConfigError` if the two files do not match."""
    index = file.with_suffix(".idx")
    code, lengths, starts, _ = read_index(index)
    if code not in DTYPES:
        known = ", ".join(f"{number} {name}" for number, name in DTYPES.items())
        raise corpora.wrong_path(str(index), f"a known type of token ({known})", f"it has {code}")
    dtype = DTYPES[code]
    width = np.dtype(NUMPY_DTYPES[dtype]).itemsize
    before = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    if not file.is_file() or count_tokens(file, dtype) != before[-1]:
        expected = f"{before[-1]} tokens of {dtype}, as {index.name} says"
        raise corpora.wrong_path(str(file), expected, "copy both files of the pair again")
    if not np.array_equal(starts, before[:-1] * width):
        expected = "sequences that follow one another without gaps"
        raise corpora.wrong_path(str(index), expected, "write the pair again")
    return Prepared(
        train=file,
        validation=file,
        dtype=dtype,
        vocab_size=0,
        num_train=int(before[-1]),
        num_validation=0,
        index=index,
    )
