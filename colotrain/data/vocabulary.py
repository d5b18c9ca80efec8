"""Tokenizers: bytes, byte-level BPE learned from the corpus, or a tokenizer.json. No torch here."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from colotrain.data import corpora
from colotrain.data.corpora import Progress, Span
from colotrain.errors import ColotrainError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
SEPARATORS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
BPE_SIZES = range(257, 1_000_001)  # 256 bytes and END_OF_TEXT are always there


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """A tokenizer, ready to encode."""

    vocab_size: int
    separator: int | None
    """The token between documents; None where a tokenizer.json has none that is known."""
    encode: Callable[[list[str]], list[Any]]
    """Texts → a sequence of tokens for each."""


def check_tokenizer(spec: str) -> str | None:
    """What is wrong with a tokenizer as the user wrote it, or None."""
    if spec == "bytes":
        return None
    if (size := _bpe_size(spec)) is not None:
        wanted = f"bpe- needs a size from {BPE_SIZES[0]} to {BPE_SIZES[-1]}"
        return None if size in BPE_SIZES else wanted
    if not Path(spec).expanduser().is_file():
        return "it is neither `bytes`, nor `bpe-SIZE`, nor a tokenizer.json file that exists"
    try:
        load(Path(spec))
    except ColotrainError as error:
        return error.problem
    return None


def vocab_size_of(tokenizer: str) -> int | None:
    """The vocabulary a tokenizer has, told without preparing anything; None for a wrong one."""
    if check_tokenizer(tokenizer) is not None:
        return None
    if tokenizer == "bytes":
        return 256
    return _bpe_size(tokenizer) or _vocab_size(load(Path(tokenizer)))


def tokenizer_file(spec: str) -> Path | None:
    """The file a tokenizer is read from, where it is one."""
    is_file = spec != "bytes" and _bpe_size(spec) is None
    return Path(spec).expanduser().absolute() if is_file else None


def make_encoder(spec: str, file: Path, train: Sequence[Span], report: Progress) -> Encoder:
    """The encoder of a tokenizer, which `check_tokenizer` accepts, for the documents `train`.

    A subword tokenizer is left in `file`. For `bpe-SIZE` the vocabulary is SIZE, however many
    tokens were learned, so that a model's shape never depends on the corpus.
    """
    if spec == "bytes":
        return Encoder(vocab_size=256, separator=0, encode=_encode_bytes)
    size = _bpe_size(spec)
    if size is None:
        shutil.copyfile(Path(spec).expanduser(), file)
    else:
        _train_bpe(size, train, report).save(str(file))
    tokenizer = load(file)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    known = [tokenizer.token_to_id(token) for token in SEPARATORS]
    return Encoder(
        vocab_size=size or _vocab_size(tokenizer),
        separator=next((number for number in known if number is not None), None),
        encode=lambda texts: [
            encoding.ids
            for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ],
    )


def load(path: Path) -> Tokenizer:
    """The tokenizer saved in a file."""
    path = path.expanduser()
    try:
        stat = path.stat()
        return _load_version(path, stat.st_size, stat.st_mtime_ns)
    except Exception as error:  # the library raises bare Exceptions
        problem = f"{path} is not a tokenizer.json that can be read ({error})"
        raise ColotrainError(problem, "give a file saved by the tokenizers library") from error


@lru_cache(maxsize=4)
def _load_version(path: Path, size: int, mtime_ns: int) -> Tokenizer:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))


def _train_bpe(size: int, spans: Sequence[Span], report: Progress) -> Tokenizer:
    """Byte-level BPE as in GPT-2 (Radford et al., 2019). The same text gives the same tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_text(spans, report), trainer=trainer)
    return tokenizer


def _training_text(spans: Sequence[Span], report: Progress) -> Iterator[str]:
    total, done = sum(span.size_bytes for span in spans), 0
    for span in spans:
        for piece in corpora.read_pieces(span):
            done = min(done + len(piece.encode()), total)
            report("training tokenizer", done, total)
            yield piece


def _encode_bytes(texts: list[str]) -> list[Any]:
    return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]


def _bpe_size(spec: str) -> int | None:
    size = re.fullmatch(r"bpe-(\d+)", spec)
    return int(size[1]) if size else None


def _vocab_size(tokenizer: Tokenizer) -> int:
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
