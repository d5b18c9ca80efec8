"""The classes of labelled texts: their names, counted in the training files. No torch here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from colotrain.data.prepare import corpora, records
from colotrain.data.prepare.corpora import DataFile
from colotrain.data.prepare.sources import find_sources
from colotrain.errors import ConfigError, Problem
from colotrain.spec.plan import DataPlan

LABEL = "label"
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


def in_order(names: set[str]) -> tuple[str, ...]:
    """Numbers by their size, names by the alphabet."""
    if all(re.fullmatch(r"-?[0-9]+", name) for name in names):
        return tuple(sorted(names, key=lambda name: (int(name), name)))
    return tuple(sorted(names))


def find_classes(parts: Sequence[DataPlan]) -> tuple[str, ...]:
    """The classes of the training records of the parts of a plan's data.

    Raises `ConfigError` for files without records, and for more than `MOST_CLASSES`.
    """
    names: set[str] = set()
    for part in parts:
        found = find_sources(part)
        if found.family != "records":
            raise _wrong(part, f"records with a text and a label, not {found.kinds}")
        files = [file for file in found.files if file.split != "validation"]
        key = corpora.fingerprint(files, str(part.columns))
        if key not in _counted:
            _counted[key] = tuple(_names(files, part))
        names.update(_counted[key])
        if len(names) > MOST_CLASSES:
            raise _wrong(part, f"at most {MOST_CLASSES:,} classes")
    return in_order(names)


def _names(files: Sequence[DataFile], plan: DataPlan) -> Iterator[str]:
    """Each class once; records without a label are reported when they are tokenized."""
    column, seen = plan.columns.get(LABEL, LABEL), set[str]()
    for file in files:
        for block in records.blocks(file, frozenset({column})):
            for _, record in records.parse(block):
                name = class_name(record.get(column)) if isinstance(record, dict) else None
                if name is not None and name not in seen:
                    seen.add(name)
                    yield name
                if len(seen) > MOST_CLASSES:
                    return


def _wrong(part: DataPlan, expected: str) -> ConfigError:
    value = ", ".join(part.paths) or part.corpus
    fix = "name files of texts with labels in data.path, or set train.objective=null"
    return ConfigError([Problem(key="data.path", value=value, expected=expected, fix=fix)])
