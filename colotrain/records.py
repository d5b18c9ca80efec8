"""Conversion between frozen dataclasses and plain data (JSON, YAML); reports all mistakes at once.

Standard library only: workers and dashboards read plans with it.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import types
import typing
from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from typing import Any, Literal, TypeVar, Union, cast

from colotrain.errors import MOST_PROBLEMS, ConfigError, Problem, suggest

MISSING = "???"  # OmegaConf's marker of a value that must be given

_WORD = re.compile(r"[A-Za-z_/][\w./:-]*", re.ASCII)
_VALUES = ("null", "true", "false", "nan", "inf")
"""Words that Hydra's grammar takes for other values than texts."""

T = TypeVar("T")

DEEPEST = 64
"""Lists and objects inside one another: what walks through a document calls itself for each."""

MOST = 1 << 64
"""Integers of files are smaller: what computes with them takes no others."""
_PLAIN_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "text"}
_EXAMPLES = {int: "10", float: "0.1", bool: "true", str: "text"}


def from_json(text: str | bytes) -> Any:
    """Return the JSON document `text`; `ValueError` also where it is more than `DEEPEST` deep."""
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    num = (
        text.count(b"[") + text.count(b"{")
        if isinstance(text, bytes)
        else (text.count("[") + text.count("{"))
    )
    if num > DEEPEST and _is_deep(found):
        raise ValueError("is nested too deeply")
    return found


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(DEEPEST):
        held = (each.values() if isinstance(each, dict) else each for each in level)
        level = [item for items in held for item in items if isinstance(item, dict | list)]
        if not level:
            return False
    return True


def to_plain(record: Any) -> Any:
    """Convert dataclasses, tuples and mappings to dicts and lists that `json` can write."""
    if dataclasses.is_dataclass(record) and not isinstance(record, type):
        fields = ordered_fields(type(record))
        return {f.name.removesuffix("_"): to_plain(getattr(record, f.name)) for f in fields}
    if isinstance(record, Mapping):
        return {str(key): to_plain(value) for key, value in record.items()}
    if isinstance(record, list | tuple | set | frozenset):
        return [to_plain(value) for value in record]
    return record


def as_override(key: str, value: Any) -> str:
    """Return KEY=VALUE that Hydra's grammar reads as exactly this plain data."""
    return f"{key}={_as_written(value)}"


def as_argument(key: str, value: Any) -> str:
    """Return `as_override` as a word for a shell, for commands that a message advises."""
    return shlex.quote(as_override(key, value))


def _as_written(value: Any) -> str:
    """Write a value of an override; texts are quoted where they could be read otherwise."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_as_written(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_as_written, value)) + "]"
    if not isinstance(value, str):
        return json.dumps(value)
    if _WORD.fullmatch(value) and value.lower() not in _VALUES:
        return value
    # backslashes are themselves, except before a quote
    doubled = re.sub(r'(\\*)("|\Z)', lambda at: at[1] * 2 + '\\"' * bool(at[2]), value)
    return f'"{doubled}"'


def same_fields(record: Any, cls: type) -> dict[str, Any]:
    """Return the values of the fields that a dataclass and `cls` both have, by name."""
    names = {field.name for field in dataclasses.fields(cls)}
    found = (field.name for field in dataclasses.fields(record) if field.name in names)
    return {name: getattr(record, name) for name in found}


def from_plain(cls: type[T], data: Any) -> T:
    """Return the record of type `cls` with the data; raise `ConfigError` with all problems."""
    problems: list[Problem] = []
    record = read(cls, data, key="", problems=problems)
    if problems:
        raise ConfigError(problems)
    return cast(T, record)


def read(wanted: Any, value: Any, *, key: str, problems: list[Problem]) -> Any:
    """Convert `value` to the annotation `wanted`; mistakes are appended to `problems`.

    `key` is the dotted path shown to the user. After a mistake the result is None, and the
    field of a record keeps its default.
    """
    if isinstance(value, str) and value == MISSING:
        problems.append(Problem(key=key, expected="a value", fix=f"set {key}=VALUE"))
        return None
    if wanted is Any:
        return value
    if dataclasses.is_dataclass(wanted):
        return _read_record(cast(type, wanted), value, key=key, problems=problems)
    origin = typing.get_origin(wanted)
    if origin in (Union, types.UnionType):
        return _read_union(wanted, value, key=key, problems=problems)
    if origin is Literal:
        return _read_choice(typing.get_args(wanted), value, key=key, problems=problems)
    if isinstance(wanted, type) and issubclass(wanted, StrEnum):
        found = _read_choice(tuple(m.value for m in wanted), value, key=key, problems=problems)
        return None if found is None else wanted(found)
    if origin in (list, tuple):
        return _read_sequence(wanted, value, key=key, problems=problems)
    if origin is dict or origin is Mapping:
        return _read_mapping(wanted, value, key=key, problems=problems)
    return _read_scalar(wanted, value, key=key, problems=problems)


def after(field: str) -> dict[str, str]:
    """Return the metadata of a field that people see behind another one; "": first of all."""
    return {"after": field}


@cache
def ordered_fields(cls: type) -> tuple[dataclasses.Field[Any], ...]:
    """Return the fields of a record, inherited ones first, in the order in which people see them.

    A field with the metadata `after` comes behind the one that it names, which is inherited or
    stands above it, or first for "".
    """
    found = {field.name: field for field in dataclasses.fields(cls)}
    names = [name for name, field in found.items() if "after" not in field.metadata]
    for name, field in found.items():
        if "after" in field.metadata:
            other = field.metadata["after"]
            names.insert(names.index(other) + 1 if other else 0, name)
    return tuple(found[name] for name in names)


@cache
def field_types(cls: type) -> dict[str, Any]:
    """Return key → annotation. A field named like a keyword ends in `_`, its key does not."""
    hints = typing.get_type_hints(cls)
    return {f.name.removesuffix("_"): hints[f.name] for f in ordered_fields(cls)}


def sections(cls: type) -> dict[str, type]:
    """Return the keys of a record whose values are records themselves."""
    wanted = field_types(cls).items()
    return {key: cast(type, w) for key, w in wanted if dataclasses.is_dataclass(w)}


def leaves(cls: type, prefix: str = "") -> dict[str, Any]:
    """Return dotted key → annotation of every setting in a record and its nested records."""
    found: dict[str, Any] = {}
    inner = sections(cls)
    for name, wanted in field_types(cls).items():
        if name in inner:
            found |= leaves(wanted, f"{prefix}{name}.")
        else:
            found[prefix + name] = wanted
    return found


def _read_record(cls: type, value: Any, *, key: str, problems: list[Problem]) -> Any:
    if not isinstance(value, Mapping):
        problems.append(_wrong(key, value, f"the keys {', '.join(field_types(cls))}"))
        return None
    wanted, found = field_types(cls), {}
    for name, item in value.items():
        path = f"{key}.{name}" if key else str(name)
        if name not in wanted:
            is_shown = len(problems) < MOST_PROBLEMS
            problems.append(_unknown(cls, str(name), item, path, suggests=is_shown))
            continue
        before = len(problems)
        result = read(wanted[name], item, key=path, problems=problems)
        if result is not None or len(problems) == before:
            found[name] = result
    return cls(**_arguments(cls, found, set(value), key=key, problems=problems))


def _arguments(
    cls: type, found: dict[str, Any], given: set[str], *, key: str, problems: list[Problem]
) -> dict[str, Any]:
    """Return `found` by field name. Fields that are missing keep their default, if any."""
    arguments = {}
    for field in dataclasses.fields(cls):
        name = field.name.removesuffix("_")
        if name in found:
            arguments[field.name] = found[name]
        elif _is_required(field):
            arguments[field.name] = None
            if name not in given:
                path = f"{key}.{name}" if key else name
                problems.append(Problem(key=path, expected="a value", fix=f"set {path}"))
    return arguments


def _unknown(cls: type, name: str, value: Any, path: str, *, suggests: bool) -> Problem:
    """Return the problem of an unknown key, with similar keys or this name in subsections.

    Only problems that are printed get suggestions, each of which compares the key with all others.
    """
    shown = None if isinstance(value, Mapping | list) else value
    fix = ""
    if suggests:
        section = path.removesuffix(name)
        below = [f"{section}{leaf}" for leaf in leaves(cls) if leaf.endswith(f".{name}")]
        nearest = suggest(name, field_types(cls), section=section)
        fix = f"did you mean {' or '.join(below)}?" if below else nearest
    return Problem(key=path, value=shown, expected="a known key", fix=fix)


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _read_union(wanted: Any, value: Any, *, key: str, problems: list[Problem]) -> Any:
    options = typing.get_args(wanted)
    if value is None and type(None) in options:
        return None
    options = tuple(option for option in options if option is not type(None))
    if type(value) in options:
        return read(type(value), value, key=key, problems=problems)
    first: list[Problem] = []
    for option in options:
        trial: list[Problem] = []
        result = read(option, value, key=key, problems=trial)
        if not trial:
            return result
        first = first or trial
    if len(options) > 1:
        first = [_wrong(key, value, " or ".join(_describe(option) for option in options))]
    problems.extend(first)
    return None


def _describe(wanted: Any) -> str:
    origin = typing.get_origin(wanted)
    if origin is Literal:
        return " or ".join(str(option) for option in typing.get_args(wanted))
    if origin in (list, tuple):
        return "a list"
    return "a mapping" if origin is dict else _PLAIN_NAMES.get(wanted, str(wanted))


def _read_choice(options: tuple[Any, ...], value: Any, *, key: str, problems: list[Problem]) -> Any:
    if value in options and type(value) in {type(option) for option in options}:
        return value
    expected = "one of " + ", ".join(str(option) for option in options)
    hint = suggest(str(value), map(str, options))
    fix = hint if hint.startswith("did you mean") else f"for example {key}={options[0]}"
    problems.append(_wrong(key, value, expected, fix=fix))
    return None


def _read_sequence(wanted: Any, value: Any, *, key: str, problems: list[Problem]) -> Any:
    if not isinstance(value, list | tuple):
        problems.append(_wrong(key, value, "a list", fix=f"write {key}=[{value}]"))
        return None
    item_type = typing.get_args(wanted)[0]
    before = len(problems)
    items = [
        read(item_type, item, key=f"{key}[{i}]", problems=problems) for i, item in enumerate(value)
    ]
    if len(problems) > before:
        return None
    return tuple(items) if typing.get_origin(wanted) is tuple else items


def _read_mapping(wanted: Any, value: Any, *, key: str, problems: list[Problem]) -> Any:
    if not isinstance(value, Mapping):
        problems.append(_wrong(key, value, "a mapping", fix=f"write {key}={{NAME:VALUE}}"))
        return None
    key_type, item_type = typing.get_args(wanted)
    before = len(problems)
    out = {}
    for written, item in value.items():
        name = int(written) if key_type is int and str(written).isdecimal() else written
        name = str(name) if key_type is str else name
        if type(name) is not key_type:
            expected = f"{_describe(key_type)} before each `:`"
            problems.append(_wrong(key, f"{{{written}:{item}}}", expected))
        out[name] = read(item_type, item, key=f"{key}.{written}", problems=problems)
    return out if len(problems) == before else None


def _read_scalar(wanted: Any, value: Any, *, key: str, problems: list[Problem]) -> Any:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if type(value) is wanted and not (wanted is int and abs(value) >= MOST):
        return value
    if wanted is float and number and abs(value) < 1e300:
        return float(value)
    if wanted is int and isinstance(value, float) and value.is_integer() and abs(value) < MOST:
        return int(value)
    if wanted is str and number:
        return str(value)
    fix = f"for example {key}={_EXAMPLES[wanted]}" if wanted in _EXAMPLES else ""
    problems.append(_wrong(key, value, _describe(wanted), fix=fix))
    return None


def _wrong(key: str, value: Any, expected: str, fix: str = "") -> Problem:
    shown = "null" if value is None else value
    return Problem(key=key, value=shown, expected=expected, fix=fix or f"correct {key}")
