"""What is known of the installed torch without loading it. Standard library only."""

from __future__ import annotations

import re
from functools import cache
from importlib import metadata


@cache
def torch_version() -> tuple[int, int] | None:
    """Return major and minor version; None where torch is not installed."""
    try:
        found = re.match(r"(\d+)\.(\d+)", metadata.version("torch"))
    except metadata.PackageNotFoundError:
        return None
    return (int(found[1]), int(found[2])) if found else None


def torch_packs_modules() -> bool:
    """Whether `fully_shard` can gather several modules as one group: from torch 2.13 on.

    Before, a group's hook ran for the first of its modules alone.
    """
    return (torch_version() or (2, 13)) >= (2, 13)


def torch_has_cuda() -> bool:
    """Whether torch is built for CUDA, judged by its version."""
    try:
        return not metadata.version("torch").endswith("+cpu")
    except metadata.PackageNotFoundError:
        return False
