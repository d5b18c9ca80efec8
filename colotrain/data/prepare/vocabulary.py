"""Tokenizers: bytes, byte-level BPE trained on the corpus, or a tokenizer.json. No torch here."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from colotrain.errors import ColotrainError, fix_of
from colotrain.rundir import read_json, read_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
SEPARATORS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
USUAL = {
    "mask_token": ("[MASK]", "<mask>"),
    "pad_token": ("[PAD]", "<pad>"),
    "cls_token": ("[CLS]", "<s>"),
    "sep_token": ("[SEP]", "</s>"),
}
"""Role in tokenizer_config.json → names of the token where that file does not say."""
MOST_FILE_BYTES, MOST_PADDING = 1 << 29, 1 << 24
BPE_SIZES = range(257, 1_000_001)  # 256 bytes and END_OF_TEXT are always there


@dataclass(frozen=True, slots=True)
class Frame:
    """Tokens that a tokenizer puts around a text: what transformers' `tokenizer(text)` adds.

    transformers 5 takes them from the post-processor in tokenizer.json alone; `add_bos_token` in
    tokenizer_config.json has no effect beside that file.
    """

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoder:
    """A tokenizer, ready to encode."""

    vocab_size: int
    separator: int | None
    """Token between documents; None where a tokenizer.json has no known one."""
    frame: Frame = Frame()
    """Tokens around each document of text; a chat template writes its own."""
    encode: Callable[[list[str]], list[Any]]
    """Texts → sequence of tokens for each, without the frame."""
    encode_with_offsets: Callable[[list[str]], list[tuple[Any, Any]]]
    """Texts → tokens without the frame, and each token's first and last character + 1."""
    encode_words: Callable[[Sequence[Sequence[str]]], list[tuple[Any, Any]]] | None = None
    """Texts as words → tokens without the frame, and each token's word; None: of bytes."""
    joins_words: bool = False
    """Whether the tokens of words say nothing of spaces between them."""

    @property
    def dtype(self) -> str:
        """Type of the tokens in files."""
        return "uint16" if self.vocab_size <= 1 << 16 else "uint32"

    def end_after(self, last: int | None) -> tuple[int, ...]:
        """Tokens that end a document of text whose own last token is `last`.

        A separator that is there already, in the text or its frame, is not doubled.
        """
        after = self.frame.after
        if after and after[0] == last:
            after = after[1:]
        if self.separator is None or (after[-1] if after else last) == self.separator:
            return after
        return (*after, self.separator)


def check_tokenizer(spec: str) -> str | None:
    """The problem with a tokenizer as the user wrote it, or None."""
    if spec == "bytes":
        return None
    if (size := _bpe_size(spec)) is not None:
        wanted = f"bpe- needs a size from {BPE_SIZES[0]} to {BPE_SIZES[-1]}"
        return None if size in BPE_SIZES else wanted
    file = tokenizer_file(spec)
    if file is None or not file.is_file():
        return "it is neither `bytes`, nor `bpe-SIZE`, nor a tokenizer.json or a folder with one"
    try:
        load(file)
    except ColotrainError as error:
        return error.problem
    return None


def vocab_size_of(tokenizer: str, tokens: Sequence[str] = ()) -> int | None:
    """Size of a tokenizer's vocabulary, found without preparing data; None if it is invalid.

    `tokens` are added to it.
    """
    if check_tokenizer(tokenizer) is not None:
        return None
    if tokenizer == "bytes":
        return 256
    file = tokenizer_file(tokenizer)
    return _bpe_size(tokenizer) or (_vocab_size(load_with(file, tokens)) if file else None)


def load_with(file: Path, tokens: Sequence[str]) -> Tokenizer:
    """The tokenizer in a file, with special tokens that are added to it."""
    if not tokens:
        return load(file)
    tokenizer = _load(file.expanduser())  # one of its own, for it is changed
    tokenizer.add_special_tokens([*tokens])
    return tokenizer


def tokenizer_file(spec: str) -> Path | None:
    """The file of a tokenizer, in a folder its tokenizer.json; None for `bytes` and `bpe-SIZE`."""
    if spec == "bytes" or _bpe_size(spec) is not None:
        return None
    path = Path(spec).expanduser().absolute()
    return path / "tokenizer.json" if path.is_dir() else path


def settings_beside(spec: str) -> dict[str, Any]:
    """Settings in tokenizer_config.json beside a tokenizer: special tokens, chat template.

    A separate chat_template.jinja has priority. Special tokens are converted to strings.
    """
    file = tokenizer_file(spec)
    if file is None:
        return {}
    found: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        try:
            found |= read_json(file.parent / name)
        except (OSError, ValueError, TypeError):
            continue
    for name, value in found.items():
        if name.endswith("_token") and isinstance(value, dict):
            found[name] = value.get("content")
    template = file.parent / "chat_template.jinja"
    if template.is_file():
        found["chat_template"] = read_text(template)
    return found


def make_encoder(
    spec: str, file: Path, texts: Iterable[str], *, tokens: Sequence[str] = ()
) -> Encoder:
    """The encoder of a tokenizer that `check_tokenizer` accepts; `bpe-SIZE` is trained on `texts`.

    A subword tokenizer is saved in `file`, with the special tokens `tokens`.
    """
    size, source = _bpe_size(spec), tokenizer_file(spec)
    if size is not None:
        _train_bpe(size, texts).save(str(file))
    elif source is not None and tokens:
        load_with(source, tokens).save(str(file))
    elif source is not None:
        shutil.copyfile(source, file)
    return open_encoder(spec, file)


def open_encoder(spec: str, file: Path) -> Encoder:
    """The encoder of a tokenizer that `make_encoder` has saved in `file`.

    For `bpe-SIZE` the size of the vocabulary is SIZE, even if training found fewer tokens, so that
    a model's shape does not depend on the corpus.
    """
    if spec == "bytes":
        return Encoder(
            vocab_size=256,
            separator=0,
            encode=_encode_bytes,
            encode_with_offsets=_bytes_with_offsets,
        )
    frame = frame_of(load(file))
    tokenizer = _load(file)  # one of its own, for it is changed
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.post_processor = None  # some trim offsets: a space would belong to no token
    return Encoder(
        vocab_size=_bpe_size(spec) or _vocab_size(tokenizer),
        separator=separator_of(spec, tokenizer),
        frame=frame,
        encode=lambda texts: [
            encoding.ids
            for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ],
        encode_with_offsets=lambda texts: [
            (encoding.ids, encoding.offsets)
            for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)
        ],
        encode_words=lambda texts: [
            (encoding.ids, encoding.word_ids)
            for encoding in tokenizer.encode_batch(
                texts, is_pretokenized=True, add_special_tokens=False
            )
        ],
        joins_words=_joins_words(tokenizer),
    )


def _joins_words(tokenizer: Tokenizer) -> bool:
    words = tokenizer.encode(["0", "1"], is_pretokenized=True, add_special_tokens=False)
    return words.ids == tokenizer.encode("01", add_special_tokens=False).ids


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentForm:
    """Tokens, as text, around each document of text; a chat template writes its own."""

    begins: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()

    def __str__(self) -> str:
        begins = f"begin with {' '.join(self.begins)} (the tokenizer adds it)"
        ends = f"end with {' '.join(self.ends)}"
        return ", ".join(
            (
                begins if self.begins else "nothing is put before them",
                ends if self.ends else "no token ends them",
            )
        )


def frame_of(tokenizer: Tokenizer) -> Frame:
    """The tokens that a tokenizer's post-processor adds to a text, without its padding."""
    if tokenizer.post_processor is None:
        return Frame()
    for text in ("a", "0", ".", *tokenizer.get_vocab()):
        encoding = tokenizer.encode(text)
        seen = np.flatnonzero(encoding.attention_mask)
        ids = [encoding.ids[i] for i in seen]
        is_added = [encoding.special_tokens_mask[i] for i in seen]
        if 0 in is_added:
            begin = is_added.index(0)
            end = len(is_added) - is_added[::-1].index(0)
            return Frame(tuple(ids[:begin]), tuple(ids[end:]))
    return Frame()


PROBES = (
    "It's 2024-11-28: 1234567 items, that's all!\n\n\tTwo  spaces   and more ",
    "cafe\u0301 caf\u00e9 \ufb01 \u2126 \u00bd \u65e5\u672c\u8a9e \ud55c\uad6d\uc5b4",
    "\U0001f469\u200d\U0001f467 DON'T",
)
"""Texts that pre-tokenizers and normalizers treat otherwise."""


def document_form(spec: str, file: Path | None = None, *, separates: bool = True) -> DocumentForm:
    """The tokens around each document of text; `file` is that of a tokenizer without its own.

    `separates`: whether documents end with the separator.
    """
    path = file or tokenizer_file(spec)
    if path is None and not separates:
        return DocumentForm()
    if path is None:
        return DocumentForm(ends=("\\0",) if spec == "bytes" else (END_OF_TEXT,))
    tokenizer = load(path)
    frame, separator = frame_of(tokenizer), separator_of(spec, tokenizer)
    ends = [*frame.after]
    if separates and separator is not None and separator not in ends[-1:]:
        ends.append(separator)
    return DocumentForm(
        begins=tuple(str(tokenizer.id_to_token(number)) for number in frame.before),
        ends=tuple(str(tokenizer.id_to_token(number)) for number in ends),
    )


def separator_of(spec: str, tokenizer: Tokenizer) -> int | None:
    """Id of the token that ends a document; None where the tokenizer has no known one."""
    settings = settings_beside(spec)
    names = [settings.get("eos_token"), *SEPARATORS, settings.get("sep_token")]
    known = [tokenizer.token_to_id(name) for name in names if isinstance(name, str)]
    return next((number for number in known if number is not None), None)


def end_of_text(spec: str) -> int | None:
    """Id of the token that ends a document of `bytes` or a tokenizer.json; None: not known."""
    file = tokenizer_file(spec)
    if file is None:
        return 0 if spec == "bytes" else None
    return separator_of(spec, load(file))


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialTokens:
    """Ids of the special tokens of a masked language model; None where there is none."""

    mask: int | None
    pad: int | None
    begin: int | None
    end: int | None
    special: tuple[int, ...]
    """All special tokens, ascending."""


def special_tokens(spec: str, tokens: Sequence[str] = ()) -> SpecialTokens | None:
    """The special tokens of a tokenizer.json with `tokens`; None for `bytes` and `bpe-SIZE`."""
    file = tokenizer_file(spec)
    if file is None:
        return None
    tokenizer, named = load_with(file, tokens), settings_beside(spec)
    added = tokenizer.get_added_tokens_decoder()
    found = {role: _id_of(tokenizer, named.get(role), usual) for role, usual in USUAL.items()}
    special = {number for number, token in added.items() if token.special}
    frame = frame_of(tokenizer)
    if frame != Frame():
        begin = frame.before[0] if frame.before else None
        end = frame.after[-1] if frame.after else None
    else:
        begin, end = found["cls_token"], found["sep_token"]
    return SpecialTokens(
        mask=found["mask_token"],
        pad=found["pad_token"],
        begin=begin,
        end=end,
        special=tuple(sorted(special | {i for i in found.values() if i is not None})),
    )


def _id_of(tokenizer: Tokenizer, name: Any, usual: Sequence[str]) -> int | None:
    names = [name] if isinstance(name, str) else usual
    known = (tokenizer.token_to_id(name) for name in names)
    return next((number for number in known if number is not None), None)


def other_tokens(spec: str) -> str:
    """Say that transformers makes other tokens of a model directory's files than tokenizer.json.

    Some of its classes replace what is in that file. Empty where it makes the same, or is not
    installed, or does not load the tokenizer.
    """
    folder = Path(spec).expanduser()
    if not (folder / "tokenizer_config.json").is_file():
        return ""
    try:
        from transformers import AutoTokenizer

        theirs = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        found = [theirs(text, add_special_tokens=False)["input_ids"] for text in PROBES]
    except Exception:  # whatever the library raises about files of the user's
        return ""
    own = _load(folder / "tokenizer.json")
    own.no_truncation()
    own.no_padding()
    if found == [own.encode(text, add_special_tokens=False).ids for text in PROBES]:
        return ""
    return (
        f"training has the tokens of {folder / 'tokenizer.json'}, and transformers' "
        f"{type(theirs).__name__} makes others of that directory, also of exports: write the files "
        "anew with AutoTokenizer.from_pretrained(…).save_pretrained(…)"
    )


def load(path: Path) -> Tokenizer:
    """Load the tokenizer saved in a file; raises `ColotrainError` if that fails."""
    path = path.expanduser()
    try:
        stat = path.stat()
        if stat.st_size > MOST_FILE_BYTES:
            raise ValueError(f"it has more than {MOST_FILE_BYTES >> 20} MiB")
        return _load_version(path, stat.st_size, stat.st_mtime_ns)
    except Exception as error:  # the library raises bare Exceptions
        problem = f"{path} is not a tokenizer.json that can be read ({error})"
        fix = fix_of(error, "give a file saved by the tokenizers library")
        raise ColotrainError(problem, fix) from error


@lru_cache(maxsize=4)
def _load_version(path: Path, size: int, mtime_ns: int) -> Tokenizer:
    return _load(path)


def _load(path: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    padding = tokenizer.padding or {}
    if max(padding.get("length") or 0, padding.get("pad_to_multiple_of") or 0) > MOST_PADDING:
        raise ValueError(f"it pads texts to more than {MOST_PADDING:,} tokens")
    return tokenizer


def _train_bpe(size: int, texts: Iterable[str]) -> Tokenizer:
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
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return tokenizer


def _encode_bytes(texts: list[str]) -> list[Any]:
    return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]


def _bytes_with_offsets(texts: list[str]) -> list[tuple[Any, Any]]:
    # every byte but a continuation byte begins a character
    ends = [(ids, np.cumsum((ids & 0xC0) != 0x80)) for ids in _encode_bytes(texts)]
    return [(ids, np.stack([stop - 1, stop], axis=1)) for ids, stop in ends]


def _bpe_size(spec: str) -> int | None:
    size = re.fullmatch(r"bpe-(\d+)", spec)
    return int(size[1]) if size else None


def _vocab_size(tokenizer: Tokenizer) -> int:
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
