"""YAML files of a configuration, whose errors are reported with file and line."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from colotrain.errors import Problem, fix_of

MOST_CHARACTERS, MOST_VALUES = 1 << 20, 100_000
_PACKAGE = re.compile(r"\A(?:\s*#[^\n]*\n)*?\s*#\s*@package\s+(\S+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFile:
    """Settings of a file, and the `# @package` of its header, if any."""

    settings: DictConfig
    package: str | None


def read_file(file: Path, problems: list[Problem]) -> ConfigFile:
    """Return the settings of a file; after a problem, an empty file."""
    shown, nothing = display_path(file), ConfigFile(settings=OmegaConf.create({}), package=None)
    try:
        with file.open(encoding="utf-8") as opened:
            text = opened.read(MOST_CHARACTERS + 1)
        check_yaml(text)
        settings = OmegaConf.load(StringIO(text))
    except Exception as error:  # errors of the file system, YAML or OmegaConf
        problems.append(_unreadable(shown, error))
        return nothing
    if not isinstance(settings, DictConfig):
        fix = "write settings as in train.max_steps"
        problems.append(Problem(key=shown, expected="KEY: VALUE lines, not a list", fix=fix))
        return nothing
    header = _PACKAGE.match(text)
    return ConfigFile(settings=settings, package=header[1] if header else None)


def check_yaml(text: str) -> None:
    """Raise `ValueError` for a YAML file that is too long, or whose aliases stand for too much.

    Each alias stands for a whole value: a few lines can stand for billions of values.
    """
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"it has more than {MOST_CHARACTERS:,} characters")
    if "&" in text and "*" in text:
        import yaml

        for document in yaml.compose_all(text, Loader=yaml.SafeLoader):
            counts = dict[int, int]()
            if document is not None and _num_values(document, counts) - len(counts) > MOST_VALUES:
                raise ValueError(f"its aliases stand for more than {MOST_VALUES:,} values")


def _num_values(node: Any, known: dict[int, int]) -> int:
    """Count the values in a node of YAML's tree, with those that aliases in it stand for."""
    if id(node) not in known:
        known[id(node)] = 1 << 64  # what holds itself has no end
        parts = node.value if isinstance(node.value, list) else []
        inner = [part for one in parts for part in (one if isinstance(one, tuple) else (one,))]
        known[id(node)] = 1 + sum(_num_values(part, known) for part in inner)
    return known[id(node)]


def _unreadable(shown: str, error: Exception) -> Problem:
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        expected = f"a YAML file of settings ({first_line(error)})"
        return Problem(key=shown, expected=expected, fix=fix_of(error, "correct the file"))
    reason = getattr(error, "problem", None) or getattr(error, "context", None)
    expected = f"valid YAML ({reason})"
    return Problem(key=f"{shown}:{mark.line + 1}", expected=expected, fix="correct that line")


def display_path(file: Path) -> str:
    """Return the path relative to the current folder if the file is below it."""
    relative = os.path.relpath(file)
    return str(file) if relative.startswith("..") else relative


def first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0].strip().rstrip(".") if text else type(error).__name__
