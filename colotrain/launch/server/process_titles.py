"""Process titles, as `ps` and `top` show them."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path

ARG_START, ARG_END = 45, 46
"""Indices in /proc/self/stat after the process name: fields 48 and 49 in proc(5)."""


def name_process(title: str) -> None:
    """Replace this process's command line with `title`; only Linux supports this.

    The title is cut to the command line's length, which is large in processes forked from a server.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        Path("/proc/self/comm").write_text(title[:15])
        fields = Path("/proc/self/stat").read_text("ascii", "replace").rpartition(")")[2].split()
        start, room = int(fields[ARG_START]), int(fields[ARG_END]) - int(fields[ARG_START])
        if start and room > 1:
            text = title.encode("ascii", "replace")[: room - 1]
            ctypes.memmove(start, text.ljust(room, b"\0"), room)
