"""The tokenizer of an exported model, in files that AutoTokenizer loads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from colotrain.data.prepare import vocabulary
from colotrain.data.prepare.tokens import prepare_all
from colotrain.errors import ColotrainError
from colotrain.export.job import Job
from colotrain.export.prompting import write_template
from colotrain.spec.plan import DataPlan

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "vocab.bpe",
    "merges.txt",
    "bpe.codes",
    "normalizer.json",
    "tokenizer.model",
    "spiece.model",
    "spm.model",
    "sentencepiece.bpe.model",
    "source.spm",
    "target.spm",
    "chat_template.jinja",
    "chat_template.json",
)
"""Tokenizer files that a Hugging Face directory may have; code is never copied."""
PROCESSORS = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "image_processor_config.json",
)
"""Files of processors of images, sounds and videos."""
BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
"""Files beside a tokenizer.json that training reads, too."""
SEPARATOR_OF_BYTES = 0


def write_run_tokenizer(job: Job, *, source: str | None) -> int | None:
    """Write tokenizer, chat template and processors; returns the token between documents, if known.

    `source` is the model's directory, if it has one. What is missing is noted.
    """
    data, folder = job.plan.data, Path(source) if source is not None else None
    trained_on, end = Path(data.tokenizer), None
    if folder is not None and (
        data.source == "target" or folder in (trained_on, trained_on.parent)
    ):
        if not copy_files(folder, job.folder, FILES):
            job.notes.append(f"no tokenizer: {folder} has none")
    elif data.source == "target":
        job.notes.append("no tokenizer: the run's data came from data.target")
    else:
        try:
            end = write_tokenizer(data, job.folder, progress=job.progress)
        except ColotrainError as error:
            job.notes.append(f"no tokenizer: {error.problem}")
    if folder is not None:
        copy_files(folder, job.folder, PROCESSORS)
    file = job.folder / "tokenizer.json"
    if data.tokens and file.is_file():
        vocabulary.load_with(file, data.tokens).save(str(file))
    write_template(job)
    return end


def copy_files(source: Path, folder: Path, names: Sequence[str]) -> list[Path]:
    """Copy those of the files that are in a directory; returns the copies."""
    found = [source / name for name in names if (source / name).is_file()]
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
            copy_files(source.parent, folder, FILES)
        else:
            shutil.copyfile(source, file)
            if named is not None:
                copy_files(source.parent, folder, BESIDE)
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
