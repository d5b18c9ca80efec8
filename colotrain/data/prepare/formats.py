"""Formats of data files, recognised by their names and contents. No torch here."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colotrain.data.prepare import corpora
from colotrain.data.prepare.corpora import DataFile
from colotrain.data.prepare.packed_files import PACKINGS, open_unpacked
from colotrain.errors import fix_of
from colotrain.rundir import read_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A format; `records` and `token_files` have a row for its reader."""

    family: str
    """`text`, `records` or `tokens`."""
    endings: tuple[str, ...] = ()
    """How names of its files end, where that tells it."""
    may_be_packed: bool = False
    """Whether it is read from compressed files, too."""


FORMATS = {
    # UTF-8, each file a document
    "text": Format(family="text"),
    # one JSON object per line
    "jsonl": Format(family="records", endings=(".jsonl", ".ndjson"), may_be_packed=True),
    # one JSON document: an array of records, an object with one, or a single record
    "json": Format(family="records", endings=(".json",), may_be_packed=True),
    # a table with a header, separated by commas, semicolons or tabs
    "csv": Format(family="records", endings=(".csv", ".tsv"), may_be_packed=True),
    # a word and its class on each line, an empty line between texts
    "conll": Format(
        family="records", endings=(".conll", ".iob", ".iob2", ".bio"), may_be_packed=True
    ),
    # `__label__CLASS` and a text on each line; names of files do not tell it
    "fasttext": Format(family="records", may_be_packed=True),
    "parquet": Format(family="records", endings=(".parquet",)),
    # a folder written by `save_to_disk` of the datasets library, or Arrow files
    "arrow": Format(family="records", endings=(".arrow",)),
    # `.bin`: raw 16-bit tokens (`.u32.bin`: 32-bit)
    "nanogpt": Format(family="tokens"),
    # `.bin` with an `.idx` beside it, as Megatron-LM writes them
    "megatron": Format(family="tokens"),
}
ENDINGS = {ending: name for name, known in FORMATS.items() for ending in known.endings}
TOKEN_FORMATS = tuple(name for name, known in FORMATS.items() if known.family == "tokens")
LISTS = ("data", "rows", "records", "examples", "instances", "samples", "items")
"""Keys under which a JSON object may hold the array of its records."""
MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
ABOUT = ("README", "LICENSE", "LICENCE", "COPYING", "NOTICE", "AUTHORS", "CHANGELOG", "CITATION")
"""How names of files begin that tell about data."""
HUGGING_FACE = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
HEAD_BYTES = 1 << 20


def kind_of(path: Path) -> str:
    """One of `FORMATS`, or `object` for a JSON object that need not be a record."""
    name = path.name.lower()
    packing = next((ending for ending in PACKINGS if name.endswith(ending)), "")
    kind = ENDINGS.get(Path(name.removesuffix(packing)).suffix, "text")
    if packing and not FORMATS[kind].may_be_packed:
        return "text"
    if kind == "json":
        return "text" if name.startswith(HUGGING_FACE) else _kind_of_json(path)
    if name.endswith(".bin"):
        return "megatron" if is_megatron(path) else "nanogpt"
    return kind


def _kind_of_json(path: Path) -> str:
    """Format of a `.json` file, found by its first bytes."""
    try:
        with open_unpacked(path) as file:
            head = file.read(HEAD_BYTES).decode("utf-8-sig", errors="replace").lstrip()
    except (OSError, EOFError):
        return "object"
    if head.startswith("["):
        return "json" if head[1:].lstrip()[:1] in ("{", "]") else "object"
    end = _end_of_object(head)
    after = head[end:].lstrip(" \t\r")
    if after.lstrip().startswith("{"):
        return "jsonl" if after.startswith("\n") and "\n" not in head[:end] else "json"
    names = "|".join(LISTS)
    return "json" if re.search(rf'"({names})"\s*:\s*\[\s*\{{', head) else "object"


def _end_of_object(text: str) -> int:
    """Where the object at the start of a text ends; the text's end if it does not."""
    try:
        found, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return len(text)
    return end if isinstance(found, dict) else len(text)


def family_of(kind: str) -> str:
    """`text`, `records` or `tokens`."""
    return FORMATS[kind].family if kind in FORMATS else "text"


def is_about(name: str) -> bool:
    """Whether a file tells about data, such as a README or a licence."""
    last = Path(name).name
    about = last.upper().startswith(ABOUT) or last.startswith((*HUGGING_FACE, "_SUCCESS"))
    return about or last.endswith((".crc", ".md"))


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


def megatron_bin(place: Path) -> Path:
    prefix = megatron_prefix(place)
    return prefix.with_name(f"{prefix.name}.bin").absolute()


def is_saved_dataset(folder: Path) -> bool:
    """Whether `save_to_disk` of the datasets library wrote the folder."""
    if (folder / "dataset_dict.json").is_file():
        return True
    return (folder / "state.json").is_file() and any(folder.glob("*.arrow"))


def saved_files(folder: Path, inside: str = "") -> list[DataFile]:
    """The Arrow files of a saved Dataset or DatasetDict, in the order its state.json gives.

    `inside` is put before their names.
    """
    if (folder / "dataset_dict.json").is_file():
        splits = _plain_names(folder, _json(folder / "dataset_dict.json").get("splits"))
        return [file for s in splits for file in saved_files(folder / s, f"{inside}{s}/")]
    listed = _json(folder / "state.json").get("_data_files")
    listed = listed if isinstance(listed, list) else []
    named = [entry.get("filename") if isinstance(entry, dict) else entry for entry in listed]
    names = _plain_names(folder, named) or sorted(path.name for path in folder.glob("*.arrow"))
    return [DataFile(name=inside + n, path=folder / n, kind="arrow") for n in names]


def _plain_names(folder: Path, listed: Any) -> list[str]:
    """The names that a saved dataset lists; all are in its folder."""
    names = [str(name) for name in listed] if isinstance(listed, list) else []
    if strange := [name for name in names if name in ("", "..") or Path(name).name != name]:
        expected = f"a dataset whose files are in its folder, not {strange[0]!r}"
        raise corpora.wrong_path(str(folder), expected, "save the dataset again")
    return names


def _json(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path)
    except (OSError, ValueError) as error:
        fix = fix_of(error, "save the dataset again")
        raise corpora.wrong_path(str(path), f"JSON ({error})", fix) from error
    return found if isinstance(found, dict) else {}


def as_list(kinds: Sequence[str] | set[str]) -> str:
    return " and ".join(sorted("json" if kind == "object" else kind for kind in kinds))
