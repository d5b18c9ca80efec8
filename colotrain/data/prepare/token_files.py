"""Existing token files, used in place: nanoGPT's `.bin`, Megatron's `.bin` with `.idx`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from colotrain.data.prepare import corpora, vocabulary
from colotrain.data.prepare.cache import Cache
from colotrain.data.prepare.corpora import DataFile, Progress
from colotrain.data.prepare.megatron_index import read_index
from colotrain.data.prepare.prepared import NUMPY_DTYPES, Prepared, count_tokens
from colotrain.spec.plan import DataPlan

SCAN_TOKENS = 1 << 21
MEGATRON_DTYPES = {1: "uint8", 4: "int32", 5: "int64", 8: "uint16"}
"""Code in a Megatron index → type of the tokens."""


def open_token_files(
    plan: DataPlan, files: Sequence[DataFile], store: Cache, report: Progress, *, salt: str
) -> list[Prepared]:
    """A shard for each file with the splits of `sources`; without them, its end is validation.

    nanoGPT's two files become one shard with two splits.
    """
    found = []
    for file in files:
        shard = _open(file)
        shard = _with_tokenizer(plan, shard, _highest_token(shard, store, report, salt))
        if file.split is None:
            shard = _cut(shard, plan.validation_fraction)
        elif file.split == "validation":
            shard = dataclasses.replace(shard, num_train=0, num_validation=shard.num_train)
        found.append(shard)
    splits = sorted(file.split or "" for file in files)
    is_pair = splits == ["train", "validation"] and {f.kind for f in files} == {"nanogpt"}
    return _joined(found) if is_pair else found


def are_known(files: Sequence[DataFile], store: Cache, *, salt: str) -> bool:
    """Whether the token files were read before, so that opening them reads none of them."""
    return all(store.recall(_fingerprint(_open(file), salt)) is not None for file in files)


def _open(file: DataFile) -> Prepared:
    return OPENERS[file.kind](file.path.absolute())


def _open_nanogpt(file: Path) -> Prepared:
    """A whole file as training tokens: 16 bits each, or 32 where its name says so."""
    dtype = "uint32" if file.name.endswith(".u32.bin") else "uint16"
    size, width = file.stat().st_size, np.dtype(dtype).itemsize
    if size == 0 or size % width:
        expected = f"a file of {dtype} tokens, a multiple of {width} bytes (it has {size})"
        fix = "write the file again (32-bit tokens: name it NAME.u32.bin)"
        raise corpora.wrong_path(str(file), expected, fix)
    count = count_tokens(file, dtype)
    return Prepared(
        train=file, validation=file, dtype=dtype, vocab_size=0, num_train=count, num_validation=0
    )


def _open_megatron(file: Path) -> Prepared:
    """A whole pair of files as training tokens; `ConfigError` if the two files do not match."""
    index = file.with_suffix(".idx")
    code, lengths, starts, _ = read_index(index)
    if code not in MEGATRON_DTYPES:
        known = ", ".join(f"{number} {name}" for number, name in MEGATRON_DTYPES.items())
        raise corpora.wrong_path(str(index), f"a known type of token ({known})", f"it has {code}")
    dtype = MEGATRON_DTYPES[code]
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


OPENERS = {"nanogpt": _open_nanogpt, "megatron": _open_megatron}
"""Format → function that opens a file of it."""


def _with_tokenizer(plan: DataPlan, shard: Prepared, highest: int) -> Prepared:
    """The shard with its vocabulary size, and with the tokenizer of the plan."""
    file = vocabulary.tokenizer_file(plan.tokenizer)
    size = max((vocabulary.vocab_size_of(plan.tokenizer) or 0) if file else 0, highest + 1)
    separator = vocabulary.separator_of(plan.tokenizer, vocabulary.load(file)) if file else None
    return dataclasses.replace(shard, vocab_size=size, tokenizer=file, separator=separator)


def _cut(shard: Prepared, fraction: float) -> Prepared:
    """Make the last tokens validation; whole documents where their ends are known."""
    count = shard.num_train
    start = count - int(count * fraction)
    ends = shard.document_ends("train")
    if ends is not None and start < count:
        after = np.searchsorted(ends, start)
        start = int(ends[after]) if after < len(ends) else count
    return dataclasses.replace(
        shard, num_train=start, num_validation=count - start, validation_start=start
    )


def _joined(shards: list[Prepared]) -> list[Prepared]:
    """Join a train and a validation file of the same dtype to one shard with two splits."""
    train, held = sorted(shards, key=lambda shard: shard.num_train == 0)
    if train.dtype != held.dtype:
        return [train, held]
    size = max(train.vocab_size, held.vocab_size)
    changes = {"validation": held.validation, "num_validation": held.num_validation}
    return [dataclasses.replace(train, vocab_size=size, **changes)]  # type: ignore[arg-type]


def _highest_token(shard: Prepared, store: Cache, report: Progress, salt: str) -> int:
    """The highest token id in a file, which is read once and then found in the cache's index."""
    fingerprint = _fingerprint(shard, salt)
    known = store.recall(fingerprint)
    if known is None:
        with store.lock(fingerprint, report):
            known = store.recall(fingerprint) or {"highest": scan(shard, report)}
            store.remember(fingerprint, known)
    return int(known["highest"])


def _fingerprint(shard: Prepared, salt: str) -> str:
    named = [DataFile(name=shard.train.name, path=shard.train)]
    return corpora.fingerprint(named, f"{salt} highest\n")


def scan(shard: Prepared, report: Progress) -> int:
    """The highest token id; raises `ConfigError` for one below 0."""
    tokens, highest = shard.tokens("train"), 0
    for at in range(0, len(tokens), SCAN_TOKENS):
        chunk = tokens[at : at + SCAN_TOKENS]
        highest = max(highest, int(chunk.max()))
        if int(chunk.min()) < 0:
            where, fix = at + int(chunk.argmin()), "write the file again"
            raise corpora.wrong_path(str(shard.train), f"tokens from 0 on (at {where})", fix)
        report("checking tokens", at + len(chunk), len(tokens))
    return highest
