"""Tokenising records: from blocks of bytes to token files, in several processes. No torch."""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np

from colotrain.callers_script import Context
from colotrain.data.prepare import corpora, images, records, token_rows, vocabulary
from colotrain.data.prepare.conversations import Rendered, Renderer, renderer_of
from colotrain.data.prepare.corpora import DataFile, Progress
from colotrain.data.prepare.prepared import (
    NUMPY_DTYPES,
    OF_BAD_ANSWER,
    Note,
    beside,
    merge_notes,
    write_metadata,
)
from colotrain.data.prepare.records import BadRecord, Block, UnreadColumn
from colotrain.data.prepare.templates import describe_marks, unknown_marks
from colotrain.data.prepare.token_rows import TokenRow, holds_tokens, token_row
from colotrain.data.prepare.vocabulary import Encoder, Frame
from colotrain.errors import ColotrainError, ConfigError, Problem
from colotrain.parent_process import die_with
from colotrain.spec.objectives import IGNORE_INDEX
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
    unread: tuple[str, str, str] | None = None
    """The first record with an `UnreadColumn`: `FILE:LINE`, the setting and what is expected."""
    margins: dict[str, bytes] = field(default_factory=dict)
    """Margin of each pair, where pairs have one."""
    notes: list[Note] = field(default_factory=list)
    images: dict[str, list[bytes]] = field(default_factory=dict)
    """Text and images of each document, where records have images."""
    file: str
    done: int


def write_records(work: Path, plan: DataPlan, files: Sequence[DataFile], report: Progress) -> None:
    """Write token files, the documents' ends, targets, and metadata about them.

    By `data.on_bad`, a bad record is counted, or raises `ConfigError` with up to five of its block.
    """
    renderer, file = renderer_of(plan), work / "tokenizer.json"
    joins = None if renderer.processor is None else images.find_joins(renderer.processor)
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
            if piece.unread:
                place, key, expected = piece.unread
                told, fix = f"{expected} ({place} has one)", f"set {key}=true"
                raise ConfigError([Problem(key=key, value=False, expected=told, fix=fix)])
            if piece.bad and plan.on_bad == "stop":
                raise _bad_records(piece.bad)
            num_bad += len(piece.bad)
            bad += [f"{place}: {why}" for place, why in piece.bad[: BAD_SHOWN - len(bad)]]
            notes = merge_notes([*notes, *piece.notes])
            for split, writer in writers.items():
                writer.add(piece, split)
            report("tokenizing", min(before[piece.file] + piece.done, total), total)
    report("tokenizing", total, total)
    _finish(
        work,
        encoder,
        writers,
        num_bad=num_bad,
        bad=bad,
        notes=notes,
        joins=joins,
        labels_words=renderer.classes_of_words,
        has_margins=bool(renderer.margins),
    )


def _finish(
    work: Path,
    encoder: Encoder,
    writers: dict[str, Writer],
    *,
    num_bad: int,
    bad: list[str],
    notes: Sequence[Note],
    joins: dict[str, bool] | None,
    labels_words: bool,
    has_margins: bool,
) -> None:
    if not writers["train"].num_tokens:
        fix = "these are empty: name other files with data.path"
        raise ConfigError([Problem(key="data", expected="records to train on", fix=fix)])
    has_targets = any(writer.has_answers for writer in writers.values())
    target_dtype = "uint16" if labels_words else "uint8"
    if not has_targets:
        for writer in writers.values():
            writer.drop("targets")
    if not has_margins:
        for writer in writers.values():
            writer.drop("margins")
    if joins is None:
        for writer in writers.values():
            writer.drop("images", "image_ends")
    metadata: dict[str, Any] = {
        "dtype": encoder.dtype,
        "vocab_size": encoder.vocab_size,
        "separator": encoder.separator,
        "has_documents": True,
        "has_targets": has_targets,
        "target_dtype": target_dtype,
        "has_margins": has_margins,
        "num_bad": num_bad,
        "bad": bad,
        "notes": [asdict(note) for note in notes],
        "joins": joins,
    }
    for split, writer in writers.items():
        metadata |= {f"num_{split}": writer.num_tokens, f"num_bytes_{split}": writer.num_bytes}
    write_metadata(work, metadata)


ENDINGS = ("ends", "targets", "images", "image_ends", "margins")
"""Files of a split beside its tokens."""


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
            for path in (self.path, *(beside(self.path, ending) for ending in ENDINGS))
        ]
        self._num_image_bytes = 0
        return self

    def drop(self, *endings: str) -> None:
        for ending in endings:
            beside(self.path, ending).unlink()

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            file.close()

    def add(self, piece: Encoded, split: str) -> None:
        tokens, ends, targets, documents, document_ends, margins = self._files
        tokens.write(piece.tokens[split])
        last = self.num_tokens + np.cumsum(piece.lengths[split], dtype=np.int64)
        ends.write(last.astype("<i8").tobytes())
        targets.write(piece.targets[split])
        margins.write(piece.margins.get(split, b""))
        for document in piece.images.get(split, ()):
            documents.write(document)
            self._num_image_bytes += len(document)
            document_ends.write(np.asarray([self._num_image_bytes], "<i8").tobytes())
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
    if task.renderer.related:  # tokens as transformers' tokenizer(text) makes them
        _encoder = replace(_encoder, separator=None)


def encode(block: Block) -> Encoded:
    """Tokenize a block's records."""
    documents: dict[str, list[Document]] = {split: [] for split in SPLITS}
    bad, notes, left = [], [], None
    for number, record in records.parse(block, _task.renderer.labels):
        place = f"{block.file}:{number}"
        try:
            if isinstance(record, BadRecord):
                raise record
            found = _documents(record, block.file)
        except UnreadColumn as error:
            left = left or (place, error.key, error.expected)
            continue
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
    pairs, keeps_empty = _task.renderer.pairs, bool(_task.renderer.related)
    rows = {
        split: encode_documents(found, _encoder, notes, pairs=pairs, keeps_empty=keeps_empty)
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
        unread=left,
        margins={split: _margins(found) for split, found in documents.items()},
        notes=merge_notes(notes),
        images={
            split: [d.images for _, d in found if isinstance(d, TokenRow) and d.images]
            for split, found in documents.items()
        },
        file=block.file,
        done=block.done,
    )


def _documents(record: Mapping[str, Any], file: str) -> Sequence[Rendered | TokenRow]:
    if holds_tokens(record) and not _task.renderer.needs_texts:
        return [
            token_row(
                record,
                vocab_size=_encoder.vocab_size,
                tokenizer=_task.tokenizer,
                loss_on=_task.renderer.loss_on,
            )
        ]
    found = _task.renderer.documents(record)
    if (folder := _task.renderer.processor) is None:
        return found
    return _with_images(found, folder, Path(file).parent)


def _with_images(texts: Sequence[Rendered], folder: str, beside: Path) -> list[TokenRow]:
    """The tokens of a record's texts, as the processor in `folder` makes them.

    A text that ends before the record's last message has the first of its images. Paths of images
    are relative to `beside`.
    """
    processor = images.open_processor(folder)
    own = images.read_images(list(texts[0].images), beside) if texts else []
    decoded = [images.decode(image.read(), str(image)) for image in own]
    counts = [images.count_placeholders(processor, text.text) for text in texts]
    if texts and max(counts) != len(own):
        mark = processor.image_token
        raise BadRecord(
            f"the chat template's text has {max(counts)} placeholders {mark}, and the record has "
            f"{len(own)} images"
        )
    return [
        _with_first_images(text, folder, own[:count], decoded[:count])
        for text, count in zip(texts, counts, strict=True)
    ]


def _with_first_images(
    text: Rendered, folder: str, own: Sequence[images.Image], decoded: Sequence[Any]
) -> TokenRow:
    if not own:
        raise BadRecord("an answer stands before the first image: each sample has to have one")
    expanded = images.expand(images.open_processor(folder), folder, text.text, decoded)
    assert text.answers is not None, "conversations have answers"
    answers = [(expanded.moved(start), expanded.moved(stop)) for start, stop in text.answers]
    unusual = dict[str, None]()
    targets = _targets_of(expanded.offsets, answers, unusual)
    is_placeholder = _targets_of(expanded.offsets, expanded.replaced, {}).astype(bool)
    return TokenRow(
        ids=np.asarray(expanded.ids, np.int64),
        targets=np.where(is_placeholder, 0, targets).astype(np.int64),
        has_answers=True,
        notes=(*text.notes, *unusual),
        unread=text.unread,
        images=images.packed(
            text.text,
            own,
            decoded,
            needed=int(np.flatnonzero(is_placeholder)[-1]) + 1,
            placeholders=int(is_placeholder.sum()),
        ),
    )


def _margins(documents: Sequence[Document]) -> bytes:
    texts = (found for _, found in documents if isinstance(found, Rendered))
    found = [text.margin for text in texts if text.margin is not None]
    return np.asarray(found, "<f4").tobytes()


def _notes_of(document: Rendered | TokenRow) -> Iterator[str]:
    yield from document.notes
    if isinstance(document, Rendered) and not document.ends:
        marks = [mark for mark in _task.unknown_marks if mark in document.text]
        if marks:
            yield describe_marks(marks)


def _has_answers(document: Rendered | TokenRow) -> bool:
    if isinstance(document, TokenRow):
        return document.has_answers
    return document.answers is not None or bool(document.words)


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
        for number, record in records.parse(block, renderer.labels):
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


Document = tuple[str, Rendered | TokenRow]
"""`FILE:LINE` of a record, and the record."""
Tokens = np.ndarray[Any, Any]
Targets = np.ndarray[Any, Any]
"""1 for every token that counts in the loss, `OF_BAD_ANSWER` in a bad answer, else 0; of tokens
with classes, the class's number + 1."""
SPANS_BEGINNING = (
    "a token spans the beginning of an answer and counts as the answer's: after the prompt alone "
    "the model sees other tokens (let prompts end before a space, not after it)"
)
SPANS_END = "a token spans the end of an answer, and is trained on"
JOINED_WORDS = (
    "the tokenizer puts no space between words, as with transformers' is_split_into_words=True: "
    'begin them with a space (" York"), or name a tokenizer.json with add_prefix_space=true in '
    "data.tokenizer"
)
NO_TOKEN = "the tokenizer makes no token of a word: its label is not learned"
BEGINS_TWICE = (
    "the text begins with the token that the tokenizer puts before every text: it stands there "
    "twice, as in transformers (remove it from the text)"
)


def encode_documents(
    documents: Sequence[Document],
    encoder: Encoder,
    notes: list[Note],
    *,
    pairs: bool,
    keeps_empty: bool = False,
) -> list[tuple[Tokens, Targets]]:
    """Tokens and targets of documents; appends to `notes`.

    `pairs`: whether each two of them are the answers of a preference pair. `keeps_empty`: whether a
    document without tokens stays one.
    """
    texts = [found for _, found in documents if isinstance(found, Rendered)]
    plain = iter(encoder.encode([r.text for r in texts if r.answers is None and not r.words]))
    words = _words_of(texts, encoder)
    marked = iter(encoder.encode_with_offsets([r.text for r in texts if r.answers is not None]))
    prompts = iter(encoder.encode([p for r in texts if (p := _prompt_of(r)) is not None]))
    dtype = np.dtype(NUMPY_DTYPES[encoder.dtype])
    rows: list[tuple[Tokens, Targets]] = []
    for place, found in documents:
        if isinstance(found, TokenRow):
            rows.append((found.ids.astype(dtype), found.targets.astype(np.uint8)))
            continue
        if found.words:
            row, wanted, texts_of_notes = _labelled(found, *next(words), encoder)
            notes += [Note(text=text, count=1, first=place) for text in texts_of_notes]
            rows.append((row, wanted))
            continue
        ids, offsets = (next(plain), None) if found.answers is None else next(marked)
        row = np.asarray(ids, dtype=dtype)
        if found.label is not None:
            before, after = encoder.frame.before, encoder.frame.after
            row = np.asarray([*before, *row, *after, found.label], dtype=dtype)
            rows.append((row, np.ones(len(row), np.uint8)))
            continue
        wanted, unusual = np.ones(len(row), np.uint8), dict[str, None]()
        if found.answers is not None:
            wanted = _targets_of(offsets, found.answers, unusual)
        if _prompt_of(found) is not None:
            _begin_answer_(wanted, row, np.asarray(next(prompts), dtype=dtype), unusual)
        if found.ends:
            before = encoder.frame.before
            if before and row[:1].tolist() == [before[-1]]:
                unusual[BEGINS_TWICE] = None
            row, wanted = _as_document(row, wanted, encoder, is_prompt=found.answers is not None)
        notes += [Note(text=text, count=1, first=place) for text in unusual]
        wanted = wanted * np.uint8(OF_BAD_ANSWER if found.is_bad else 1)
        if len(row) or pairs or keeps_empty:
            rows.append((row, wanted))
    if pairs:
        _begin_together_(rows)
    return rows


def _words_of(texts: Sequence[Rendered], encoder: Encoder) -> Iterator[tuple[Any, Any]]:
    split = [text.words for text in texts if text.words]
    if not split:
        return iter(())
    assert encoder.encode_words is not None, "the plan has a tokenizer's file"
    return iter(encoder.encode_words(split))


def _labelled(
    text: Rendered, ids: Sequence[int], places: Sequence[int], encoder: Encoder
) -> tuple[Tokens, Targets, list[str]]:
    """The tokens of words in the tokenizer's frame; each word's first one has its class.

    `places`: the word of each token. The last value has notes about the text.
    """
    before, after = encoder.frame.before, encoder.frame.after
    row = np.asarray([*before, *ids, *after], np.dtype(NUMPY_DTYPES[encoder.dtype]))
    wanted, seen = np.zeros(len(row), np.uint16), set[int]()
    for at, word in enumerate(places, len(before)):
        if word not in seen and text.labels[word] != IGNORE_INDEX:
            wanted[at] = text.labels[word] + 1
        seen.add(word)
    notes = [JOINED_WORDS] if encoder.joins_words else []
    return row, wanted, notes + ([NO_TOKEN] if len(seen) < len(text.words) else [])


def _as_document(
    row: Tokens, wanted: Targets, encoder: Encoder, *, is_prompt: bool
) -> tuple[Tokens, Targets]:
    """A text's tokens with what the tokenizer adds to a text, and the separator.

    The beginning is not trained on where it is a prompt's; the end always is.
    """
    before = encoder.frame.before
    after = encoder.end_after(int(row[-1]) if len(row) else None)
    framed = np.concatenate([np.asarray(part, row.dtype) for part in (before, row, after)])
    begin = np.full(len(before), 0 if is_prompt else 1, np.uint8)
    return framed, np.concatenate([begin, wanted, np.ones(len(after), np.uint8)])


def _prompt_of(text: Rendered) -> str | None:
    """The prompt of a text that is prompt and completion, None of others."""
    if text.ends and text.answers is not None and len(text.answers) == 1:
        return text.text[: text.answers[0][0]]
    return None


def _targets_of(
    offsets: Any, answers: Sequence[tuple[int, int]], unusual: dict[str, None]
) -> Targets:
    """1 for every token with text of an answer, else 0."""
    places = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
    starts, ends = places[:, 0], places[:, 1]
    found = np.zeros(len(places), np.uint8)
    for start, stop in answers:
        first, after = np.searchsorted(ends, start, "right"), np.searchsorted(starts, stop, "left")
        found[first:after] = 1
        if first < after and starts[first] < start:
            unusual[SPANS_BEGINNING] = None
        if first < after and ends[after - 1] > stop:
            unusual[SPANS_END] = None
    return found


def _begin_answer_(wanted: Targets, row: Tokens, prompt: Tokens, unusual: dict[str, None]) -> None:
    """Let the answer begin where the prompt's own tokens end to be those of the whole, as TRL does.

    Tokens may change before the answer: of "\\n\\n" alone GPT-2 makes one token, before a word two.
    """
    shared = min(len(row), len(prompt))
    differs = np.flatnonzero(row[:shared] != prompt[:shared])
    begin = int(differs[0]) if len(differs) else shared
    if begin < len(prompt):
        unusual[SPANS_BEGINNING] = None
        wanted[begin:] = 1


def _begin_together_(rows: list[tuple[Tokens, Targets]]) -> None:
    """Let both answers of a pair begin at the same token, the first at which one of them does."""
    for (_, chosen), (_, rejected) in zip(rows[::2], rows[1::2], strict=True):
        begins = [int(np.argmax(wanted)) for wanted in (chosen, rejected) if wanted.any()]
        for wanted in (chosen, rejected):
            if begins and wanted.any():
                wanted[min(begins) : int(np.argmax(wanted))] = 1


MOST_WORKERS = 16
AHEAD = 2
"""Pieces of work per process that are in progress at once, which bounds memory."""

Work = TypeVar("Work")
Result = TypeVar("Result")


def default_workers() -> int:
    """Number of processes: one per core that this process may use, at most `MOST_WORKERS`."""
    return max(1, min(MOST_WORKERS, len(os.sched_getaffinity(0))))


def in_order(
    function: Callable[[Work], Result],
    stream: Iterable[Work],
    *,
    workers: int,
    begin: Callable[..., None],
    args: tuple[Any, ...],
) -> Iterator[Result]:
    """Results of `function` for each piece of `stream`, in order, from `workers` processes.

    `begin(*args)` is called first in each process. With one worker, or for a stream of one or two
    pieces, everything runs in this process. The processes end with this one, however it ends.
    """
    stream = iter(stream)
    first = list(islice(stream, 3))
    if workers <= 1 or len(first) < 3:
        begin(*args)
        yield from map(function, chain(first, stream))  # lazily
        return
    pool = ProcessPoolExecutor(
        workers, mp_context=Context(), initializer=_begin, initargs=(os.getpid(), begin, args)
    )
    waiting: deque[Future[Result]] = deque()
    try:
        for piece in chain(first, stream):
            if len(waiting) >= AHEAD * workers:
                yield waiting.popleft().result()
            waiting.append(pool.submit(function, piece))
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        problem = "a process that tokenizes was killed, or could not start"
        raise ColotrainError(problem, "is memory short? try data.workers=1") from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _begin(parent: int, begin: Callable[..., None], args: tuple[Any, ...]) -> None:
    die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process per core is enough
    begin(*args)
