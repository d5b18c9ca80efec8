"""Prepared data: token files and their metadata. No torch here."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from colotrain.data.prepare.megatron_index import document_ends

NUMPY_DTYPES = {"uint16": "<u2", "uint32": "<u4", "uint8": "u1", "int32": "<i4", "int64": "<i8"}
Split = Literal["train", "validation"]
OF_BAD_ANSWER = 2
"""What `targets` has, instead of 1, for a token of an answer whose label says that it is bad."""
MOST_NOTES = 50
"""Different notes that are kept; a note should not quote its record."""
HASHED_DOCUMENTS = 1 << 16
"""Documents that are compared at once."""
MOST_HASHED = 1 << 20
"""Tokens of a document's beginning, and of its end, that are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What a user should know about the data: what is not read, not rendered, or cut."""

    text: str
    count: int = 0
    """Number of records that it is about; 0: it is about files."""
    first: str = ""
    """`FILE:LINE` of the first of them."""
    is_unread: bool = False
    """Whether `text` is the name of a field without a meaning, such as an id, that is not read:
    told by `data inspect` alone."""

    def __str__(self) -> str:
        if not self.count:
            return self.text
        records = "1 record" if self.count == 1 else f"{self.count:,} records"
        return f"{records}: {self.text} (first {self.first})"


def merge_notes(notes: Sequence[Note]) -> list[Note]:
    """Add up the counts of notes with the same text, in the order of their first records."""
    merged: dict[bool, dict[str, Note]] = {False: {}, True: {}}
    for note in notes:
        alike = merged[note.is_unread]
        count = note.count + (alike[note.text].count if note.text in alike else 0)
        if note.text in alike or len(alike) < MOST_NOTES:
            alike[note.text] = replace(alike.get(note.text, note), count=count)
    return [note for alike in merged.values() for note in alike.values()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Token files that are ready to be read, and metadata about their content."""

    train: Path
    validation: Path
    """Raw little-endian numbers of type `dtype`; may be the same file as `train`."""
    dtype: str
    """A key of `NUMPY_DTYPES`; colotrain itself writes uint16 or uint32."""
    vocab_size: int
    """Every token id is below this. For `bpe-SIZE` it is SIZE, even if training found fewer."""
    num_train: int
    num_validation: int
    """Number of tokens of each split."""
    train_start: int = 0
    validation_start: int = 0
    """Position of each split's first token in its file."""
    tokenizer: Path | None = None
    """The tokenizer.json that made the tokens; None for bytes, or where it is unknown."""
    num_bytes_train: int | None = None
    num_bytes_validation: int | None = None
    """UTF-8 bytes of the text of each split; None for token files."""
    separator: int | None = None
    """Token that ends a document; None where unknown."""
    has_documents: bool = False
    """Whether there are files with the ends of documents (`document_ends`)."""
    has_targets: bool = False
    """Whether there are files with a number per token, 1 if it counts in the loss (`targets`)."""
    has_margins: bool = False
    """Whether there are files with the margin of each pair of documents (`margins`)."""
    target_dtype: str = "uint8"
    """A key of `NUMPY_DTYPES`: uint16 where targets are classes."""
    index: Path | None = None
    """Megatron's `.idx`, with the ends of the token file's documents."""
    num_bad: int = 0
    """Number of records that were left out (`data.on_bad=skip`)."""
    bad: tuple[str, ...] = ()
    """The first bad records: `FILE:LINE: what is wrong`."""
    notes: tuple[Note, ...] = ()
    joins: dict[str, bool] | None = None
    """Entry of images → whether those of samples are joined along its first dimension, instead of
    padded; None: documents have no images."""

    def count(self, split: Split) -> int:
        return self.num_train if split == "train" else self.num_validation

    def tokens(self, split: Split) -> np.ndarray[Any, Any]:
        """The split's tokens, memory-mapped from their file."""
        is_train = split == "train"
        path = self.train if is_train else self.validation
        start = self.train_start if is_train else self.validation_start
        return _map(path, NUMPY_DTYPES[self.dtype], start=start, count=self.count(split))

    def document_ends(self, split: Split) -> np.ndarray[Any, Any] | None:
        """Ends of documents as positions in `tokens(split)`, ascending; None where unknown."""
        if self.index is not None:
            start = self.train_start if split == "train" else self.validation_start
            ends = document_ends(self.index) - start
            return ends[(ends > 0) & (ends <= self.count(split))]
        if not self.has_documents:
            return None
        path = beside(self.train if split == "train" else self.validation, "ends")
        return _map(path, "<i8", start=0, count=path.stat().st_size // 8)

    def count_longer(self, split: Split, seq_len: int) -> int:
        """Number of documents of more than `seq_len` tokens; 0 where documents are unknown."""
        ends = self.document_ends(split)
        return 0 if ends is None else int((np.diff(ends, prepend=0) > seq_len).sum())

    def count_cut_off(self, split: Split, seq_len: int) -> tuple[int, int]:
        """Count documents that keep no target when they are cut at `seq_len`, and lost targets."""
        ends, targets = self.document_ends(split), self.targets(split)
        if ends is None:
            return 0, 0
        lengths = np.diff(ends, prepend=0)
        if targets is None:
            return 0, int(np.maximum(lengths - seq_len, 0).sum())
        empty = lost = 0
        for end, length in zip(ends[lengths > seq_len], lengths[lengths > seq_len], strict=True):
            start, cut = end - length, end - length + seq_len
            empty += not targets[start + 1 : cut].any()  # the first token is no label
            lost += int(np.count_nonzero(targets[cut:end]))
        return empty, lost

    def margins(self, split: Split) -> np.ndarray[Any, Any] | None:
        """Margin of each pair; None where pairs have none."""
        if not self.has_margins:
            return None
        path = beside(self.train if split == "train" else self.validation, "margins")
        return _map(path, "<f4", start=0, count=path.stat().st_size // 4)

    def targets(self, split: Split) -> np.ndarray[Any, Any] | None:
        """1, or `OF_BAD_ANSWER`, for every token that counts in the loss as a label, else 0; None:
        all count. Of tokens with classes, the class's number + 1."""
        if not self.has_targets:
            return None
        path = beside(self.train if split == "train" else self.validation, "targets")
        return _map(path, NUMPY_DTYPES[self.target_dtype], start=0, count=self.count(split))


def image_documents(found: Prepared, split: Split) -> tuple[Path, np.ndarray[Any, Any]]:
    """File of a split's texts and images (`images.packed`), and the end of each document in it."""
    tokens = found.train if split == "train" else found.validation
    ends = beside(tokens, "image_ends")
    return beside(tokens, "images"), _map(ends, "<i8", start=0, count=_num_ends(tokens))


def beside(tokens: Path, ending: str) -> Path:
    """Path of a token file with another ending, such as its `ends` or `targets`."""
    return tokens.with_suffix(f".{ending}")


def write_metadata(folder: Path, metadata: dict[str, Any]) -> None:
    has_tokenizer = (folder / "tokenizer.json").exists()
    text = json.dumps({**metadata, "has_tokenizer": has_tokenizer})
    (folder / "prepared.json").write_text(text, "utf-8")


def note_shared_documents(folder: Path) -> None:
    """Add a note to an entry where documents of its validation split are trained on, too."""
    found = read_entry(folder)
    num_shared = 0 if found is None else count_shared(found)
    if num_shared:
        metadata = json.loads((folder / "prepared.json").read_text("utf-8"))
        assert found is not None
        ends = found.document_ends("validation")
        num = 0 if ends is None else len(ends)
        text = f"{num_shared:,} of {num:,} validation documents are trained on, too"
        metadata.setdefault("notes", []).append(asdict(Note(text=text)))
        (folder / "prepared.json").write_text(json.dumps(metadata), "utf-8")


def count_shared(found: Prepared) -> int:
    """Number of validation documents that are among the training documents, token by token.

    Equal means equal in 64 bits of a hash, so that memory stays bounded.
    """
    held = np.concatenate([np.empty(0, np.int64), *_document_hashes(found, "validation")])
    among = np.zeros(len(held), bool)
    for hashes in _document_hashes(found, "train") if len(held) else ():
        among |= np.isin(held, hashes)
    return int(among.sum())


def _document_hashes(found: Prepared, split: Split) -> Iterator[np.ndarray[Any, Any]]:
    """A hash of each document without its separator, `HASHED_DOCUMENTS` at a time.

    Of a very long document it is one of the length, the beginning and the end.
    """
    ends, tokens = found.document_ends(split), found.tokens(split)
    start = 0
    for at in range(0, 0 if ends is None else len(ends), HASHED_DOCUMENTS):
        assert ends is not None
        hashes = []
        for stop in ends[at : at + HASHED_DOCUMENTS].tolist():
            last = stop - (stop > start and tokens[stop - 1] == found.separator)
            first_part, rest = tokens[start : min(last, start + MOST_HASHED)], last - MOST_HASHED
            last_part = tokens[max(start + MOST_HASHED, rest) : last]
            hashes.append(hash((last - start, first_part.tobytes(), last_part.tobytes())))
            start = stop
        yield np.array(hashes, np.int64)


def read_entry(entry: Path) -> Prepared | None:
    """A finished entry of the cache; None where it is absent or its files are incomplete."""
    train, held = entry / "train.bin", entry / "validation.bin"
    try:
        metadata = json.loads((entry / "prepared.json").read_text("utf-8"))
        tokenizer = entry / "tokenizer.json" if metadata.pop("has_tokenizer") else None
        metadata["bad"] = tuple(metadata.pop("bad", ()))
        metadata["notes"] = tuple(Note(**note) for note in metadata.pop("notes", ()))
        found = Prepared(train=train, validation=held, tokenizer=tokenizer, **metadata)
        is_whole = all(_sizes(found))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return found if is_whole and (tokenizer is None or tokenizer.is_file()) else None


def _sizes(found: Prepared) -> Iterator[bool]:
    """Whether each file has the expected size."""
    for path, count in ((found.train, found.num_train), (found.validation, found.num_validation)):
        yield count_tokens(path, found.dtype) == count
        if found.has_targets:
            yield count_tokens(beside(path, "targets"), found.target_dtype) == count
        if found.has_margins:
            size = beside(path, "margins").stat().st_size
            yield size == beside(path, "ends").stat().st_size // 4  # 8 bytes for each of two texts
        if found.joins is not None:
            ends = _map(beside(path, "image_ends"), "<i8", start=0, count=_num_ends(path))
            yield beside(path, "images").stat().st_size == (int(ends[-1]) if len(ends) else 0)
        if found.has_documents:
            yield beside(path, "ends").stat().st_size % 8 == 0


def _num_ends(tokens: Path) -> int:
    return beside(tokens, "image_ends").stat().st_size // 8


def count_tokens(path: Path, dtype: str) -> int:
    return path.stat().st_size // np.dtype(NUMPY_DTYPES[dtype]).itemsize


def _map(path: Path, dtype: str, *, start: int, count: int) -> np.ndarray[Any, Any]:
    if not count:  # an empty file cannot be mapped
        return np.empty(0, dtype)
    offset = start * np.dtype(dtype).itemsize
    return np.memmap(path, dtype, mode="r", offset=offset, shape=(count,))
