"""Tokens: text made into token files once, and kept in the cache. No torch here."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from colotrain.data import corpora, vocabulary
from colotrain.data.cache import Cache
from colotrain.data.corpora import CorpusFile, Progress, Span
from colotrain.data.vocabulary import Encoder, check_tokenizer, vocab_size_of
from colotrain.errors import ColotrainError, ConfigError, Problem
from colotrain.plan import DataPlan

__all__ = ["Prepared", "Progress", "check_tokenizer", "decode", "prepare", "vocab_size_of"]

FORMAT = 1  # of cache entries: a change makes every entry anew
NUMPY_DTYPES = {"uint16": "<u2", "uint32": "<u4"}
BATCH_BYTES = 1 << 21


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Token files that are ready to be read, and what is in them."""

    train: Path
    validation: Path
    """Raw little-endian numbers of type `dtype`; may be the same file as `train`."""
    dtype: str
    """uint16 or uint32."""
    vocab_size: int
    """Every token is below this. For `bpe-SIZE` it is SIZE, however many were learned."""
    num_train: int
    num_validation: int
    """Tokens of each split."""
    train_start: int = 0
    validation_start: int = 0
    """Where in its file each split begins, in tokens."""
    tokenizer: Path | None = None
    """The tokenizer.json that made the tokens; None for bytes, or where it is not known."""
    num_bytes_train: int | None = None
    num_bytes_validation: int | None = None
    """UTF-8 bytes of the text of each split; None for `.bin` inputs."""


def prepare(
    plan: DataPlan, *, progress: Progress | None = None, cache: Path | None = None
) -> Prepared:
    """The plan's data as token files, made now or found in the cache (`data.cache`).

    Every process of a run may call it at once: one does the work and the others wait. `.bin`
    inputs are used in place. Between documents stands one separator (a 0 byte for `bytes`).
    Raises `ConfigError` for data that cannot be used; memory stays bounded.
    """
    store, report = Cache(cache), progress or (lambda what, done, total: None)
    if wrong := check_tokenizer(plan.tokenizer):
        expected = "bytes, bpe-SIZE, or the path of a tokenizer.json"
        problem = Problem(key="data.tokenizer", value=plan.tokenizer, expected=expected, fix=wrong)
        raise ConfigError([problem])
    try:
        if files := corpora.token_files(plan):
            return _use_token_files(plan, files, store, report)
        return _prepare_text(plan, store, report)
    except OSError as error:
        fix = f"make the data readable and {store.path} writable (or set COLOTRAIN_CACHE)"
        raise ColotrainError(f"the data cannot be prepared: {error}", fix) from error


def decode(tokenizer: Prepared | Path | str, ids: Iterable[int]) -> str:
    """Tokens as text, separators included. Takes what `prepare` gave, a file, or `bytes`."""
    source = tokenizer.tokenizer or "bytes" if isinstance(tokenizer, Prepared) else tokenizer
    numbers = [int(number) for number in ids]
    if source != "bytes":
        text: str = vocabulary.load(Path(source)).decode(numbers, skip_special_tokens=False)
        return text
    if max(numbers, default=0) > 255:
        problem = "the tokens cannot be shown as text: their tokenizer is not known"
        raise ColotrainError(problem, "set data.tokenizer to its tokenizer.json")
    return bytes(numbers).decode("utf-8", errors="replace")


def _prepare_text(plan: DataPlan, store: Cache, report: Progress) -> Prepared:
    files, own, salt = _inputs(plan)
    fingerprint = corpora.fingerprint([*own, *files], salt)
    if found := _find(store, fingerprint):
        return found
    with store.lock(fingerprint, report):
        if found := _find(store, fingerprint):  # made while this process waited
            return found
        texts = corpora.text_files(files)
        key = corpora.content_key([*own, *texts], salt, report)
        if not _read_entry(store.entry(key)):
            store.discard(key)
            with store.publish(fingerprint, key) as work:
                _write_entry(work, plan, texts, report)
                if corpora.fingerprint([*own, *files], salt) != fingerprint:
                    problem = "the text files changed while they were being read"
                    raise ColotrainError(problem, "start again when nothing writes to them")
        store.remember(fingerprint, {"key": key})
    made = _read_entry(store.entry(key))
    assert made is not None, f"{store.entry(key)} was not left whole"
    return made


def _inputs(plan: DataPlan) -> tuple[list[CorpusFile], list[CorpusFile], str]:
    """Candidate files, the tokenizer's own file, and what else decides the outcome.

    A tokenizer file counts by its content, not by where it lies.
    """
    own = vocabulary.tokenizer_file(plan.tokenizer)
    spec = "file" if own else plan.tokenizer
    named = [CorpusFile(name="tokenizer.json", path=own)] if own else []
    return corpora.list_files(plan), named, f"{FORMAT} {spec} {plan.validation_fraction!r}\n"


def _find(store: Cache, fingerprint: str) -> Prepared | None:
    known = store.recall(fingerprint)
    return _read_entry(store.entry(str(known.get("key")))) if known else None


def _read_entry(entry: Path) -> Prepared | None:
    """A finished entry; None where there is none, or where its files are not whole."""
    train, held = entry / "train.bin", entry / "validation.bin"
    try:
        facts = json.loads((entry / "prepared.json").read_text("utf-8"))
        tokenizer = entry / "tokenizer.json" if facts.pop("has_tokenizer") else None
        found = Prepared(train=train, validation=held, tokenizer=tokenizer, **facts)
        counts = _count_tokens(train, found.dtype), _count_tokens(held, found.dtype)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    is_whole = counts == (found.num_train, found.num_validation)
    return found if is_whole and (tokenizer is None or tokenizer.is_file()) else None


def _write_entry(work: Path, plan: DataPlan, files: Sequence[CorpusFile], report: Progress) -> None:
    train, held = corpora.split(files, plan.validation_fraction)
    if not train:
        fix = "these are empty: name other files with data.path"
        raise ConfigError([Problem(key="data", expected="text to train on", fix=fix)])
    file = work / "tokenizer.json"
    encoder = vocabulary.make_encoder(plan.tokenizer, file, train, report)
    dtype = "uint16" if encoder.vocab_size <= 1 << 16 else "uint32"
    facts: dict[str, object] = {"dtype": dtype, "vocab_size": encoder.vocab_size}
    total, before = sum(span.size_bytes for span in (*train, *held)), 0
    for split, spans in (("train", train), ("validation", held)):

        def report_bytes(read: int, before: int = before) -> None:
            report("tokenizing", min(before + read, total), total)

        counts = _write_tokens(work / f"{split}.bin", spans, encoder, dtype, report_bytes)
        facts[f"num_{split}"], facts[f"num_bytes_{split}"] = counts
        before += sum(span.size_bytes for span in spans)
    (work / "prepared.json").write_text(json.dumps({**facts, "has_tokenizer": file.exists()}))


def _write_tokens(
    path: Path, spans: Sequence[Span], encoder: Encoder, dtype: str, report: Callable[[int], None]
) -> tuple[int, int]:
    """Write the documents' tokens; returns how many there are, and the text's UTF-8 bytes."""
    separator = [] if encoder.separator is None else [encoder.separator]
    num_tokens, num_bytes = 0, 0
    with path.open("wb") as out:
        for batch in _batches(spans):
            encoded = encoder.encode([text for text, _ in batch])
            for (text, is_first), ids in zip(batch, encoded, strict=True):
                parts = (separator, ids) if is_first and num_tokens else (ids,)
                for part in parts:
                    out.write(np.asarray(part, dtype=NUMPY_DTYPES[dtype]).tobytes())
                    num_tokens += len(part)
                num_bytes += len(text.encode())
            report(num_bytes)
    return num_tokens, num_bytes


def _batches(spans: Sequence[Span]) -> Iterator[list[tuple[str, bool]]]:
    """Pieces of text, each with whether it begins a document, about `BATCH_BYTES` at a time."""
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


def _use_token_files(
    plan: DataPlan, files: Sequence[Path], store: Cache, report: Progress
) -> Prepared:
    """nanoGPT's layout, in place: two files are the splits, one is cut at its end."""
    dtype = "uint32" if files[0].name.endswith(".u32.bin") else "uint16"
    for file in files:
        _check_size(file, dtype)
    count = _count_tokens(files[0], dtype)
    is_pair = len(files) == 2
    num_held = _count_tokens(files[1], dtype) if is_pair else int(count * plan.validation_fraction)
    num_train = count if is_pair else count - num_held
    highest = _highest_token(files, dtype, store, report)
    return Prepared(
        train=files[0].absolute(),
        validation=files[-1].absolute(),
        dtype=dtype,
        vocab_size=max(vocab_size_of(plan.tokenizer) or 0, highest + 1),
        num_train=num_train,
        num_validation=num_held,
        validation_start=0 if is_pair else num_train,
        tokenizer=vocabulary.tokenizer_file(plan.tokenizer),
    )


def _check_size(path: Path, dtype: str) -> None:
    size, width = path.stat().st_size, np.dtype(dtype).itemsize
    if size == 0 or size % width:
        expected = f"a file of {dtype} tokens, a multiple of {width} bytes (it has {size})"
        fix = "write the file again (32-bit tokens: name it NAME.u32.bin)"
        raise ConfigError([Problem(key="data.path", value=path, expected=expected, fix=fix)])


def _count_tokens(path: Path, dtype: str) -> int:
    return path.stat().st_size // np.dtype(dtype).itemsize


def _highest_token(files: Sequence[Path], dtype: str, store: Cache, report: Progress) -> int:
    """The highest token of the files: read once, then remembered in the cache's index."""
    named = [CorpusFile(name=file.name, path=file) for file in files]
    fingerprint = corpora.fingerprint(named, f"{FORMAT} highest\n")
    known = store.recall(fingerprint)
    if known is None:
        with store.lock(fingerprint, report):
            known = store.recall(fingerprint) or {"highest": _scan(files, dtype, report)}
            store.remember(fingerprint, known)
    return int(known["highest"])


def _scan(files: Sequence[Path], dtype: str, report: Progress) -> int:
    highest, done, total = 0, 0, sum(file.stat().st_size for file in files)
    for file in files:
        tokens = np.memmap(file, dtype=NUMPY_DTYPES[dtype], mode="r")
        for at in range(0, len(tokens), BATCH_BYTES):
            chunk = tokens[at : at + BATCH_BYTES]
            highest, done = max(highest, int(chunk.max())), done + chunk.nbytes
            report("checking tokens", done, total)
    return highest
