"""Preparing a plan's data as token files, once, in the cache. No torch here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from colotrain.data.prepare import corpora, images, tokenising, vocabulary
from colotrain.data.prepare.cache import Cache
from colotrain.data.prepare.conversations import renderer_of
from colotrain.data.prepare.corpora import DataFile, Progress, Span
from colotrain.data.prepare.folders import rest_of
from colotrain.data.prepare.prepared import (
    NUMPY_DTYPES,
    Note,
    Prepared,
    Split,
    beside,
    merge_notes,
    note_shared_documents,
    read_entry,
    write_metadata,
)
from colotrain.data.prepare.sources import Sources, describe_sources, find_sources, shown_names
from colotrain.data.prepare.token_files import are_known, open_token_files
from colotrain.data.prepare.vocabulary import Encoder, check_tokenizer
from colotrain.errors import ColotrainError, ConfigError, Problem
from colotrain.spec.plan import DataPlan

__all__ = ["Prepared", "Progress", "decode", "prepare", "prepare_shards"]

FORMAT = 9  # of cache entries: a change makes all earlier entries unused
BATCH_BYTES = 1 << 21


def parts_of(plan: DataPlan) -> list[DataPlan]:
    """The plan of each part of a mixture; the plan itself if it has no mixture."""
    return [
        dataclasses.replace(
            plan,
            source="path",
            mixture=(),
            paths=part.paths,
            validation_paths=part.validation_paths,
            format=part.format,
            columns={**plan.columns, **part.columns},
        )
        for part in plan.mixture
    ] or [plan]


def described_parts(plan: DataPlan) -> list[dict[str, Any]]:
    """The files of each part's splits, as `plan --json` shows them; none for one's own dataset."""
    return [] if plan.source == "target" else list(map(describe_sources, parts_of(plan)))


def prepare_all(
    plan: DataPlan, *, progress: Progress | None = None, cache: Path | None = None
) -> list[Prepared]:
    """Every shard of every part of the plan's data, prepared now or found in the cache."""
    return [
        shard
        for part in parts_of(plan)
        for shard in prepare_shards(part, progress=progress, cache=cache)
    ]


def prepare(
    plan: DataPlan, *, progress: Progress | None = None, cache: Path | None = None
) -> Prepared:
    """The only shard of the plan's data; raises `ValueError` where there are several."""
    (shard,) = prepare_shards(plan, progress=progress, cache=cache)
    return shard


def prepare_shards(
    plan: DataPlan, *, progress: Progress | None = None, cache: Path | None = None
) -> list[Prepared]:
    """The plan's data as token files, prepared now or found in the cache (`prepare.cache`).

    Every process of a run may call it at once: one does the work and the others wait. Each existing
    token file is a shard, used in place; all other data become one shard. A document ends with a
    separator token (a 0 byte for `bytes`); the last text file has none.
    Raises `ConfigError` for data that cannot be used; memory stays bounded.
    """
    report = progress or (lambda what, done, total: None)
    if wrong := check_tokenizer(plan.tokenizer):
        expected = "bytes, bpe-SIZE, or the path of a tokenizer.json"
        problem = Problem(key="data.tokenizer", value=plan.tokenizer, expected=expected, fix=wrong)
        raise ConfigError([problem])
    try:
        store, found = Cache(cache), find_sources(plan)
        if found.family == "tokens":
            return open_token_files(plan, found.files, store, report, salt=str(FORMAT))
        prepared = _prepare(plan, found, store, report)
        if plan.rated:
            _refuse_single_answers(prepared)
        return [prepared]
    except OSError as error:
        fix = "make the data readable and the cache writable (or set COLOTRAIN_CACHE)"
        raise ColotrainError(f"the data cannot be prepared: {error}", fix) from error


def _refuse_single_answers(prepared: Prepared) -> None:
    """Raise `ConfigError` where an answer with a label is the only one of its split."""
    fixes: dict[Split, str] = {
        "train": "give more records",
        "validation": "give more of them, or another data.validation_fraction where that keeps it",
    }
    for use, fix in fixes.items():
        ends = prepared.document_ends(use)
        if ends is not None and len(ends) == 1:
            expected = f"at least two {use} records: an answer is compared with another's prompt"
            raise ConfigError([Problem(key="data", expected=expected, fix=fix)])


def notes_of(plan: DataPlan, shards: Sequence[Prepared]) -> list[Note]:
    """What a user should know about the data of one part: shown by `data inspect` and `run`."""
    found = find_sources(plan)
    notes = [Note(text=text) for text in found.notes]
    if found.unread:
        num = len(found.unread)
        files = "1 file is" if num == 1 else f"{num:,} files are"
        notes.append(Note(text=f"{files} not read: {shown_names(found.unread)}"))
    return notes + merge_notes([note for shard in shards for note in shard.notes])


def decode(tokenizer: Prepared | Path | str, ids: Iterable[int]) -> str:
    """Text of tokens, separators included, by a `Prepared`, a tokenizer's file, or `bytes`."""
    source = tokenizer.tokenizer or "bytes" if isinstance(tokenizer, Prepared) else tokenizer
    numbers = [int(number) for number in ids]
    if source != "bytes":
        text: str = vocabulary.load(Path(source)).decode(numbers, skip_special_tokens=False)
        return text
    if max(numbers, default=0) > 255:
        problem = "the tokens cannot be shown as text: their tokenizer is not known"
        raise ColotrainError(problem, "set data.tokenizer to its tokenizer.json")
    return bytes(numbers).decode("utf-8", errors="replace")


def is_prepared(plan: DataPlan, *, cache: Path | None = None) -> bool:
    """Whether every part of the plan's data is in the cache, or token files known from before.

    False for files that cannot be read: preparing the data says what is wrong with them.
    """
    try:
        return all(_is_known(part, Cache(cache)) for part in parts_of(plan))
    except OSError:
        return False


def _is_known(plan: DataPlan, store: Cache) -> bool:
    found = find_sources(plan)
    if found.family == "tokens":
        return are_known(found.files, store, salt=str(FORMAT))
    own, salt = _own_files(plan, found.family)
    return _find(store, corpora.fingerprint([*own, *found.files], salt)) is not None


def _prepare(plan: DataPlan, found: Sources, store: Cache, report: Progress) -> Prepared:
    """The cache's entry for files of text or records, which is made if there is none."""
    files = found.files
    own, salt = _own_files(plan, found.family)
    fingerprint = corpora.fingerprint([*own, *files], salt)
    if known := _find(store, fingerprint):
        return known
    with store.lock(fingerprint, report):
        if known := _find(store, fingerprint):  # made while this process waited
            return known
        is_text = found.family == "text"
        chosen = corpora.text_files(files) if is_text else list(files)
        write = _write_entry if is_text else tokenising.write_records
        content = corpora.content_key([*own, *chosen], salt, report)
        readers = store.readers(file.path for file in files)
        key = store.key_for(content, readers)
        with store.lock(f"of-{key}", report):  # the same content may be prepared under another path
            if not _entry(store, key):
                store.discard(key)
                with store.publish(fingerprint, key, readers=readers) as work:
                    write(work, plan, chosen, report)
                    if not plan.images:  # the same question may be of other images
                        note_shared_documents(work)
                    if corpora.fingerprint([*own, *files], salt) != fingerprint:
                        problem = "the data files changed while they were being read"
                        raise ColotrainError(problem, "start again when nothing writes to them")
        told = {"unread": shown_names(rest_of(files, chosen))}
        told["other_tokens"] = vocabulary.other_tokens(plan.tokenizer)
        store.remember(fingerprint, {"key": key, **told})
        made = _find(store, fingerprint)
    assert made is not None, f"{store.entry(key)} was not left whole"
    return made


def _own_files(plan: DataPlan, family: str) -> tuple[list[DataFile], str]:
    """The tokenizer's file, and a text of the other settings that tokens of a family depend on.

    The text does not contain the file's path, since only its content matters.
    """
    own = vocabulary.tokenizer_file(plan.tokenizer)
    spec = "file" if own else plan.tokenizer
    beside = vocabulary.settings_beside(plan.tokenizer)
    ends = beside.get("eos_token") or beside.get("sep_token")
    named = [DataFile(name="tokenizer.json", path=own)] if own else []
    masked = " masked" if plan.masked is not None else ""
    ends = f"{ends} {plan.tokens!r}" if plan.tokens else ends
    salt = f"{FORMAT} {spec} {ends} {plan.validation_fraction!r}{masked}\n"
    if family == "records":
        pairs = " pairs" if plan.pairs else " rated" if plan.rated else ""
        pairs += f" {plan.related.columns}" if plan.related is not None else ""
        pairs += f" margins {plan.margins}" if plan.margins is not None else ""
        words = " of words" if plan.classes_of_words else ""
        words += " numbered" if plan.classes_numbered else ""
        pairs += f" classes{words} {plan.classes!r}" if plan.classes else ""
        salt += f"{renderer_of(plan)!r} {plan.on_bad}{pairs}\n"
    if family == "records" and plan.images:
        folder = Path(plan.tokenizer)
        names = (name for name in images.PROCESSOR_FILES if (folder / name).is_file())
        named += [DataFile(name=name, path=folder / name) for name in names]
        salt += f"images {images.FORMAT} {version('transformers')}\n"
        salt += f"{plan.paths} {plan.validation_paths}\n"  # images are beside the files
    return named, salt


def _find(store: Cache, fingerprint: str) -> Prepared | None:
    known = store.recall(fingerprint)
    found = _entry(store, str(known.get("key"))) if known else None
    if not known or not found:
        return None
    told = [f"not read, because no text: {unread}"] if (unread := known.get("unread")) else []
    told += [others] if (others := known.get("other_tokens")) else []
    return dataclasses.replace(found, notes=(*(Note(text=text) for text in told), *found.notes))


def _entry(store: Cache, key: str) -> Prepared | None:
    return read_entry(store.entry(key)) if store.is_trusted(key) else None


def _write_entry(work: Path, plan: DataPlan, files: Sequence[DataFile], report: Progress) -> None:
    train, held = corpora.split(files, plan.validation_fraction)
    if not train:
        fix = "these are empty: name other files with data.path"
        raise ConfigError([Problem(key="data", expected="text to train on", fix=fix)])
    file = work / "tokenizer.json"
    text = _training_text(train, report)
    encoder = vocabulary.make_encoder(plan.tokenizer, file, text, tokens=plan.tokens)
    if plan.masked is not None:  # samples have the tokenizer's frame, not documents
        encoder = dataclasses.replace(encoder, frame=vocabulary.Frame())
    metadata: dict[str, object] = {
        "dtype": encoder.dtype,
        "vocab_size": encoder.vocab_size,
        "separator": encoder.separator,
        "has_documents": True,
    }
    total, before = sum(span.size_bytes for span in (*train, *held)), 0
    for split, spans in (("train", train), ("validation", held)):

        def report_bytes(read: int, before: int = before) -> None:
            report("tokenizing", min(before + read, total), total)

        counts = _write_tokens(work / f"{split}.bin", spans, encoder, report_bytes)
        metadata[f"num_{split}"], metadata[f"num_bytes_{split}"] = counts
        before += sum(span.size_bytes for span in spans)
    write_metadata(work, metadata)


def _training_text(spans: Sequence[Span], report: Progress) -> Iterator[str]:
    total, done = sum(span.size_bytes for span in spans), 0
    for span in spans:
        for piece in corpora.read_pieces(span):
            done = min(done + len(piece.encode()), total)
            report("training tokenizer", done, total)
            yield piece


def _write_tokens(
    path: Path, spans: Sequence[Span], encoder: Encoder, report: Callable[[int], None]
) -> tuple[int, int]:
    """Write the documents' tokens and ends; returns (number of tokens, UTF-8 bytes of text)."""
    num_tokens, num_bytes, last = 0, 0, None
    with path.open("wb") as out, beside(path, "ends").open("wb") as ends:

        def add(ids: Any) -> None:
            nonlocal num_tokens, last
            row = np.asarray(ids, dtype=NUMPY_DTYPES[encoder.dtype])
            out.write(row.tobytes())
            num_tokens += len(row)
            last = int(row[-1]) if len(row) else last

        def end(tokens: Sequence[int]) -> None:
            add(tokens)
            ends.write(np.asarray([num_tokens], "<i8").tobytes())

        for batch in _batches(spans):
            encoded = encoder.encode([text for text, _ in batch])
            for (text, is_first), ids in zip(batch, encoded, strict=True):
                if is_first:
                    if num_tokens > 0:
                        end(encoder.end_after(last))
                    add(encoder.frame.before)
                add(ids)
                num_bytes += len(text.encode())
            report(num_bytes)
        if num_tokens:
            end(encoder.frame.after)  # the separator is between documents
    return num_tokens, num_bytes


def _batches(spans: Sequence[Span]) -> Iterator[list[tuple[str, bool]]]:
    """Batches of (text, whether it begins a document) of about `BATCH_BYTES`."""
    batch: list[tuple[str, bool]] = []
    size = 0
    for span in spans:
        for index, piece in enumerate(corpora.read_pieces(span)):
            batch.append((piece, index == 0))
            size += len(piece)
            if size >= BATCH_BYTES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch
