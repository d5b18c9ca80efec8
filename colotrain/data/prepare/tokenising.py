"""Tokenising records: from blocks of bytes to token files, in several processes. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from colotrain.data.prepare import corpora, records, vocabulary
from colotrain.data.prepare.conversations import Rendered, Renderer, renderer_of
from colotrain.data.prepare.corpora import Progress
from colotrain.data.prepare.formats import RecordFile
from colotrain.data.prepare.pool import default_workers, in_order
from colotrain.data.prepare.prepared import NUMPY_DTYPES, Note, beside, write_metadata
from colotrain.data.prepare.records import BadRecord, Block
from colotrain.data.prepare.vocabulary import Encoder
from colotrain.errors import ConfigError, Problem
from colotrain.spec.plan import DataPlan

SPLITS = ("train", "validation")
BAD_SHOWN = 5
MOST_NOTES = 50
"""Different notes that are kept; a note should not quote its record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Settings of a process that tokenizes blocks."""

    tokenizer: str
    file: Path
    """Path at which `make_encoder` saved the tokenizer."""
    renderer: Renderer
    fraction: float
    """Share of the records that are validation, in files without a split of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """The tokens of a block's records, by split."""

    tokens: dict[str, bytes]
    lengths: dict[str, list[int]]
    """Number of tokens of each document."""
    targets: dict[str, bytes]
    num_bytes: dict[str, int]
    has_answers: bool = False
    """Whether a record says what is an answer, even if everything counts in the loss."""
    bad: list[tuple[str, str]] = field(default_factory=list)
    """Bad records, as pairs (`FILE:LINE`, reason)."""
    notes: list[Note] = field(default_factory=list)
    file: str
    done: int


def write_records(
    work: Path, plan: DataPlan, files: Sequence[RecordFile], kind: str, report: Progress
) -> None:
    """Write token files, the documents' ends, targets, and metadata about them.

    By `data.on_bad`, a bad record is counted, or raises `ConfigError` with up to five of its block.
    """
    renderer, file = renderer_of(plan), work / "tokenizer.json"
    texts = _training_texts(plan, files, kind, renderer, report)
    encoder = vocabulary.make_encoder(plan.tokenizer, file, texts)
    task = Task(
        tokenizer=plan.tokenizer, file=file, renderer=renderer, fraction=plan.validation_fraction
    )
    encoded = in_order(
        encode,
        _blocks(files, kind, renderer),
        workers=plan.workers or default_workers(),
        begin=begin,
        args=(task,),
    )
    total, before = sum(f.size_bytes for f in files), _starts(files)
    with ExitStack() as stack:
        writers = {split: stack.enter_context(Writer(work / f"{split}.bin")) for split in SPLITS}
        bad: list[str] = []
        notes: list[Note] = []
        num_bad = 0
        for piece in encoded:
            if piece.bad and plan.on_bad == "stop":
                raise _bad_records(piece.bad)
            num_bad += len(piece.bad)
            bad += [f"{place}: {why}" for place, why in piece.bad[: BAD_SHOWN - len(bad)]]
            notes = merge_notes([*notes, *piece.notes])
            for split, writer in writers.items():
                writer.add(piece, split)
            report("tokenizing", min(before[piece.file] + piece.done, total), total)
    report("tokenizing", total, total)
    _finish(work, encoder, writers, num_bad=num_bad, bad=bad, notes=notes)


def merge_notes(notes: Sequence[Note]) -> list[Note]:
    """Add up the counts of notes with the same text, in the order of their first records."""
    merged: dict[bool, dict[str, Note]] = {False: {}, True: {}}
    for note in notes:
        alike = merged[note.is_unread]
        count = note.count + (alike[note.text].count if note.text in alike else 0)
        if note.text in alike or len(alike) < MOST_NOTES:
            alike[note.text] = replace(alike.get(note.text, note), count=count)
    return [note for alike in merged.values() for note in alike.values()]


def _finish(
    work: Path,
    encoder: Encoder,
    writers: dict[str, Writer],
    *,
    num_bad: int,
    bad: list[str],
    notes: Sequence[Note],
) -> None:
    if not writers["train"].num_tokens:
        fix = "these are empty: name other files with data.path"
        raise ConfigError([Problem(key="data", expected="records to train on", fix=fix)])
    has_targets = any(writer.has_answers for writer in writers.values())
    if not has_targets:
        for writer in writers.values():
            beside(writer.path, "targets").unlink()
    metadata: dict[str, Any] = {
        "dtype": dtype_of(encoder),
        "vocab_size": encoder.vocab_size,
        "separator": encoder.separator,
        "has_documents": True,
        "has_targets": has_targets,
        "num_bad": num_bad,
        "bad": bad,
        "notes": [asdict(note) for note in notes],
    }
    for split, writer in writers.items():
        metadata |= {f"num_{split}": writer.num_tokens, f"num_bytes_{split}": writer.num_bytes}
    write_metadata(work, metadata)


def dtype_of(encoder: Encoder) -> str:
    return "uint16" if encoder.vocab_size <= 1 << 16 else "uint32"


class Writer:
    """Appends documents to the files of one split."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_tokens = self.num_bytes = 0
        self.has_answers = False

    def __enter__(self) -> Writer:
        self._files: list[IO[bytes]] = [
            path.open("wb")
            for path in (self.path, beside(self.path, "ends"), beside(self.path, "targets"))
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            file.close()

    def add(self, piece: Encoded, split: str) -> None:
        tokens, ends, targets = self._files
        tokens.write(piece.tokens[split])
        last = self.num_tokens + np.cumsum(piece.lengths[split], dtype=np.int64)
        ends.write(last.astype("<i8").tobytes())
        targets.write(piece.targets[split])
        self.has_answers = self.has_answers or piece.has_answers
        self.num_tokens += sum(piece.lengths[split])
        self.num_bytes += piece.num_bytes[split]


_encoder: Encoder
_task: Task


def begin(task: Task) -> None:
    """Make this process ready for `encode`."""
    global _encoder, _task
    _encoder, _task = vocabulary.open_encoder(task.tokenizer, task.file), task


def encode(block: Block) -> Encoded:
    """Tokenize a block's records."""
    rendered: dict[str, list[Rendered]] = {split: [] for split in SPLITS}
    bad, notes = [], []
    for number, record in records.parse(block):
        try:
            if isinstance(record, BadRecord):
                raise record
            texts = _task.renderer.documents(record)
        except BadRecord as error:
            bad.append((f"{block.file}:{number}", str(error)))
            continue
        place = f"{block.file}:{number}"
        told = dict.fromkeys(text for rendering in texts for text in rendering.notes)
        notes += [Note(text=text, count=1, first=place) for text in told]
        unread = dict.fromkeys(name for rendering in texts for name in rendering.unread)
        notes += [Note(text=name, count=1, first=place, is_unread=True) for name in unread]
        rendered[split_of(block, number, _task.fraction)] += texts
    found = {split: _encode(texts) for split, texts in rendered.items()}
    return Encoded(
        tokens={split: tokens for split, (tokens, _, _) in found.items()},
        lengths={split: lengths for split, (_, lengths, _) in found.items()},
        targets={split: targets for split, (_, _, targets) in found.items()},
        num_bytes={s: sum(len(r.text.encode()) for r in texts) for s, texts in rendered.items()},
        has_answers=any(r.answers is not None for texts in rendered.values() for r in texts),
        bad=bad,
        notes=merge_notes(notes),
        file=block.file,
        done=block.done,
    )


def split_of(block: Block, number: int, fraction: float) -> str:
    """The file's own split, or one from a hash of file name and record number alone."""
    if block.split is not None:
        return block.split
    held = fraction and corpora.is_validation(f"{block.name}:{number}", fraction)
    return "validation" if held else "train"


def _encode(texts: Sequence[Rendered]) -> tuple[bytes, list[int], bytes]:
    """Concatenated tokens, lengths and concatenated targets of documents."""
    with_answers = [r.answers is not None for r in texts]
    plain = iter(_encoder.encode([r.text for r in texts if r.answers is None]))
    marked = iter(_encoder.encode_with_ends([r.text for r in texts if r.answers is not None]))
    dtype = np.dtype(NUMPY_DTYPES[dtype_of(_encoder)])
    tokens, lengths, targets = [], [], []
    for rendered, has_answers in zip(texts, with_answers, strict=True):
        ids, ends = next(marked) if has_answers else (next(plain), None)
        row = np.asarray(ids, dtype=dtype)
        wanted = np.ones(len(row), np.uint8) if ends is None else _targets(ends, rendered.answers)
        if rendered.ends and _encoder.separator is not None:
            row, wanted = np.append(row, dtype.type(_encoder.separator)), np.append(wanted, 1)
        if len(row) or _task.renderer.pairs:
            tokens.append(row.tobytes())
            lengths.append(len(row))
            targets.append(wanted.astype(np.uint8).tobytes())
    return b"".join(tokens), lengths, b"".join(targets)


def _targets(ends: Any, answers: Sequence[tuple[int, int]] | None) -> np.ndarray[Any, Any]:
    """1 for every token whose last character is in an answer, else 0."""
    places = np.asarray(ends)
    found = np.zeros(len(places), np.uint8)
    for start, stop in answers or ():
        found[np.searchsorted(places, start, "right") : np.searchsorted(places, stop, "right")] = 1
    return found


def _blocks(files: Sequence[RecordFile], kind: str, renderer: Renderer) -> Iterator[Block]:
    wanted = renderer.wanted()
    for file in files:
        yield from records.blocks(file, kind, wanted)


def _starts(files: Sequence[RecordFile]) -> dict[str, int]:
    """Path of a file → bytes of all files before it."""
    found, before = {}, 0
    for file in files:
        found[str(file.path)] = before
        before += file.size_bytes
    return found


def _training_texts(
    plan: DataPlan, files: Sequence[RecordFile], kind: str, renderer: Renderer, report: Progress
) -> Iterator[str]:
    """The texts of the train split, without bad records, which `write_records` reports."""
    total, before = sum(f.size_bytes for f in files), _starts(files)
    for block in _blocks(files, kind, renderer):
        for number, record in records.parse(block):
            if split_of(block, number, plan.validation_fraction) != "train":
                continue
            try:
                texts = [] if isinstance(record, BadRecord) else renderer.documents(record)
            except BadRecord:
                continue
            yield from (text.text for text in texts)
        report("training tokenizer", min(before[block.file] + block.done, total), total)


def _bad_records(bad: Sequence[tuple[str, str]]) -> ConfigError:
    fix = "correct it, or set data.on_bad=skip"
    return ConfigError(
        [
            Problem(key=place, expected=f"a record that can be used ({why})", fix=fix)
            for place, why in bad[:BAD_SHOWN]
        ]
    )
