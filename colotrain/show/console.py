"""Where commands print: results on stdout, everything else on stderr."""

from __future__ import annotations

import json
import math
import os
import sys
from typing import IO, Any

from rich.console import Console

WIDTH_WITHOUT_TERMINAL = 120


def stdout_console() -> Console:
    """For a command's result, as people read it."""
    return _console(sys.stdout)


def stderr_console() -> Console:
    """For everything that is not a command's result."""
    return _console(sys.stderr)


class _Console(Console):
    """A console whose reader may go away (`| head`) without ending what it reports on."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


def _console(file: IO[str]) -> Console:
    """NO_COLOR and TERM=dumb are rich's own; under CI nothing moves and nothing is coloured."""
    plain = bool(os.environ.get("CI")) or not file.isatty()
    return _Console(
        file=file,
        force_terminal=False if plain else None,
        width=_width() if plain else None,
        highlight=False,
        markup=False,
        emoji=False,
    )


def _width() -> int:
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdigit() and int(columns) > 0 else WIDTH_WITHOUT_TERMINAL


def print_json(document: Any) -> None:
    """One JSON document on stdout. Numbers that JSON lacks (NaN, infinity) become null."""
    json.dump(_finite(document), sys.stdout, indent=2)
    sys.stdout.write("\n")
    sys.stdout.flush()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
