"""What `ps` and `top` call a process."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path

ARG_START, ARG_END = 45, 46
"""Fields of /proc/self/stat after the process's name (proc(5): 48 and 49 of all)."""


def name_process(title: str) -> None:
    """Put `title` in the place of this process's command line; without effect but on Linux.

    No longer title than the command line was has room: what forks of a server have is long.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        Path("/proc/self/comm").write_text(title[:15])
        fields = Path("/proc/self/stat").read_text("ascii", "replace").rpartition(")")[2].split()
        start, room = int(fields[ARG_START]), int(fields[ARG_END]) - int(fields[ARG_START])
        if start and room > 1:
            text = title.encode("ascii", "replace")[: room - 1]
            ctypes.memmove(start, text.ljust(room, b"\0"), room)
