"""Write docs/configuration.md's reference: every key with its default, made from the schema."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import json
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from colotrain.config import schema
from colotrain.records import field_types, ordered_fields
from colotrain.spec.rules import RULES

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
MARK = "<!-- Below: made from the schema by `make docs`; do not edit. -->\n"


@functools.cache
def meanings(module: str) -> dict[tuple[str, str], str]:
    """(class, field) → the text that stands under the field, of the classes of a module."""
    found = {}
    for section in ast.parse(inspect.getsource(importlib.import_module(module))).body:
        if not isinstance(section, ast.ClassDef):
            continue
        for line, below in zip(section.body, section.body[1:], strict=False):
            if isinstance(line, ast.AnnAssign) and isinstance(below, ast.Expr):
                text = " ".join(str(ast.literal_eval(below.value)).split())
                found[section.name, ast.unparse(line.target).removesuffix("_")] = text
    return found


def meaning(cls: type, key: str) -> str:
    """The text that stands under a field of `cls`, or of the class that it comes from."""
    texts = (meanings(c.__module__).get((c.__name__, key)) for c in cls.__mro__[:-1])
    return next(text for text in texts if text)


def choices(annotation: object) -> str:
    """The values a key is limited to, as text."""
    options = [
        option
        for part in (annotation, *typing.get_args(annotation))
        if typing.get_origin(part) is typing.Literal
        for option in typing.get_args(part)
    ]
    return f" ({', '.join(options)})" if len(options) > 1 else ""


def reference(record: Any, path: str = "") -> Iterator[str]:
    """Markdown of `record`'s keys: first its own, then section by section."""
    cls = type(record)
    sections = []
    for field in ordered_fields(cls):
        key, value = field.name.removesuffix("_"), getattr(record, field.name)
        if dataclasses.is_dataclass(value):
            sections.append((f"{path}{key}", value))
            continue
        shown = value if isinstance(value, str) else json.dumps(value)
        text = meaning(cls, key)
        yield f"- `{path}{key}` = `{shown}`{choices(field_types(cls)[key])}: {text}\n"
    for key, value in sections:
        yield f"\n### {key}\n\n{inspect.getdoc(value)}\n\n"
        yield from reference(value, f"{key}.")


def exclusions() -> Iterator[str]:
    """Markdown of what excludes what: a table of all rules."""
    yield "\n### What excludes what\n\nWith the first setting the second one must be as shown.\n\n"
    yield "| with | setting | must be | because |\n| --- | --- | --- | --- |\n"
    for rule in RULES:
        yield f"| `{rule.when}` | `{rule.key}` | {rule.choices} | {rule.why} |\n"


def page(text: str) -> str:
    """`text`, the page as it stands, with its reference made anew."""
    made = "".join([*reference(schema.Config()), *exclusions()])
    return text.partition(MARK)[0] + MARK + "\n" + made


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
