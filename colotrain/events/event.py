"""One event as its file has it, and the base class of the event kinds in `kinds`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import (
    Any,
    ClassVar,
    Self,
    TypeVar,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

READ_ONLY = {"written": False}
"""Metadata of a field that every event has, taken from `Event` itself: `t`, `rank`, `attempt`."""
WRITE_ONLY = {"read": False}
"""Metadata of a field that would only take memory in readers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event; `rank` and `attempt` of the worker that wrote it are None for the launcher."""

    kind: str
    t: float
    """Unix seconds."""
    rank: int | None = None
    attempt: int | None = None
    fields: dict[str, Any]
    """All other fields of the record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventKind:
    """Base class of the event kinds. The same class is written and read.

    A field that defaults to None is left out of the file while it is None. A reader ignores unknown
    fields. A field that is missing has its default, or else a blank by its type: 0, "", False, []
    or {}. A field that does not fit its type is blank.
    """

    KIND: ClassVar[str]
    _WRITTEN: ClassVar[list[tuple[str, bool]]]
    """Fields to write, as pairs (field, whether it is left out while it is None)."""
    _READ: ClassVar[list[tuple[str, Any, Callable[[Any], Any]]]]
    """Fields to read, as triples (field, its type, function from JSON data to its type)."""
    _FROM_EVENT: ClassVar[list[str]]
    _BLANK: ClassVar[dict[str, Any]]
    """Values of the fields without a default where the file has none."""

    t: float = field(default=0.0, metadata=READ_ONLY)
    """Unix seconds at which the event was written."""

    @classmethod
    def of(cls, event: Event) -> Self:
        """Read an event, whose kind is not checked. Never raises, whatever its fields hold."""
        given, values = event.fields, cls._BLANK.copy()
        for name, kept, convert in cls._READ:
            value = given.get(name)
            if value is not None:
                values[name] = value if type(value) is kept else convert(value)
        for name in cls._FROM_EVENT:
            values[name] = getattr(event, name) or 0
        return cls(**values)

    def fields(self) -> dict[str, Any]:
        """Return the fields to write, in order."""
        return {
            name: value
            for name, is_optional in self._WRITTEN
            if (value := getattr(self, name)) is not None or not is_optional
        }


Kind = TypeVar("Kind", bound=EventKind)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def event_kind(name: str) -> Callable[[type[Kind]], type[Kind]]:
    """Make a class the frozen dataclass of the events that files call `name`."""

    def decorate(cls: type[Kind]) -> type[Kind]:
        made = dataclass(frozen=True, slots=True, kw_only=True)(cls)
        hints, fields = get_type_hints(made), dataclasses.fields(made)
        own = [f for f in fields if f.metadata.get("written", True)]
        blank = (f.name for f in own if f.default is f.default_factory is dataclasses.MISSING)
        made.KIND = name
        made._WRITTEN = [(f.name, f.default is None) for f in own]
        made._READ = [
            (f.name, _kept(hints[f.name]), _converter(hints[f.name]))
            for f in own
            if f.metadata.get("read", True)
        ]
        made._FROM_EVENT = [f.name for f in fields if f not in own]
        made._BLANK = {name: _converter(hints[name])(None) for name in blank}
        return made

    return decorate


def _kept(hint: Any) -> Any:
    """Return the type whose values `hint` takes as they are; integers may be too large."""
    return None if _without_none(hint) is int else _without_none(hint)


def _without_none(hint: Any) -> Any:
    inner = get_args(hint)
    return inner[0] if type(None) in inner else hint


def _converter(hint: Any) -> Callable[[Any], Any]:
    """Return a function from JSON data to `hint`; data that does not fit becomes blank."""
    if hint is Any:
        return lambda value: value
    if hint != _without_none(hint):
        return _fitting(_without_none(hint))
    fit, blank = _fitting(hint), get_origin(hint) or hint
    return lambda value: blank() if (found := fit(value)) is None else found


def _fitting(hint: Any) -> Callable[[Any], Any]:
    """Return a function from JSON data to `hint`, or to None if the data does not fit."""
    if hint in _SCALARS:
        return _SCALARS[hint]
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        members = {member.value: member for member in hint}
        return lambda value: members.get(value) if isinstance(value, str) else None
    inner = get_args(hint)[-1]
    kept, convert = _kept(inner), _converter(inner)

    def fit(value: Any) -> Any:
        if get_origin(hint) is list and isinstance(value, list):
            return [v if type(v) is kept else convert(v) for v in value]
        if get_origin(hint) is dict and isinstance(value, dict):
            return {str(key): convert(v) for key, v in value.items()}
        return None

    return fit


def _number(value: Any) -> float | None:
    try:
        return float(value) if isinstance(value, int | float) else None
    except OverflowError:  # an integer of hundreds of digits
        return None


def _count(value: Any) -> int | None:
    number = _number(value)
    return int(number) if number is not None and math.isfinite(number) else None


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


_SCALARS: dict[Any, Callable[[Any], Any]] = {
    bool: lambda value: value if isinstance(value, bool) else None,
    int: _count,
    float: _number,
    str: _text,
}
