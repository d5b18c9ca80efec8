"""Changes to single values of a composed configuration, and resolution of `${...}` references."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Set
from contextlib import contextmanager
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.base import Container, Node
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from colotrain.config.files import MOST_CHARACTERS, first_line
from colotrain.errors import Problem, suggest
from colotrain.records import MISSING
from colotrain.spec.observing import KEEPS_VARIABLES, VARIABLE

ONE_OF = {
    "model": ("target", "hf"),
    "data": ("corpus", "path", "mixture", "target"),
    "train": ("max_steps", "epochs"),
}
"""Section → keys of which a run sets exactly one."""
MOST_REFERENCES, MOST_ITEMS = 10_000, 1 << 18
TOO_MUCH = "references stand for too much"
_BROKEN = object()
_KEPT = "\0{"
"""What stands for `${` in texts that are not expanded."""


@contextmanager
def bounded_references() -> Iterator[None]:
    """Let `${...}` stand for bounded texts and values: each may refer to others that do.

    A few lines can stand for billions of characters otherwise, as aliases can.
    """
    resolve, left = Container._resolve_node_interpolation, [MOST_REFERENCES, MOST_CHARACTERS]

    def resolve_counted(self: Container, *args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if min(left) < 0:
            raise InterpolationResolutionError(TOO_MUCH)
        found = resolve(self, *args, **kwargs)
        left[1] -= len(found._value()) if isinstance(found._value(), str) else 1
        return found

    Container._resolve_node_interpolation = resolve_counted  # type: ignore[method-assign]
    try:
        yield
    finally:
        Container._resolve_node_interpolation = resolve  # type: ignore[method-assign]


def set_(config: DictConfig, key: str, value: Any, problems: list[Problem]) -> None:
    """Add or replace one value; a mapping is merged. Reading later reports unknown keys."""
    try:
        OmegaConf.update(config, key, value, merge=True, force_add=True)
    except (OmegaConfBaseException, AttributeError, TypeError, ValueError) as error:
        above = key.rpartition(".")[0] or key
        expected = f"a key below a mapping ({first_line(error)})"
        fix = f"see what {above} is set to"
        problems.append(Problem(key=key, value=value, expected=expected, fix=fix))


def delete_(config: DictConfig, key: str, value: Any, problems: list[Problem]) -> None:
    """Delete a setting (`~KEY`), so that its default applies; `~KEY=VALUE` checks its value."""
    parent, _, name = key.rpartition(".")
    holder = OmegaConf.select(config, parent) if parent else config
    if not isinstance(holder, DictConfig) or name not in holder:
        fix = suggest(name, map(str, holder)) if isinstance(holder, DictConfig) else ""
        problems.append(Problem(key=f"~{key}", expected="a key that is set", fix=fix))
    elif value is not None and value != (known := _value_of(holder, name)):
        expected = f"the value it has, {known}"
        problems.append(Problem(key=f"~{key}", value=value, expected=expected, fix=f"or ~{key}"))
    else:
        del holder[name]


def give_way_(
    config: DictConfig, *, touched: Set[str], given: Set[str], notices: list[str]
) -> None:
    """Let a source that an argument gives replace another one in the files, with its args.

    `touched` are the keys of all arguments, `given` those that set a value.
    """
    for section, names in ONE_OF.items():
        chosen = [f"{section}.{name}" for name in names if f"{section}.{name}" in given]
        found = config.get(section)
        if len(chosen) != 1 or not isinstance(found, DictConfig):
            continue
        for name in names:
            value = _value_of(found, name)
            if value in (None, []) or f"{section}.{name}" in touched:
                continue
            notices.append(f"{chosen[0]} takes the place of {section}.{name}={value}")
            found[name] = [] if name == "mixture" else None
            if "args" in found:
                found["args"] = {}


def _value_of(section: DictConfig, name: str) -> Any:
    """Return a value; of a reference that does not resolve, which is reported later, its text."""
    try:
        return section.get(name)
    except OmegaConfBaseException:
        node = section._get_node(name)
        return node._value() if isinstance(node, Node) else None


def clear_args_(config: DictConfig) -> None:
    """Let `args: null` of a file drop the arguments that its base gives its own class."""
    for section in map(config._get_node, config):
        args = section._get_node("args") if isinstance(section, DictConfig) else None
        if isinstance(section, DictConfig) and args is not None and args._value() is None:
            section["args"] = {}


def keep_texts(value: Any) -> Any:
    """Return plain data with every `${` hidden, so that no text of theirs is ever expanded."""
    return _replaced(value, "${", _KEPT)


def restore_texts(value: Any) -> Any:
    """Return plain data with every `${` that `keep_texts` hid."""
    return _replaced(value, _KEPT, "${")


def _replaced(value: Any, old: str, new: str) -> Any:
    if isinstance(value, dict):
        return {key: _replaced(item, old, new) for key, item in value.items()}
    if isinstance(value, list):
        return [_replaced(item, old, new) for item in value]
    return value.replace(old, new) if isinstance(value, str) else value


def resolve_references(config: DictConfig, problems: list[Problem]) -> dict[str, Any]:
    """Return plain data with every `${...}` resolved; broken references are left out.

    Environment variables in `KEEPS_VARIABLES` are not read: their values may be secrets, and what
    is returned is written to files.
    """
    try:
        plain: dict[str, Any] = _plain(config, "", problems, itertools.count())
    except RecursionError:
        fix = "let no ${...} refer to a section that holds it, and no few lines stand for millions"
        problems.append(Problem(key="${...}", expected="references without a circle", fix=fix))
        return {}
    return plain


def _plain(node: Any, path: str, problems: list[Problem], count: Iterator[int]) -> Any:
    if isinstance(node, DictConfig):
        names: dict[Any, str] = {key: f"{path}.{key!s}" if path else str(key) for key in node}
        items = {key: _item(node, key, name, problems, count) for key, name in names.items()}
        return {key: value for key, value in items.items() if value is not _BROKEN}
    found = [_item(node, index, f"{path}[{index}]", problems, count) for index in range(len(node))]
    return [value for value in found if value is not _BROKEN]


def _item(node: Any, key: Any, path: str, problems: list[Problem], count: Iterator[int]) -> Any:
    if next(count) > MOST_ITEMS:
        raise RecursionError(TOO_MUCH)
    if OmegaConf.is_missing(node, key):
        return MISSING
    written = node._get_node(key)._value()
    kept = path.startswith(KEEPS_VARIABLES) and isinstance(written, str)
    if kept and VARIABLE.search(written):
        return written
    try:
        value = node[key]
    except (OmegaConfBaseException, RecursionError) as error:
        expected = f"a reference that resolves ({first_line(error)})"
        fix = "refer to a setting by its whole key, as in ${train.seed}"
        problems.append(Problem(key=path, value=written, expected=expected, fix=fix))
        return _BROKEN
    return _plain(value, path, problems, count) if OmegaConf.is_config(value) else value
