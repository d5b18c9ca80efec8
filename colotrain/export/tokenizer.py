"""The tokenizer of an exported model, in files that AutoTokenizer loads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from colotrain.data.prepare import vocabulary
from colotrain.data.prepare.tokens import prepare_all
from colotrain.errors import ColotrainError
from colotrain.spec.plan import DataPlan

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
)
"""Tokenizer files that a Hugging Face directory may have; code is never copied."""
SEPARATOR_OF_BYTES = 0


def copy_tokenizer(source: Path, folder: Path) -> list[Path]:
    """Copy the tokenizer's files from a model directory; returns the copies."""
    found = [source / name for name in FILES if (source / name).is_file()]
    return [Path(shutil.copyfile(path, folder / path.name)) for path in found]


def write_tokenizer(
    data: DataPlan, folder: Path, *, progress: Callable[[str, int, int], None]
) -> int | None:
    """Write the tokenizer of the run's data; returns the separator's token id.

    A `bpe-SIZE` that is no longer cached is trained again on the same text. Raises
    `ColotrainError` where that text is gone.
    """
    file = folder / "tokenizer.json"
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": data.seq_len,
        "clean_up_tokenization_spaces": False,
    }
    if data.tokenizer == "bytes":
        byte_tokenizer().save(str(file))
        end: int | None = SEPARATOR_OF_BYTES
    else:
        named = vocabulary.tokenizer_file(data.tokenizer)
        source = named or prepare_all(data, progress=progress)[0].tokenizer
        if source is None or not source.is_file():
            raise ColotrainError(f"the tokenizer {source or data.tokenizer} is gone")
        if Path(data.tokenizer).is_dir():
            copy_tokenizer(source.parent, folder)
        else:
            shutil.copyfile(source, file)
        tokenizer = vocabulary.load(file)
        end = vocabulary.separator_of(data.tokenizer, tokenizer)
        if end is not None:
            settings["eos_token"] = tokenizer.id_to_token(end)
    own = folder / "tokenizer_config.json"
    if not own.exists():
        own.write_text(json.dumps(settings, indent=2) + "\n", "utf-8")
    return end


def byte_tokenizer() -> Any:
    """A tokenizer of 256 tokens, in which each byte is its own token id."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab=_byte_characters(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _byte_characters() -> dict[str, int]:
    """Character → the byte it stands for in byte-level BPE (Radford et al. 2019): the byte's own
    character where that can be printed, otherwise one from 256 on."""
    printed = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printed]
    characters = {chr(byte): byte for byte in printed}
    return characters | {chr(256 + at): byte for at, byte in enumerate(others)}
