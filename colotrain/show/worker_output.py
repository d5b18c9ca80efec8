"""The last lines that workers wrote to stdout and stderr."""

from __future__ import annotations

import os
from pathlib import Path

from colotrain.rundir import RunDir
from colotrain.show.formatting import clean

TAIL_BYTES = 4 << 10
MOST_FILES = 8


def last_lines(rundir: RunDir, *, num: int = 60) -> tuple[str, ...]:
    """Return lines of the newest launch; the most recently written file's lines come last.

    Only the ends of the few most recently written files are read.
    """
    found = sorted((_written(path) for path in _logs(rundir)), reverse=True)[:MOST_FILES]
    lines: list[str] = []
    for _, path in reversed(found):
        rank, stream = path.parent.name, path.stem
        lines += [f"{rank} {stream}: {line}" for line in _tail(rundir, path)]
    return tuple(lines[-num:])


def _logs(rundir: RunDir) -> list[Path]:
    try:
        newest = max((entry for entry in rundir.logs.iterdir() if entry.is_dir()), default=None)
    except OSError:
        return []
    return list(newest.rglob("std*.log")) if newest is not None else []


def _written(path: Path) -> tuple[float, Path]:
    """Return (modification time, path); an empty file counts as oldest."""
    try:
        stat = path.stat()
    except OSError:
        return 0.0, path
    return (stat.st_mtime if stat.st_size else 0.0), path


def _tail(rundir: RunDir, path: Path) -> list[str]:
    try:
        with open(path, "rb", opener=rundir.open) as file:
            file.seek(0, os.SEEK_END)
            start = max(0, file.tell() - TAIL_BYTES)
            file.seek(start)
            text = file.read(TAIL_BYTES).decode("utf-8", "replace")
    except OSError:
        return []
    lines = text.splitlines()[1 if start else 0 :]
    return [shown for line in lines if (shown := clean(line))]
