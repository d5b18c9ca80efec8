"""The files of a plan's data: which are read, which split each is in, and which are left out.

No torch here. Names of files and folders say train, validation or test, and what they hold back is
never trained on:

| names in `data.path` | trained on | validation |
| --- | --- | --- |
| train and validation | train | validation |
| train and test | train | test |
| validation or test, and others that say nothing | the others | validation, else test |
| no validation and no test | a share of all | the rest |
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from colotrain.data.prepare import corpora, formats
from colotrain.data.prepare.corpora import DataFile
from colotrain.data.prepare.folders import OTHER, is_program, look_at, rest_of
from colotrain.data.prepare.formats import family_of
from colotrain.records import as_argument
from colotrain.spec.plan import DataPlan

VALIDATION = "data.validation_path"
MOST_NAMES = 5
"""Names of files that are shown, of many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """The files of a plan's data, or of one part of a mixture."""

    files: tuple[DataFile, ...]
    """All that are read; either each has a split, or none has."""
    left_out: tuple[DataFile, ...] = ()
    """Files of data that are in neither split, by their names."""
    unread: tuple[DataFile, ...] = ()
    """Files of other kinds beside the data."""
    notes: tuple[str, ...] = ()

    @property
    def family(self) -> str:
        """`text`, `records` or `tokens`."""
        return family_of(self.files[0].kind)

    @property
    def kinds(self) -> str:
        """The formats of the files, as messages show them."""
        return formats.as_list({file.kind for file in self.files})

    def of(self, split: str | None) -> list[DataFile]:
        return [file for file in self.files if file.split == split]


def find_sources(plan: DataPlan) -> Sources:
    """The files of a plan that has no mixture, found without reading them.

    Raises `ConfigError` where there are none, or where it is not clear what is meant.
    """
    if plan.source == "corpus":
        found = Sources(files=tuple(corpora.standard_library(plan)))
    else:
        found = _look(plan.paths, plan.format, "data.path")
    if not plan.validation_paths:
        return _checked(_split_by_name(found, plan), plan)
    held = _held_back(_look(plan.validation_paths, plan.format, VALIDATION), found.family)
    found = _split_by_name(_without(found, held, plan), plan)
    unread = {file.path: file for file in (*found.unread, *held.unread)}
    read = {file.path for file in (*found.files, *held.files)}
    found = replace(
        found,
        files=(*found.files, *held.files),
        left_out=tuple(file for file in found.left_out if file.path not in read),
        unread=tuple(file for path, file in unread.items() if path not in read),
    )
    return _checked(found, plan)


def _look(paths: Sequence[str], data_format: str, key: str) -> Sources:
    """What the entries of a key name, with the split that each name says."""
    hints = _hints(paths)
    found = [look_at(path, data_format, key, hint) for path, hint in zip(paths, hints, strict=True)]
    files = {file.path: file for one in found for file in one.files}
    families = {family_of(file.kind) for file in files.values()}
    if len(families) > 1:
        kinds = formats.as_list({file.kind for file in files.values()})
        fix = "set data.format, or put the others into data.mixture"
        raise corpora.wrong_path(", ".join(paths), f"one format, not {kinds}", fix, key=key)
    unread = tuple(file for one in found for file in one.unread if file.path not in files)
    return Sources(files=tuple(files.values()), unread=unread)


def _hints(paths: Sequence[str]) -> list[str]:
    """The name of each entry's folder, which may say a split where folders differ."""
    roots = [str(corpora.root_of(path).absolute()) for path in paths]
    common = os.path.commonpath(roots) if roots else ""
    return [Path(os.path.relpath(root, common)).name for root in roots]


def _split_by_name(found: Sources, plan: DataPlan) -> Sources:
    """The files of `data.path`, each in the split that the names say (see the module's table).

    With validation data of its own (`data.validation_path`) none of them is validation.
    """
    files, own_validation = found.files, bool(plan.validation_paths)
    if len(files) > 1 and (unclear := _first(files, "unclear")):
        expected = "a name that says one split, not two"
        raise corpora.wrong_path(str(unclear.path), expected, "rename it")
    says = {file.split for file in files}
    held = [split for split in ("validation", "test") if split in says]
    if any(map(is_program, files)) and "train" not in says:
        held = []
    if not held:
        split = "train" if own_validation else None
        return replace(found, files=_all_in(split, files))
    if says <= set(held):
        return _named_validation_alone(found, plan, held[0])
    about: list[DataFile] = []
    if "train" in says:
        about = [file for file in files if not file.split and formats.is_about(file.name)]
        _refuse_unnamed(file for file in files if file not in about)
    kept = None if own_validation else held[0]
    away = {*held, OTHER} if "train" in says else set(held)
    train = [file for file in files if file.split not in away and file not in about]
    validation = [file for file in files if kept is not None and file.split == kept]
    return replace(
        found,
        files=(*_all_in("train", train), *_all_in("validation", validation)),
        left_out=tuple(file for file in files if file.split in away and file.split != kept),
        unread=(*found.unread, *about),
    )


def _named_validation_alone(found: Sources, plan: DataPlan, said: str) -> Sources:
    """The files where all of their names say validation or test: refused unless files are named."""
    if not all(Path(path).expanduser().is_file() for path in plan.paths):
        expected = f"data to train on (the names of all its files say {said})"
        fix = "to train on one all the same, name it: "
        fix += as_argument("data.path", str(found.files[0].path))
        raise corpora.wrong_path(", ".join(plan.paths), expected, fix)
    names = shown_names(found.files)
    note = f"{names}: trained on although the name says {said}, because data.path names it alone"
    files = _all_in("train" if plan.validation_paths else None, found.files)
    return replace(found, files=files, notes=(note,))


def _refuse_unnamed(files: Iterable[DataFile]) -> None:
    """Raise `ConfigError` for a file that may be in any split, beside files whose names say one."""
    if other := _first(files, None):
        expected = "a name that says train, validation or test, as others here do"
        fix = f"call it train-{other.path.name} to train on it, or leave it out of data.path"
        raise corpora.wrong_path(str(other.path), expected, fix)


def _held_back(found: Sources, family: str) -> Sources:
    """The files of `data.validation_path`: those whose names say validation or test, else all."""
    if found.family != family:
        expected = f"{family}, as data.path has, not {found.family}"
        raise corpora.wrong_path(str(found.files[0].path), expected, "convert it", key=VALIDATION)
    says = {file.split for file in found.files}
    held = next((split for split in ("validation", "test") if split in says), None)
    files = [file for file in found.files if held in (None, file.split)]
    return replace(found, files=_all_in("validation", files))


def _without(found: Sources, held: Sources, plan: DataPlan) -> Sources:
    """The files of `data.path` that are not those of `data.validation_path`."""
    places = {os.path.realpath(file.path) for file in held.files}
    both = [file for file in found.files if os.path.realpath(file.path) in places]
    rest = tuple(rest_of(found.files, both))
    if not rest:
        value, expected = ", ".join(plan.validation_paths), "other files than those of data.path"
        raise corpora.wrong_path(value, expected, "leave something to train on", key=VALIDATION)
    note = f"{shown_names(both)}: in data.validation_path, and so not trained on"
    return replace(found, files=rest, notes=(note,) if both else ())


def _all_in(split: str | None, files: Iterable[DataFile]) -> tuple[DataFile, ...]:
    return tuple(replace(file, split=split) for file in files)


def _first(files: Iterable[DataFile], split: str | None) -> DataFile | None:
    return next((file for file in files if file.split == split), None)


def _checked(found: Sources, plan: DataPlan) -> Sources:
    """Refuse files of several formats in one split, which may be the same records twice."""
    for split in {file.split for file in found.files}:
        kinds = {file.kind for file in found.of(split)}
        if len(kinds) > 1:
            expected = f"one format, not {formats.as_list(kinds)}"
            fix = "set data.format, or name the files with a glob"
            raise corpora.wrong_path(", ".join(plan.paths), expected, fix)
    return found


def shown_names(files: Sequence[DataFile]) -> str:
    """The names of files, at most `MOST_NAMES` of them."""
    names = [file.name for file in files[:MOST_NAMES]]
    more = len(files) - len(names)
    return ", ".join(names) + (f" and {more:,} more" if more else "")


def describe_sources(plan: DataPlan) -> dict[str, Any]:
    """The files of each split of a plan without a mixture, as `plan --json` shows them."""
    found = find_sources(plan)
    is_shared = found.files[0].split is None
    return {
        "paths": list(plan.paths) or [plan.corpus],
        "format": found.kinds,
        "train": _counted(found.files if is_shared else found.of("train")),
        "validation": _counted(found.of("validation")),
        "validation_share": plan.validation_fraction if is_shared else None,
        "left_out": _counted(found.left_out),
        "unread": _counted(found.unread),
        "text": _as_sentence(found, plan),
    }


def _counted(files: Sequence[DataFile]) -> dict[str, Any]:
    return {"files": len(files), "first": [file.name for file in files[:MOST_NAMES]]}


def _as_sentence(found: Sources, plan: DataPlan) -> str:
    names = "Python's standard library"
    if plan.source != "corpus":
        names = shown_names(found.of("train") or found.files)
    if found.files[0].split is not None:
        parts = [f"train: {names}", f"validation: {shown_names(found.of('validation'))}"]
    elif not plan.validation_fraction:
        parts = [f"train: {names}", "validation: none (data.validation_fraction=0)"]
    else:
        share = 100 * plan.validation_fraction
        parts = [
            f"train: {100 - share:.3g} % of the {found.family} of {names}",
            f"validation: the other {share:.3g} %",
        ]
    if found.left_out:
        parts.append(f"left out by name: {shown_names(found.left_out)}")
    return "; ".join(parts)
