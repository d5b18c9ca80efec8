"""Tokenising records: from blocks of bytes to token files, in several processes. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from colotrain.data.prepare import corpora, records, token_rows, vocabulary
from colotrain.data.prepare.conversations import Rendered, Renderer, renderer_of
from colotrain.data.prepare.corpora import DataFile, Progress
from colotrain.data.prepare.encoding import Document, encode_documents
from colotrain.data.prepare.pool import default_workers, in_order
from colotrain.data.prepare.prepared import Note, beside, merge_notes, write_metadata
from colotrain.data.prepare.records import BadRecord, Block
from colotrain.data.prepare.templates import describe_marks, unknown_marks
from colotrain.data.prepare.token_rows import TokenRow, holds_tokens, token_row
from colotrain.data.prepare.vocabulary import Encoder, Frame
from colotrain.errors import ConfigError, Problem
from colotrain.spec.plan import DataPlan

SPLITS = ("train", "validation")
BAD_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Settings of a process that tokenizes blocks."""

    tokenizer: str
    file: Path
    """Path at which `make_encoder` saved the tokenizer."""
    renderer: Renderer
    masked: bool
    """Whether tokens are hidden: then samples have the tokenizer's frame, not documents."""
    fraction: float
    """Share of the records that are validation, in files without a split of their own."""
    unknown_marks: tuple[str, ...] = ()
    """Marks of the chat templates that are no tokens of the tokenizer's file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """The tokens of a block's records, by split."""

    tokens: dict[str, bytes]
    lengths: dict[str, list[int]]
    """Number of tokens of each document."""
    targets: dict[str, bytes]
    num_bytes: dict[str, int | None]
    """Number of bytes of text; None where records are tokens already."""
    has_answers: bool = False
    """Whether a record says what is an answer, even if everything counts in the loss."""
    bad: list[tuple[str, str]] = field(default_factory=list)
    """Bad records, as pairs (`FILE:LINE`, reason)."""
    notes: list[Note] = field(default_factory=list)
    file: str
    done: int


def write_records(work: Path, plan: DataPlan, files: Sequence[DataFile], report: Progress) -> None:
    """Write token files, the documents' ends, targets, and metadata about them.

    By `data.on_bad`, a bad record is counted, or raises `ConfigError` with up to five of its block.
    """
    renderer, file = renderer_of(plan), work / "tokenizer.json"
    texts = _training_texts(plan, files, renderer, report)
    encoder = vocabulary.make_encoder(plan.tokenizer, file, texts, tokens=plan.tokens)
    template = f"{renderer.template or ''}{renderer.tool_template or ''}"
    task = Task(
        tokenizer=plan.tokenizer,
        file=file,
        renderer=renderer,
        masked=plan.masked is not None,
        fraction=plan.validation_fraction,
        unknown_marks=tuple(unknown_marks(template, plan.tokenizer, plan.tokens)),
    )
    encoded = in_order(
        encode,
        _blocks(files, renderer),
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
        "dtype": encoder.dtype,
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


class Writer:
    """Appends documents to the files of one split."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_tokens = 0
        self.num_bytes: int | None = 0
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
        added = piece.num_bytes[split]
        self.num_bytes = None if added is None or self.num_bytes is None else self.num_bytes + added


_encoder: Encoder
_task: Task


def begin(task: Task) -> None:
    """Make this process ready for `encode`."""
    global _encoder, _task
    _encoder, _task = vocabulary.open_encoder(task.tokenizer, task.file), task
    if task.masked:
        _encoder = replace(_encoder, frame=Frame())


def encode(block: Block) -> Encoded:
    """Tokenize a block's records."""
    documents: dict[str, list[Document]] = {split: [] for split in SPLITS}
    bad, notes = [], []
    for number, record in records.parse(block):
        place = f"{block.file}:{number}"
        try:
            if isinstance(record, BadRecord):
                raise record
            found = _documents(record)
        except (BadRecord, RecursionError) as error:
            deep = isinstance(error, RecursionError)
            bad.append((place, "nested too deeply" if deep else str(error)))
            continue
        told = dict.fromkeys(text for document in found for text in _notes_of(document))
        notes += [Note(text=text, count=1, first=place) for text in told]
        unread = dict.fromkeys(name for document in found for name in document.unread)
        notes += [Note(text=name, count=1, first=place, is_unread=True) for name in unread]
        split = split_of(block, number, _task.fraction)
        documents[split] += [(place, document) for document in found]
    pairs = _task.renderer.pairs
    rows = {
        split: encode_documents(found, _encoder, notes, pairs=pairs)
        for split, found in documents.items()
    }
    return Encoded(
        tokens={
            split: b"".join(row.tobytes() for row, _ in found) for split, found in rows.items()
        },
        lengths={split: [len(row) for row, _ in found] for split, found in rows.items()},
        targets={
            split: b"".join(wanted.tobytes() for _, wanted in found)
            for split, found in rows.items()
        },
        num_bytes={split: _num_bytes(found) for split, found in documents.items()},
        has_answers=any(_has_answers(d) for found in documents.values() for _, d in found),
        bad=bad,
        notes=merge_notes(notes),
        file=block.file,
        done=block.done,
    )


def _documents(record: Mapping[str, Any]) -> Sequence[Rendered | TokenRow]:
    if holds_tokens(record) and not _task.renderer.pairs:
        return [
            token_row(
                record,
                vocab_size=_encoder.vocab_size,
                tokenizer=_task.tokenizer,
                loss_on=_task.renderer.loss_on,
            )
        ]
    return _task.renderer.documents(record)


def _notes_of(document: Rendered | TokenRow) -> Iterator[str]:
    yield from document.notes
    if isinstance(document, Rendered) and not document.ends:
        marks = [mark for mark in _task.unknown_marks if mark in document.text]
        if marks:
            yield describe_marks(marks)


def _has_answers(document: Rendered | TokenRow) -> bool:
    if isinstance(document, TokenRow):
        return document.has_answers
    return document.answers is not None


def _num_bytes(documents: Sequence[Document]) -> int | None:
    texts = [found.text for _, found in documents if isinstance(found, Rendered)]
    return sum(len(text.encode()) for text in texts) if len(texts) == len(documents) else None


def split_of(block: Block, number: int, fraction: float) -> str:
    """The file's own split, or one from a hash of file name and record number alone."""
    if block.split is not None:
        return block.split
    held = fraction and corpora.is_validation(f"{block.name}:{number}", fraction)
    return "validation" if held else "train"


def _blocks(files: Sequence[DataFile], renderer: Renderer) -> Iterator[Block]:
    wanted = renderer.wanted() | frozenset(token_rows.COLUMNS)
    for file in files:
        yield from records.blocks(file, wanted)


def _starts(files: Sequence[DataFile]) -> dict[str, int]:
    """Path of a file → bytes of all files before it."""
    found, before = {}, 0
    for file in files:
        found[str(file.path)] = before
        before += file.size_bytes
    return found


def _training_texts(
    plan: DataPlan, files: Sequence[DataFile], renderer: Renderer, report: Progress
) -> Iterator[str]:
    """The texts of the train split, without bad records, which `write_records` reports."""
    total, before = sum(f.size_bytes for f in files), _starts(files)
    for block in _blocks(files, renderer):
        for number, record in records.parse(block):
            if split_of(block, number, plan.validation_fraction) != "train":
                continue
            try:
                if isinstance(record, BadRecord) or holds_tokens(record):
                    continue
                texts = renderer.documents(record)
            except (BadRecord, RecursionError):
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
