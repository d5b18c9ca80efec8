"""Addresses of object stores, as in `runs_dir=s3://bucket/path`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from colotrain.errors import Problem

ADDRESS = re.compile(r"[a-z][a-z0-9+.-]*://[^\s?#]+")


def is_address(text: str) -> bool:
    return "://" in text


def run_address(runs_dir: str, name: str) -> str:
    """Return the address of the run `name` in the store of runs `runs_dir`."""
    return f"{runs_dir.rstrip('/')}/{name}"


def check_address(address: str | None) -> Iterator[Problem]:
    """Yield the problem of `runs_dir`, without its value where that may hold a secret."""
    if address is None:
        return
    secret = "@" in address or "?" in address
    if ADDRESS.fullmatch(address) and not secret and "::" not in address:
        return
    expected = "an address such as s3://bucket/path, or null: runs are in ./runs only"
    fix = "credentials are read from the environment" if secret else ""
    value = None if secret else address
    yield Problem(key="runs_dir", value=value, expected=expected, fix=fix)
