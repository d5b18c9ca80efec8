"""Problems in KEY=VALUE arguments, explained for the user."""

from __future__ import annotations

import typing
from pathlib import Path

from colotrain.config.schema import Config
from colotrain.config.shipped import NAMED, Search
from colotrain.errors import Problem, suggest
from colotrain.records import as_argument, leaves


def not_an_override(text: str, search: Search) -> Problem:
    """Return the problem of a bare word: `llm-tiny` may mean `recipe=llm-tiny`."""
    groups = [group for group in NAMED if text in search.names(group)]
    hint = suggest(text, (*leaves(Config), "recipe", "plugin"))
    if groups:
        hint = "did you mean " + " or ".join(f"{group}={text}" for group in groups) + "?"
    elif text and text not in leaves(Config) and Path(text).exists():
        ways = [as_argument(key, text) for key in ("data.path", "model.hf", "recipe")]
        hint = f"write {', '.join(ways[:2])} or {ways[2]}, as what it is"
    elif text in leaves(Config) or not hint.startswith("did you mean"):
        hint = f"write {text}=VALUE" if text in leaves(Config) else "as in train.max_steps=10"
    return Problem(key=text or "''", expected="KEY=VALUE", fix=hint)


def wrong_key(text: str) -> Problem:
    key, _, value = text.partition("=")
    hint = suggest(key.lstrip("+~").replace("/", "."), leaves(Config))
    fix = hint if hint.startswith("did you mean") else "keys are names joined by dots"
    return Problem(key=key or "''", value=value, expected="a key like train.seed", fix=fix)


def wrong_value(text: str, reason: str) -> Problem:
    """Return the problem of a value that Hydra's grammar rejects; most need quotes."""
    key, _, value = text.partition("=")
    fix = f"quote it: {as_argument(key, value)}"
    if value.startswith(("[", "{", '"', "'")):
        fix = "close every bracket and quote, and put the whole argument in single quotes"
    expected = f"a value that Hydra's grammar can read ({reason})"
    return Problem(key=key, value=value, expected=expected, fix=fix)


def several_values(text: str) -> Problem:
    key, _, value = text.partition("=")
    fix = "a list of choices needs `run --sweep` or `submit --sweep`"
    if _takes_list(key):
        fix = f"write {key}=[{value}] for a list"
    return Problem(key=key, value=value, expected="one value", fix=fix)


def _takes_list(key: str) -> bool:
    wanted = leaves(Config).get(key.lstrip("+"))
    return list in (typing.get_origin(w) for w in (wanted, *typing.get_args(wanted)))
