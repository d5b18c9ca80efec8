"""Which line of the user's script made a call, and which library made it for the script."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType

OWN = str(Path(__file__).parents[1]) + os.sep
LIBRARIES = ("site-packages", "dist-packages")
STANDARD = tuple(str(Path(sysconfig.get_path(name))) + os.sep for name in ("stdlib", "platstdlib"))


@dataclass(frozen=True, slots=True)
class Site:
    """A call: the line of the user's script, and the library's line if a library made the call."""

    line: str
    """`train.py:31`; empty where no frame is the user's."""
    library: str = ""
    """`lightning/pytorch/loops/…/automatic.py:83`; empty where the script itself made the call."""

    @property
    def package(self) -> str:
        return self.library.partition("/")[0]

    def __str__(self) -> str:
        if self.library:
            return f"{self.library} (called at {self.line})" if self.line else self.library
        return self.line or "an unknown line"

    @staticmethod
    def of(text: object) -> Site:
        """Return the site that `plain` wrote."""
        line, library = text if isinstance(text, list | tuple) else ("", "")
        return Site(str(line), str(library))

    @property
    def source(self) -> str:
        """The text of the library's line, or of the script's; empty where it is not found."""
        return next(iter(self._lines()), "")

    @property
    def statement(self) -> str:
        """`source`, and the lines on which its brackets go on."""
        text = ""
        for line in self._lines():
            text += line
            if sum(map(text.count, "([{")) <= sum(map(text.count, ")]}")):
                break
        return text

    def _lines(self) -> list[str]:
        path, _, line = (self.library or self.line).rpartition(":")
        folders = sys.path if self.library else ["."]
        found = (os.path.join(folder, path) for folder in folders)
        file = next((name for name in found if os.path.isfile(name)), path)
        return linecache.getlines(file)[max(int(line) - 1, 0) :] if line.isdecimal() else []

    def plain(self) -> list[str]:
        return [self.line, self.library]


def here() -> Site:
    """Return the site of the call that is being observed."""
    frame: FrameType | None = sys._getframe(1)
    library = ""
    while frame is not None:
        kind, name = _classified(frame.f_code.co_filename)
        if kind == "script":
            return Site(f"{name}:{frame.f_lineno}", library)
        if kind == "library" and not library:
            library = f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return Site("", library)


def variables() -> dict[str, object]:
    """Return the variables that the script's calling function sees."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _classified(frame.f_code.co_filename)[0] != "script":
        frame = frame.f_back
    return {} if frame is None else {**frame.f_locals, **frame.f_globals, **frame.f_locals}


@cache
def _classified(filename: str) -> tuple[str, str]:
    """Return whether a file is the script's, a library's or neither, and how to write its name."""
    if filename.startswith("<") or filename.startswith(OWN):
        return "", ""
    for folder in LIBRARIES:
        _, found, name = filename.rpartition(f"{os.sep}{folder}{os.sep}")
        if found:
            return ("" if name.split(os.sep)[0] == "torch" else "library"), name
    if filename.startswith(STANDARD):
        return "", ""
    try:
        relative = os.path.relpath(filename)
    except (ValueError, OSError):  # the script has left its folder
        relative = filename
    return "script", filename if relative.startswith("..") else relative
