"""What a folder, a file or a glob holds: data, the splits their names say, and files beside them.

No torch here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from colotrain.data.prepare import corpora, formats
from colotrain.data.prepare.corpora import DataFile
from colotrain.data.prepare.formats import TOKEN_FORMATS

WORDS = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "validate": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "eval": "validation",
    "evals": "validation",
    "evaluation": "validation",
    "holdout": "validation",
    "heldout": "validation",
    "test": "test",
    "tests": "test",
    "testing": "test",
}
"""Words of names, in lower case → split. They may end in `set`, `data` or `split`."""
OTHER = "other"
"""Split of a saved DatasetDict whose name says none of the known ones."""
PROGRAM = re.compile(
    r"(?i)\.(pyi?|pyx|ipynb|c|h|cc|cpp|cxx|hpp|cuh?|java|kt|scala|go|rs|m?js|jsx|tsx?|rb|php|pl|lua|r|jl|"
    r"m|swift|cs|fs|hs|ml|clj|ex|erl|sh|bash|ps1|sql|html|css|scss|vue|toml|ya?ml|cfg|ini|xml|proto|"
    r"cmake|mk|gradle|s|asm|f90|v|sv|vhd|zig|nim|dart|el|scm|md|rst)$"
)
"""Endings of programs and their documentation, whose names (`test_x.py`) say nothing of splits."""
DOCUMENTS = (".txt", ".text")
"""Endings of files that are data wherever they are text."""
MOST_STRAYS = 8
"""Files of another kind than the data's that may lie beside them without being meant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The data that one entry of `data.path` names, and the files beside it that are not read."""

    files: tuple[DataFile, ...]
    """`split` is what the name says: train, validation, test, `unclear`, `OTHER` or None."""
    unread: tuple[DataFile, ...] = ()


def look_at(path: str, data_format: str, key: str, hint: str) -> Found:
    """What an entry of `data.path` names, each file with the split that its name says.

    `hint` is a folder whose name counts as well. Raises `ConfigError` where nothing is found, or
    where it is not clear which files are data.
    """
    place = Path(path).expanduser()
    if data_format in ("auto", "arrow") and place.is_dir() and formats.is_saved_dataset(place):
        return _saved_dataset(place, path, key, hint)
    if data_format in ("auto", "megatron") and formats.is_megatron(place):
        pair = formats.megatron_bin(place)
        return Found(files=_with_splits([_megatron_file(pair.name, pair)], hint))
    found = _expand(path, key)
    if data_format == "auto" and place.is_file():
        return Found(files=_with_splits([_alone(file) for file in found], hint))
    if data_format == "auto":
        files, unread = _sort_out(path, key, found)
    else:
        files, unread = _of_format(data_format, found, is_folder=place.is_dir())
    if not files:
        expected = f"files of the format {data_format}"
        raise corpora.wrong_path(path, expected, "correct the path or data.format", key=key)
    return Found(files=_with_splits(files, hint), unread=tuple(unread))


def _saved_dataset(place: Path, path: str, key: str, hint: str) -> Found:
    files = _with_splits(formats.saved_files(place), hint)
    if (place / "dataset_dict.json").is_file():
        files = tuple(file if file.split else replace(file, split=OTHER) for file in files)
    read = {file.path for file in files}
    unread = [file for file in corpora.expand(path, key) if file.path not in read]
    about = formats.HUGGING_FACE
    return Found(files=files, unread=tuple(f for f in unread if f.path.name not in about))


def _expand(path: str, key: str) -> list[DataFile]:
    """The files of an entry with their kinds; of a saved dataset those that it names itself."""
    found = corpora.expand(path, key)
    folders = {file.path.parent for file in found if file.path.name == "state.json"}
    saved = {f: formats.saved_files(f) for f in folders if formats.is_saved_dataset(f)}
    files: list[DataFile] = []
    for file in found:
        if (listed := saved.get(file.path.parent)) is not None:
            if file.path.name not in formats.HUGGING_FACE:
                is_listed = any(file.path == one.path for one in listed)
                files.append(replace(file, kind="arrow" if is_listed else "text"))
        elif file.path.suffix != ".idx" or not formats.is_megatron(file.path):
            files.append(replace(file, kind=formats.kind_of(file.path)))
    return files


def _alone(file: DataFile) -> DataFile:
    if file.kind == "object":
        return replace(file, kind="json")
    return _megatron_file(file.name, file.path) if file.kind == "megatron" else file


def _megatron_file(name: str, path: Path) -> DataFile:
    return DataFile(name=name, path=formats.megatron_bin(path), kind="megatron")


def _of_format(
    data_format: str, found: Sequence[DataFile], *, is_folder: bool
) -> tuple[list[DataFile], list[DataFile]]:
    """Files of the format that the user says, and the others beside them in a folder."""
    kinds = {"json": ("json", "object"), "fasttext": ("text",)}.get(data_format, (data_format,))
    if data_format == "text":
        chosen = [file for file in found if not (is_folder and file.path.suffix == ".bin")]
    elif is_folder or data_format == "megatron":
        chosen = [file for file in found if file.kind in kinds]
        if data_format == "fasttext":
            chosen = [file for file in chosen if not formats.is_about(file.name)]
    else:
        chosen = list(found)
    others = rest_of(found, chosen)
    return [replace(file, kind=data_format) for file in chosen], others


def _sort_out(
    path: str, key: str, found: Sequence[DataFile]
) -> tuple[list[DataFile], list[DataFile]]:
    """The data of a folder or glob, and the files beside it that are not read.

    Records and tokens are data, and files of text beside them are not, unless they may be meant:
    documents (`DOCUMENTS`), or many.
    """
    data = [file for file in found if file.kind not in ("text", "object")]
    strays = [file for file in rest_of(found, data) if not formats.is_about(file.name)]
    documents = [file for file in strays if file.path.suffix.lower() in DOCUMENTS]
    tokens = [file for file in data if file.kind in TOKEN_FORMATS]
    if tokens and len(tokens) == len(data) and documents and not any(map(_says_split, tokens)):
        data = []  # such as a model's weights beside documents
    if not data and strays and all(file.kind == "object" for file in strays):
        data = [replace(file, kind="json") for file in strays]
    if not data:
        texts = [replace(file, kind="text") for file in found if file.kind not in TOKEN_FORMATS]
        return texts, tokens
    unclear = bool(documents) and not tokens
    unclear |= len(strays) > max(MOST_STRAYS, len(data))
    if unclear or 0 < len(tokens) < len(data):
        kinds = {file.kind for file in data} | ({"text"} if unclear else set())
        shown = formats.as_list(kinds)
        fix = "set data.format, or name the files that are meant with a glob"
        raise corpora.wrong_path(path, f"one format, not {shown}", fix, key=key)
    return data, rest_of(found, data)


def rest_of(files: Sequence[DataFile], chosen: Sequence[DataFile]) -> list[DataFile]:
    """The files that are not among `chosen`."""
    paths = {file.path for file in chosen}
    return [file for file in files if file.path not in paths]


def _says_split(file: DataFile) -> bool:
    return split_in(file.name) is not None


def _with_splits(files: Sequence[DataFile], hint: str) -> tuple[DataFile, ...]:
    """The files with the splits that their names say, or None."""
    return tuple(
        replace(file, split=None if is_program(file) else split_in(f"{hint}/{file.name}"))
        for file in files
    )


def is_program(file: DataFile) -> bool:
    """Whether it is text of a program or its documentation, whose name says no split."""
    return file.kind == "text" and PROGRAM.search(file.name) is not None


def split_in(name: str) -> str | None:
    """The split that a path says: that of its last part with a word for one; `unclear` for two.

    A folder whose name says two, such as `train-test-split`, says none.
    """
    *folders, last = Path(name).parts
    for part in (last, *reversed(folders)):
        said = _splits_in(part)
        if len(said) == 1:
            return said.pop()
        if said == {"validation", "test"}:
            return "test"
        if said and part == last:
            return "unclear"
    return None


def _splits_in(text: str) -> set[str]:
    text = re.sub(r"(?i)\bh[oe]ld[-_. ]?out", "holdout", text.replace("_", "-"))
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", text)
    bare = [re.sub(r"(.)(set|data|split)$", r"\1", word.lower()) for word in words]
    return {WORDS[word] for word in bare if word in WORDS}
