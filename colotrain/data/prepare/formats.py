"""Formats of the files in `data.path`, recognised by names and contents. No torch here.

| format | what it is |
| --- | --- |
| text | files of UTF-8 text, each a document |
| jsonl | one JSON object per line (also gzipped) |
| parquet | Apache Parquet |
| arrow | a folder written by `save_to_disk` of the datasets library, or Arrow files |
| nanogpt | `.bin`: raw 16-bit tokens (`.u32.bin`: 32-bit) |
| megatron | `.bin` with an `.idx` beside it, as Megatron-LM writes them |
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colotrain.data.prepare import corpora
from colotrain.data.prepare.corpora import CorpusFile
from colotrain.spec.plan import DataPlan

FORMATS = ("text", "jsonl", "parquet", "arrow", "nanogpt", "megatron")
RECORD_FORMATS = ("jsonl", "parquet", "arrow")
ENDINGS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".jsonl.gz": "jsonl",
    ".ndjson.gz": "jsonl",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
OTHER_RECORDS = {
    ".json": "one JSON document",
    ".csv": "a table of text",
    ".tsv": "a table of text",
}
"""Endings of files of records that are not read, and what such a file is."""
MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
SPLIT_WORDS = {
    "train": "train",
    "training": "train",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
    "test": "test",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordFile:
    """A file of records, with the split that its name says (None: split by record)."""

    name: str
    path: Path
    split: str | None

    @property
    def size_bytes(self) -> int:
        return self.path.stat().st_size


def recognise(plan: DataPlan) -> str:
    """One of `FORMATS`: `data.format` if set, otherwise the format that the files look like.

    A folder has a record format if all of its data files have it; a single `.txt` makes it text.
    Raises `ConfigError` for a folder with files of two record formats, and where all files are
    records in a format that is not read, such as one JSON array.
    """
    if plan.source == "corpus":
        return "text"
    if plan.format != "auto":
        return plan.format
    kinds = {_kind_of(path) for path in plan.paths}
    if len(kinds) > 1:
        fix = "set data.format, or put the others into data.mixture"
        raise corpora.wrong_path(", ".join(plan.paths), f"one format, not {_list(kinds)}", fix)
    return kinds.pop()


def _kind_of(path: str) -> str:
    place = Path(path).expanduser()
    if is_megatron(place):
        return "megatron"
    if place.is_dir() and is_saved_dataset(place):
        return "arrow"
    found = [Path(match) for match in corpora.matches(path)]
    if len(found) == 1 and found[0].is_dir():
        return _kind_of_folder(found[0])
    kinds = {_kind_of_file(file) for file in found if file.is_file()} or {"text"}
    if kinds == {"text"}:
        _refuse_other_records(path, found)
    records = kinds & set(RECORD_FORMATS)
    if len(kinds) > 1 and records:
        raise corpora.wrong_path(path, f"one format, not {_list(kinds)}", "set data.format")
    return "text" if len(kinds) > 1 else kinds.pop()


def _kind_of_folder(folder: Path) -> str:
    if any((folder / f"{split}{end}").is_file() for split in ("train", "val") for end in BINS):
        return "megatron" if is_megatron(folder / "train") else "nanogpt"
    found = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    names = [path for path in found if not _is_aside(path.relative_to(folder))]
    kinds = {_kind_of_file(path) for path in names if path.suffix not in (".idx",)}
    if not kinds:
        return "text"
    records = kinds & set(RECORD_FORMATS)
    if kinds == {"nanogpt"} or kinds == {"megatron"}:
        return kinds.pop()
    if records == kinds and len(kinds) > 1:
        fix = "set data.format, or name the files with a glob"
        raise corpora.wrong_path(str(folder), f"one format, not {_list(kinds)}", fix)
    if kinds == {"text"}:
        _refuse_other_records(str(folder), names)
    return kinds.pop() if records == kinds else "text"


BINS = (".bin", ".u32.bin")


def _kind_of_file(path: Path) -> str:
    for ending, kind in ENDINGS.items():
        if path.name.endswith(ending):
            return kind
    if path.suffix == ".bin":
        return "megatron" if is_megatron(path) else "nanogpt"
    about = path.name.startswith("dataset_info")  # of the datasets library, often on one line
    if path.suffix == ".json" and not about and _holds_records(path):
        return "jsonl"
    return "text"


def _refuse_other_records(path: str, files: Sequence[Path]) -> None:
    """Raise `ConfigError` where every file is a JSON document or a table, not text to train on."""
    endings = {file.suffix for file in files}
    for ending, what in OTHER_RECORDS.items():
        if endings == {ending}:
            fix = "convert it to JSONL or Parquet, or set data.format=text to train on it as it is"
            expected = f"one JSON object per line, Parquet, Arrow or text ({ending}: {what})"
            raise corpora.wrong_path(path, expected, fix)


def _is_aside(path: Path) -> bool:
    """Whether a file is not data: a README, a licence, or hidden.

    `path` is relative to the folder that holds the data.
    """
    stem = path.name.upper()
    hidden = any(part.startswith(".") for part in path.parts)
    aside = stem.startswith(("README", "LICENSE", "LICENCE", "_SUCCESS", "DATASET_INFO"))
    return hidden or aside or path.suffix in (".crc", ".md")


def _holds_records(path: Path) -> bool:
    """Whether the first line is a complete JSON object."""
    try:
        with path.open("rb") as file:
            line = file.readline(1 << 20)
        return isinstance(json.loads(line), dict)
    except (OSError, ValueError):
        return False


def is_megatron(place: Path) -> bool:
    """Whether `place` (PREFIX, PREFIX.bin or PREFIX.idx) names a Megatron pair."""
    index = megatron_prefix(place).with_name(megatron_prefix(place).name + ".idx")
    try:
        with index.open("rb") as file:
            return file.read(len(MEGATRON_MAGIC)) == MEGATRON_MAGIC
    except OSError:
        return False


def megatron_prefix(place: Path) -> Path:
    return place.with_suffix("") if place.suffix in (".bin", ".idx") else place


def is_saved_dataset(folder: Path) -> bool:
    """Whether `save_to_disk` of the datasets library wrote the folder."""
    if (folder / "dataset_dict.json").is_file():
        return True
    return (folder / "state.json").is_file() and any(folder.glob("*.arrow"))


def record_files(plan: DataPlan, kind: str) -> list[RecordFile]:
    """The files of a record format, in the order of their names.

    If some names say train and others validation (or test), the files are split by name, and the
    validation fraction is not used. Test files are then left out, unless there are no validation
    files, and a file whose name says neither raises `ConfigError`.
    """
    found = [file for path in plan.paths for file in _record_files_at(path, kind)]
    if not found:
        expected = f"files of records ({kind})"
        raise corpora.wrong_path(", ".join(plan.paths), expected, "correct the path or data.format")
    splits = {file.split for file in found}
    if "train" not in splits or not splits & {"validation", "test"}:
        return [_in_split(file, None) for file in found]
    for file in found:
        if file.split is None:
            expected = "a name that begins with train, validation or test, as others here do"
            fix = f"call it train-{file.path.name} to train on it, or leave it out of data.path"
            raise corpora.wrong_path(str(file.path), expected, fix)
    held = "validation" if "validation" in splits else "test"
    names = {"train": "train", held: "validation"}
    return [_in_split(file, names[file.split]) for file in found if file.split in names]


def _in_split(file: RecordFile, split: str | None) -> RecordFile:
    return RecordFile(name=file.name, path=file.path, split=split)


def _record_files_at(path: str, kind: str) -> list[RecordFile]:
    place = Path(path).expanduser()
    if kind == "arrow" and place.is_dir() and is_saved_dataset(place):
        return _saved_files(place)
    files = corpora.expand([path])
    if place.is_dir():
        files = [file for file in files if _kind_of_file(file.path) == kind]
    return [RecordFile(name=f.name, path=f.path, split=_split_of(f.name)) for f in files]


def _saved_files(folder: Path) -> list[RecordFile]:
    """The Arrow files of a saved Dataset or DatasetDict, in the order its state.json gives."""
    if (folder / "dataset_dict.json").is_file():
        splits = _json(folder / "dataset_dict.json").get("splits", [])
        return [
            RecordFile(
                name=f"{split}/{file.name}", path=file.path, split=SPLIT_WORDS.get(split, split)
            )
            for split in splits
            for file in _saved_files(folder / str(split))
        ]
    listed = _json(folder / "state.json").get("_data_files") or []
    names = [str(entry["filename"]) for entry in listed] or sorted(
        path.name for path in folder.glob("*.arrow")
    )
    return [RecordFile(name=name, path=folder / name, split=None) for name in names]


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        fix = "save the dataset again"
        raise corpora.wrong_path(str(path), f"JSON ({error})", fix) from error
    return found if isinstance(found, dict) else {}


def _split_of(name: str) -> str | None:
    """Split in a file's name: `train` in `data/train-0-of-2.parquet` or `train/part-0.jsonl`."""
    for part in reversed(Path(name).parts):
        word = part.split(".")[0].split("-")[0].split("_")[0].lower()
        if word in SPLIT_WORDS:
            return SPLIT_WORDS[word]
    return None


def as_corpus_files(files: Sequence[RecordFile]) -> list[CorpusFile]:
    return [CorpusFile(name=f"{file.split}:{file.name}", path=file.path) for file in files]


def _list(kinds: set[str]) -> str:
    return " and ".join(sorted(kinds))
