"""Shell completion of commands and overrides. Imports no typer, torch or hydra, to be fast."""

from __future__ import annotations

import typing
from collections.abc import Iterable
from typing import Any, Literal

from colotrain.config.schema import Config
from colotrain.config.shipped import GROUPS, Search
from colotrain.records import leaves, sections

BASH = """\
_colotrain() {
    local word=${COMP_WORDS[COMP_CWORD]}
    if [[ $COMP_CWORD -eq 1 ]]; then
        COMPREPLY=($(compgen -W "VERBS" -- "$word"))
        [[ ${#COMPREPLY[@]} -eq 1 ]] && compopt +o nospace 2>/dev/null
    else
        local IFS=$'\\n'
        COMPREPLY=($(PROGRAM __complete "$word" 2>/dev/null))
        if [[ ${#COMPREPLY[@]} -eq 1 && $COMPREPLY != *[=.] ]]; then
            compopt +o nospace 2>/dev/null
        fi
    fi
    return 0
}
COMP_WORDBREAKS=${COMP_WORDBREAKS//=/}
complete -o nospace -F _colotrain colotrain
"""
ZSH = """\
#compdef colotrain
_colotrain() {
    local -a found
    if (( CURRENT == 2 )); then
        found=(VERBS)
        compadd -- $found
    else
        found=("${(@f)$(PROGRAM __complete "${words[CURRENT]}" 2>/dev/null)}")
        compadd -S '' -- $found
    fi
}
compdef _colotrain colotrain
"""
FISH = """\
complete -c colotrain -f
complete -c colotrain -n '__fish_is_nth_token 1' -a 'VERBS'
complete -c colotrain -n 'not __fish_is_nth_token 1' -a '(PROGRAM __complete (commandline -ct))'
"""
SHELLS = {"bash": BASH, "zsh": ZSH, "fish": FISH}
OPTIONS = ("--json", "--help")


def script(shell: str, verbs: Iterable[str], *, program: str = "colotrain") -> str:
    """Return the script to source; it calls `program` with the word under the cursor."""
    return SHELLS[shell].replace("VERBS", " ".join(verbs)).replace("PROGRAM", program)


def complete(word: str, search: Search) -> list[str]:
    """Return completions of `word`: whole overrides, or keys to be continued after `=` or `.`."""
    prefix = word[: len(word) - len(word.lstrip("+~"))]
    body = word[len(prefix) :]
    if word.startswith("-"):
        return [option for option in OPTIONS if option.startswith(word)]
    key, equals, _ = body.partition("=")
    found = [f"{key}={choice}" for choice in _choices(key, search)] if equals else _keys(body)
    return [prefix + candidate for candidate in found if candidate.startswith(body)]


def _keys(body: str) -> list[str]:
    """Return the top-level keys, or after a section's dot the keys of all sections."""
    if "." in body:
        return [f"{leaf}=" for leaf in leaves(Config)]
    names = sections(Config)
    plain = [f"{leaf}=" for leaf in leaves(Config) if "." not in leaf]
    groups = [f"{group}=" for group in ("plugin", "cluster", "hardware")]
    return [*plain, *groups, *(f"{name}." for name in names)]


def _choices(key: str, search: Search) -> list[str]:
    """Return the values of a key that has few: file names, or options listed in the schema."""
    if key in GROUPS:
        return search.names(key)
    if key == "plugin.name":
        return search.names("plugin")
    return _options(leaves(Config).get(key))


def _options(wanted: Any) -> list[str]:
    if wanted is bool:
        return ["true", "false"]
    if typing.get_origin(wanted) is Literal:
        return [str(option) for option in typing.get_args(wanted)]
    return [option for part in typing.get_args(wanted) for option in _options(part)]
