"""Error messages for unknown options and commands, with what to write instead."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Any

from colotrain.config.hints import KEYS
from colotrain.config.schema import Config
from colotrain.config.shipped import NAMED
from colotrain.records import leaves

VERBS = {"attach": "dashboard RUN", "watch": "dashboard RUN", "train": "run", "launch": "run"}
"""Other tools' commands → colotrain's equivalents."""
RECIPES = ("config", "config_name")
"""Options of other tools that name a settings file."""


def explain(error: Exception, arguments: Sequence[str]) -> str:
    """Return Click's message on one line, and what to write instead or where to find help."""
    context: Any = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "colotrain"
    message = getattr(error, "format_message", lambda: str(error))()
    option = getattr(error, "option_name", None) or ""
    takes_settings = context is not None and any(
        "KEY=VALUE" in (parameter.metavar or "") for parameter in context.command.params
    )
    if takes_settings and (hint := _setting(option, arguments)):
        return f"No such option: {option}; settings are KEY=VALUE: {hint}"
    verb = re.match(r"No such command '(.*?)'", message)
    if verb and verb[1] in VERBS:
        return f"{verb[0]}; write `{path} {VERBS[verb[1]]}`"
    return f"{' '.join(message.split()).rstrip('.')}; see `{path} --help`"


def _setting(option: str, arguments: Sequence[str]) -> str:
    """Return `write optim.lr=1e-3` for `--learning-rate 1e-3`; empty if no setting matches."""
    name = option.lstrip("-").replace("-", "_")
    named = [leaf for leaf in leaves(Config) if name in (leaf, leaf.rpartition(".")[2])]
    if name in RECIPES:
        hint = "write recipe"
    elif name in NAMED:
        hint = f"write {name}"
    else:
        hint = KEYS.get(name) or (f"write {' or '.join(named)}" if named else "")
    value = _value(option, arguments)
    if value and re.fullmatch(r"write [\w.]+", hint):
        return " ".join(f"{hint}={shlex.quote(value)}".split())
    return hint


def _value(option: str, arguments: Sequence[str]) -> str:
    """Return the value given to `option`, as its own word or after `=`."""
    for word, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if word == option and not following.startswith("-"):
            return following
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
    return ""
