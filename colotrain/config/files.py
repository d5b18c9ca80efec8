"""YAML files of a configuration, whose errors are reported with file and line."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from colotrain.errors import Problem

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
        text = file.read_text("utf-8")
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


def _unreadable(shown: str, error: Exception) -> Problem:
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        expected = f"a YAML file of settings ({first_line(error)})"
        return Problem(key=shown, expected=expected, fix="correct the file")
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
