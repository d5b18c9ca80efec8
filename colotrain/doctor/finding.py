"""The result of a check: one line of text and a fix."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    check: str
    status: Status
    text: str
    fix: str = ""


def ok(check: str, text: str) -> Finding:
    return Finding(check=check, status="ok", text=text)


def warn(check: str, text: str, fix: str) -> Finding:
    """Finding about something that costs speed or comfort, or that only some runs need."""
    return Finding(check=check, status="warn", text=text, fix=fix)


def fail(check: str, text: str, fix: str) -> Finding:
    """Finding about something that would make a run fail."""
    return Finding(check=check, status="fail", text=text, fix=fix)


def graded(
    check: str, value: float, text: str, fix: str, *, least: float, few: float, ask: str = ""
) -> Finding:
    """Finding about a value: it fails below `least`; below `few` it warns, with the fix `ask`."""
    if value < least:
        return fail(check, text, fix)
    return warn(check, text, ask or fix) if value < few else ok(check, text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Folders, addresses and environment variables that the checks examine."""

    runs: Path
    cache: Path
    shm: Path = Path("/dev/shm")
    head: tuple[str, int] | None = None
    """Host and port on which node 0 listens; None where unknown."""
    rank: int = 0
    nodes: int = 1
    variables: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    host: str = field(default_factory=socket.gethostname)
    now: float = field(default_factory=time.time)
    """Unix seconds."""


def size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
