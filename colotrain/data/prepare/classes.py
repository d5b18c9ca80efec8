"""The classes of labelled texts and words: their names in the training files. No torch here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from colotrain.data.prepare import corpora, records
from colotrain.data.prepare.corpora import DataFile
from colotrain.data.prepare.messages import parsed
from colotrain.data.prepare.records import BadRecord
from colotrain.data.prepare.sources import Sources, find_sources
from colotrain.errors import ConfigError, Problem
from colotrain.spec.objectives import IGNORE_INDEX
from colotrain.spec.plan import DataPlan

LABEL = "label"
WORDS = ("tokens", "words")
"""Columns with the words of a text, in the order in which they are looked for."""
LABELS_OF_WORDS = ("labels", "ner_tags", "tags")
"""Columns with a class for each word, in the order in which they are looked for."""
MOST_CLASSES = 10_000
"""More are no classes: numbers to predict, or the texts themselves."""
_counted: dict[str, tuple[str, ...]] = {}
"""Fingerprint of files and settings → classes: a plan is made several times."""


def class_name(value: Any) -> str | None:
    """The class that a record's label names: text, a whole number, true or false; None: no class.

    Numbers of CSV files are texts, and so a number and its text are one class.
    """
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, int):
        return str(value)
    return (value.strip() or None) if isinstance(value, str) else None


def class_number(value: Any, classes: Sequence[str], *, numbered: bool) -> int | None:
    """The number of the class that a label names; None: it names none of `classes`.

    `numbered`: a number is that of a class itself, where no class is called by a number.
    """
    name = class_name(value)
    if name in classes:
        return classes.index(str(name))
    if name is None or not numbered or any(map(is_number, classes)):
        return None
    if not re.fullmatch("[0-9]{1,5}", name):
        return None
    return int(name) if int(name) < len(classes) else None


def is_number(name: str) -> bool:
    return re.fullmatch(r"-?[0-9]+", name) is not None


def labels_of_words(record: Mapping[str, Any], columns: Mapping[str, str]) -> list[Any] | None:
    """The labels of a record's words; None where it has none. Raises `BadRecord`."""
    for meaning in LABELS_OF_WORDS:
        name = columns.get(meaning, meaning)
        if record.get(name) is not None:
            found = parsed(name, record[name])
            if not isinstance(found, list):
                raise BadRecord(f"{name}: expected a list with a label for each word")
            return found
    return None


def label_columns(columns: Mapping[str, str], *, of_words: bool) -> tuple[str, ...]:
    """The columns that may have labels, in the order in which they are looked for."""
    meanings = LABELS_OF_WORDS if of_words else (LABEL,)
    return tuple(columns.get(meaning, meaning) for meaning in meanings)


def _columns(plan: DataPlan) -> tuple[str, ...]:
    return label_columns(plan.columns, of_words=plan.classes_of_words)


def in_order(names: set[str]) -> tuple[str, ...]:
    """Numbers by their size, names by the alphabet."""
    if all(map(is_number, names)):
        return tuple(sorted(names, key=lambda name: (int(name), name)))
    return tuple(sorted(names))


def find_classes(parts: Sequence[DataPlan]) -> tuple[str, ...]:
    """The classes of the training records of the parts of a plan's data.

    Where files of the datasets library list names of classes, these are in their order, and else in
    that of `in_order`. Raises `ConfigError` for files without records, and for more than
    `MOST_CLASSES`.
    """
    names: set[str] = set()
    for part in parts:
        found = find_sources(part)
        if found.family != "records":
            fields = "tokens and labels" if part.classes_of_words else "a text and a label"
            raise _wrong(part, f"records with {fields}, not {found.kinds}")
        files = _training_files(found)
        key = corpora.fingerprint(files, f"{part.columns}{part.classes_of_words}")
        if key not in _counted:
            _counted[key] = tuple(_names(files, part))
        names.update(_counted[key])
        if len(names) > MOST_CLASSES:
            raise _wrong(part, f"at most {MOST_CLASSES:,} classes")
    own = listed_classes(parts)
    return own if names <= {*own} else in_order(names)


def listed_classes(parts: Sequence[DataPlan]) -> tuple[str, ...]:
    """The classes in the order that every training file itself lists; (): there is none."""
    listed = {
        records.names_of_classes(file, _columns(part))
        for part in parts
        for file in _training_files(find_sources(part))
    }
    return next(iter(listed)) if len(listed) == 1 else ()


def _training_files(found: Sources) -> list[DataFile]:
    return [file for file in found.files if file.split != "validation"]


def _labels(record: Mapping[str, Any], plan: DataPlan) -> list[Any]:
    if not plan.classes_of_words:
        return [record.get(plan.columns.get(LABEL, LABEL))]
    try:
        found = labels_of_words(record, plan.columns) or []
    except BadRecord:  # reported when it is tokenized
        return []
    return [label for label in found if label != IGNORE_INDEX]


def _names(files: Sequence[DataFile], plan: DataPlan) -> Iterator[str]:
    """Each class once; records without a label are reported when they are tokenized."""
    columns, seen = _columns(plan), set[str]()
    for file in files:
        for block in records.blocks(file, frozenset(columns)):
            for _, record in records.parse(block, columns):
                labels = [] if isinstance(record, BadRecord) else _labels(record, plan)
                for name in map(class_name, labels):
                    if name is not None and name not in seen:
                        seen.add(name)
                        yield name
                if len(seen) > MOST_CLASSES:
                    return


def _wrong(part: DataPlan, expected: str) -> ConfigError:
    value = ", ".join(part.paths) or part.corpus
    fix = "name files of records with labels in data.path, or set train.objective=null"
    if not part.classes_of_words:
        fix += "; data.format=fasttext reads lines of text that begin with __label__CLASS"
    return ConfigError([Problem(key="data.path", value=value, expected=expected, fix=fix)])
