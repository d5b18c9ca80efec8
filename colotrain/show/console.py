"""Consoles of the commands: results go to stdout, everything else to stderr."""

from __future__ import annotations

import io
import json
import math
import os
import sys
from collections.abc import Iterable
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from colotrain.errors import one_line

WIDTH_WITHOUT_TERMINAL = 120


def stdout_console() -> Console:
    """Return the console for a command's result in human-readable form."""
    return _console(sys.stdout)


def stderr_console() -> Console:
    """Return the console for everything that is not a command's result."""
    return _console(sys.stderr)


class _Console(Console):
    """A console that falls silent instead of failing when its reader goes away (`| head`)."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render without the control characters of texts, which others may have written."""
        for segment in super().render(renderable, options):
            text = segment.text
            if segment.control or text == "\n" or text.isprintable():
                yield segment
            else:
                shown = "".join(c if c.isprintable() or c == "\n" else " " for c in text)
                yield Segment(shown, segment.style)


def tell(text: str) -> None:
    """Print a line on stderr, without line breaks and control characters."""
    print(one_line(text), file=sys.stderr, flush=True)


def _console(file: IO[str]) -> Console:
    """Return a console; plain under CI and in files. rich itself handles NO_COLOR and TERM=dumb."""
    plain = bool(os.environ.get("CI")) or not file.isatty()
    return _Console(
        file=file,
        force_terminal=False if plain else None,
        width=_width() if plain else None,
        highlight=False,
        markup=False,
        emoji=False,
    )


def picture_console(*, width: int, height: int | None = None) -> Console:
    """Return a console to export a picture of, in colour even without a colour terminal."""
    return Console(
        record=True,
        file=io.StringIO(),
        width=width,
        height=height,
        force_terminal=True,
        color_system="truecolor",
        no_color=False,
        legacy_windows=False,
        highlight=False,
        markup=False,
    )


def _width() -> int:
    columns = os.environ.get("COLUMNS", "")
    return int(columns) if columns.isdigit() and int(columns) > 0 else WIDTH_WITHOUT_TERMINAL


def print_json(document: Any) -> None:
    """Print one JSON document on stdout; NaN and infinity, which JSON lacks, become null."""
    json.dump(_finite(document), sys.stdout, indent=2)
    sys.stdout.write("\n")
    sys.stdout.flush()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
